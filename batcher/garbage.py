"""How often Python looks for garbage: of what a run makes, hardly anything is in a cycle."""

import gc

GARBAGE_EVERY = 10_000
"""After so many new objects garbage is looked for: of 700, as usual, hardly any is garbage here."""


def look_seldom() -> None:
    """Look for garbage from here on, seldom, and never among what is there by now."""
    gc.freeze()  # modules are none: 10 % less time for three requests
    gc.set_threshold(GARBAGE_EVERY)
    gc.enable()
