"""What a person sees of a run: the live view, the summary, and what the terminal can show."""
