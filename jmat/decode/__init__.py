"""Writes text with a causal model: prompts, sampling, the loop over tokens, and what
comes out of it.
"""
