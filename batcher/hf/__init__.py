"""Causal language models of transformers as decoders; all but the settings need torch."""
