"""The interface between a run and its views."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from .terminal import Terminal

MAX_LISTED = 40  # waiting and finished requests that are shown
if TYPE_CHECKING:
    from batcher.events import SequenceName
    from batcher.scheduling.blocks import BlockUse
    from batcher.trace.run import RequestFold


class HeldBlocks(NamedTuple):
    """KV blocks that sequences hold, and free ones if there is a limit."""

    used: int
    free: int | None
    cached: None = None


class GaugeReading(NamedTuple):
    """The state of a run that its events do not report.

    now: the engine's time in seconds.  num_free: slots that the next step can fill.  next_up: the
    next request to be admitted, if known.  num_queued: arrived outputs without a slot.  num_coming:
    known outputs that have not arrived.  waiting: the first of the queue, in order, if known.
    """

    now: float
    num_free: int
    next_up: str | None
    block_use: "BlockUse | HeldBlocks | None"
    num_queued: int = 0
    num_coming: int = 0
    waiting: "Sequence[SequenceName]" = ()


class Gauges(Protocol):
    """A source of GaugeReadings.  Only the run's thread may call `read_gauges` and `peek`."""

    @property
    def current_step(self) -> int | None:
        """The step that is being computed, None between steps."""
        return None

    def read_gauges(self) -> GaugeReading:
        """Return the present state."""

    def peek(self, request_id: str, index: int, num_tokens: int) -> tuple[str, str] | None:  # noqa: ARG002
        """Return the prompt and the text so far of an output that has not ended, if known."""
        return None

    def find_upcoming(self, text: str) -> str | None:  # noqa: ARG002 - by default
        """Return the id of an unread request: `text`, or else the first that contains it."""
        return None

    def knows_upcoming(self) -> bool:
        """Return whether `find_upcoming` knows all unread requests."""
        return False


class RunPlan(NamedTuple):
    """The facts of a run before it starts.

    batch_size: the slots of all workers.  total: the number of requests, if known.  is_timed: the
    engine's time is not the number of steps.  is_endless: a server waits for requests.
    """

    title: str
    policy: str
    batch_size: int
    total: int | None
    is_timed: bool
    is_endless: bool = False
    num_workers: int = 1


class View(AbstractContextManager["View"]):
    """A view that shows messages only; the base of the others.

    is_watched: it wants `after_step`.  fold: the sequences it reads, or None.  The owner of the
    events feeds the fold, and sets paces, the last step of each of several workers, before
    `after_step` and under `lock`, since another thread may draw.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self.is_watched = type(self) is not View
        self.fold: RequestFold | None = None
        self.paces: list[int] = []
        self.lock: AbstractContextManager[object] = nullcontext()

    def after_step(self, step: int) -> None:
        """Show the run after `step`, if it is time to."""

    def keep_up(self) -> None:
        """Process events that came without a step, if there are many."""

    def still_computing(self, step: int) -> None:
        """Show that the run still computes `step`; for any thread."""

    def refresh(self) -> float:
        """Show the latest state while the run waits.

        Return the seconds after which to call this again, 0 for never.
        """
        return 0.0

    def wait(self, seconds: float) -> None:
        """Wait that long, or until there may be something to do."""
        time.sleep(seconds)

    def note_results(self, lines: Sequence[bytes]) -> None:
        """Note lines of results that were written, to show them."""

    def step_aside(self) -> None:
        """Leave the terminal to another program; a signal handler may call this."""

    def write_message(self, text: str) -> None:
        """Write whole lines above the picture; ignore errors."""
        with suppress(OSError):
            self._terminal.write(text)

    def close(self) -> None:
        """Show the end and release the terminal; further calls do nothing."""

    def __exit__(self, *_: object) -> None:
        self.close()


LiveChoice = Literal["auto", "always", "plain", "never"]
