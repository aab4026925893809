"""Terminal output of a run: the live view, the summary, and terminal capabilities."""
