"""Explains a run from its events: the story of each request, and the difference of two runs."""
