"""The live view: what a run looks like now, folded from its events and drawn by rich's Live."""
