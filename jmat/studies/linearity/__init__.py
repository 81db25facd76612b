"""Linearity of every step and part of a model: the passes that measure it, and the rows and plots that tell of it."""
