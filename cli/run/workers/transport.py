"""How instructions get to workers and reports from them, as a Protocol."""

from typing import NamedTuple, Protocol

from batcher.events import RestartEvent, RestartReason

from .messages import Instruction, Report


class Died(NamedTuple):
    """A worker has come to an end that nobody asked for.

    how: in words.  reason, code: see RestartEvent.
    is_machine: its machine has, or the way there: that is held against no line.
    """

    how: str
    reason: RestartReason = "lost"
    code: int = 0
    is_machine: bool = False


Event = tuple[int, Report | Died]
"""The number of a worker, and what comes of it; after `Died` nothing does until it is started."""


class Transport(Protocol):
    """Starts workers, which are known by their numbers, and speaks to them."""

    def start(self, number: int, restart: RestartEvent | None = None) -> None:
        """Start the worker `number`, whose first report is `Ready`.

        restart: where it goes on, if it is in the place of one that has died.
        """

    def send(self, number: int, instruction: Instruction) -> None:
        """Tell a worker something; never waits, and never fails: that it died, `receive` tells."""

    def receive(self) -> list[Event]:
        """Wait until something has come of any worker, or `wake` is called; return what has."""

    def wake(self) -> None:
        """Let `receive` come back.  Any thread may call this."""

    def close(self) -> None:
        """End all workers, whatever they are doing."""
