"""Checkpoints: hub ids, Hugging Face folders, their tensor files, GGUF."""

from jmat.checkpoint.model import load_model, parameters, save_model, with_parameters

__all__ = ["load_model", "parameters", "save_model", "with_parameters"]
