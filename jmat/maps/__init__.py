"""Maps that stand in for parts of a model: their types, how they are fitted, and their
files.
"""
