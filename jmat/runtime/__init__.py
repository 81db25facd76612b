"""Devices, processes, files and clocks: all that knows nothing of transformers."""
