"""Speculative decoding: where drafts come from, and how many are worth it."""
