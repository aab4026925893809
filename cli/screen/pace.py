"""How fast the steps of a run follow each other, as a person wants it."""

import math

from .cells import duration

DELAYS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""The seconds after a step that `-` and `+` choose from."""


class Pace:
    """Says how long a run stays after each step: for a moment, or until it is let go on.

    delay: that moment, in seconds.  is_paused: whether it stays until a key is pressed.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.delay, self.is_paused = delay, False
        self._since = 0.0  # the time of the last step
        self._num_let = 0  # steps that may be made all the same while it is paused

    @property
    def is_slow(self) -> bool:
        """Whether each step is to be seen."""
        return self.is_paused or self.delay > 0

    def press(self, key: str) -> bool:
        """Do what a key asks for; return whether it asks for anything here."""
        match key:
            case " ":
                self.is_paused, self._num_let = not self.is_paused, 0
            case ".":
                self._num_let += self.is_paused
                self.is_paused = True
            case "-":
                self.delay = next((more for more in DELAYS if more > self.delay), self.delay)
            case "+" | "=":
                self.delay = max((less for less in DELAYS if less < self.delay), default=0.0)
            case _:
                return False
        return True

    def begin(self, now: float) -> None:
        """Stay, from now on, after a step that was just made."""
        self._since = now

    def time_left(self, now: float) -> float:
        """Return the seconds until the next step may be made, infinity if nobody knows.

        Once it is 0 the next step is taken to be made.
        """
        if not self.is_paused:
            return max(self._since + self.delay - now, 0.0)
        if not self._num_let:
            return math.inf
        self._num_let -= 1
        return 0.0

    def __str__(self) -> str:
        if self.is_paused:
            return "paused: space goes on, . makes one step"
        return f"{duration(self.delay)} after each step" if self.delay else ""
