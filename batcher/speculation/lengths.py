"""How many drafts each row is given, and what decides it step by step."""

from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct

from batcher.events import SpeculateReason


class LengthChange(Struct, frozen=True):
    """From the next step on the row in `slot` is given `tokens` drafts; reason: see SpeculateEvent.

    "gain" if these are more than before, "cost" if they are fewer.
    """

    slot: int
    tokens: int
    reason: SpeculateReason


class DraftLengths(Protocol):
    """Decides how many drafts each row is given, step by step."""

    def open(self, slot: int) -> None:
        """Begin a row."""

    def wanted(self, slots: Iterable[int]) -> dict[int, int]:
        """Return how many drafts rows are to be given in the next step; of none, no entry.

        slots: the rows that decode in it.
        """

    def learn(self, drafts: Iterable[tuple[int, int, int]]) -> None:
        """Take in what became of drafts: slots, how many each was given, and how many it kept."""

    def take_changes(self) -> list[LengthChange]:
        """Return what has changed since this was asked last."""

    def close(self, slot: int) -> None:
        """Forget the row in `slot`."""


class FixedLengths:
    """DraftLengths that are the same for all rows."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def open(self, slot: int) -> None:
        """Begin a row."""

    def wanted(self, slots: Iterable[int]) -> dict[int, int]:
        """Return the number for each of `slots`."""
        return dict.fromkeys(slots, self._num_drafts)

    def learn(self, drafts: Iterable[tuple[int, int, int]]) -> None:
        """Take in what changes nothing."""

    def take_changes(self) -> list[LengthChange]:
        """Return nothing."""
        return []

    def close(self, slot: int) -> None:
        """Forget the row in `slot`."""
