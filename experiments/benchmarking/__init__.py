"""Measures how fast and how exact jmat is, against what people use: the parts of
`experiments.benchmark`.
"""
