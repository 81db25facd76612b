"""Depth pruning: which blocks to remove, what stands in for them, what that costs, and the smaller model."""
