"""The player: a recorded run on the screen, step by step, forwards and backwards."""
