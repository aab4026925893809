"""Trains small Llamas and their drafts; what needs torch is imported where it is used."""
