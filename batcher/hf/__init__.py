"""Causal language models of transformers as decoders; needs torch."""
