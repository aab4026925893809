"""The rows of the batch, between a sequence that has a slot and what it has generated in it."""
