"""Measures of predictions and of linear maps, and their bootstrap intervals."""
