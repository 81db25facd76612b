"""Training a language model, and penalties on how its stream moves."""
