"""Transformers in numpy: their layers, their caches and their checkpoints."""
