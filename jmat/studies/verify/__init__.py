"""A checkpoint against transformers on PyTorch, site by site."""
