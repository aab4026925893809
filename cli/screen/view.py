"""What may be shown of a run while it runs, and what a view is told of it."""

import time
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self

from .terminal import Terminal

if TYPE_CHECKING:
    from batcher.scheduling.blocks import BlockUse
    from batcher.trace.run import RequestFold


class HeldBlocks(NamedTuple):
    """KV blocks that sequences hold, and free ones if there is a limit; cached ones are unknown."""

    used: int
    free: int | None
    cached: None = None


class GaugeReading(NamedTuple):
    """What events do not report of a run, at one time.

    now: the engine's time, in seconds.  num_free: slots that the next step can fill.  next_up: the
    next request to be admitted, if known.  num_queued: arrived outputs without a slot.  num_coming:
    those to arrive, as far as known.
    """

    now: float
    num_free: int
    next_up: str | None
    block_use: "BlockUse | HeldBlocks | None"
    num_queued: int = 0
    num_coming: int = 0


class Gauges(Protocol):
    """What events do not report of a run; by default little is known."""

    @property
    def current_step(self) -> int | None:
        """The step that is being computed, None between two; for any thread."""
        return None

    def read_gauges(self) -> GaugeReading:
        """Return the present state; for the thread of the run, since it may tidy its queue."""

    def find_upcoming(self, text: str) -> str | None:  # noqa: ARG002 - by default
        """Return the id of a request to come: `text`, or else the first with it; for any thread."""
        return None

    def knows_upcoming(self) -> bool:
        """Return whether `find_upcoming` knows all requests to come; for any thread."""
        return False


class RunPlan(NamedTuple):
    """What is known of a run before it starts.

    total: its requests, or None.  is_timed: whether the engine's time is not the number of steps.
    is_endless: whether a server waits for requests.  batch_size: of all num_workers together.
    """

    title: str
    policy: str
    batch_size: int
    total: int | None
    is_timed: bool
    is_endless: bool = False
    num_workers: int = 1


class View:
    """Shows nothing of a run but messages; other views show more.

    is_watched: whether it wants to know of steps.  lock: keeps drawing in another thread apart from
    the fold.  fold: the sequences it reads, or None.  The owner of the events feeds it, and sets
    paces, the last step of each of several workers, under `lock` and before `after_step`.
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
        """Take in what the fold has learned without a step, if it is much."""

    def still_computing(self, step: int) -> None:
        """Show that the run still computes `step`; for any thread."""

    def refresh(self) -> float:
        """Show what is not shown yet, before the run waits or while it does.

        Return the seconds after which there will be something more to show, 0 for never.
        """
        return 0.0

    def wait(self, seconds: float) -> None:
        """Wait that long, or less if there may be something to do before."""
        time.sleep(seconds)

    def step_aside(self) -> None:
        """Leave the terminal to another program; a signal handler may call this."""

    def write_message(self, text: str) -> None:
        """Write whole lines for people where they spoil nothing; drop them if that fails."""
        with suppress(OSError):
            self._terminal.write(text)

    def close(self) -> None:
        """Show the end and release the terminal; more calls, even by a signal, do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


LiveChoice = Literal["auto", "always", "plain", "never"]
