"""Studies: each answers one question about a model."""
