"""Passes over a corpus: activations that are stored, moments that are summed, and what
a killed pass goes on from.
"""
