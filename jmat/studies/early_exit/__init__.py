"""Early exit: thresholds, what they cost and keep, and forward passes that truly stop."""
