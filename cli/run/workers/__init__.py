"""A run whose requests are decoded by several workers: who has which lines, and what comes back."""
