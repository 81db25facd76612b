"""Command-line experiments; each module answers one question."""
