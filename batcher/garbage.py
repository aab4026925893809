"""Settings of Python's garbage collector; hardly anything in a run is part of a cycle."""

import gc

GARBAGE_EVERY = 10_000
"""After so many new objects garbage is looked for: of 700, as usual, hardly any is garbage here."""


def look_seldom() -> None:
    """Collect garbage rarely from now on, and never among existing objects."""
    gc.freeze()  # modules are none: 10 % less time for three requests
    gc.set_threshold(GARBAGE_EVERY)
    gc.enable()
