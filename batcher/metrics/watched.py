"""The numbers of a run that are told while it goes on, and what is asked of its engine for them."""

from operator import add
from typing import Protocol

from msgspec import Struct

from batcher.events import DropEvent, Event, FinishEvent, RunEvent
from batcher.metrics.run_metrics import RunMetrics, TimedMetrics
from batcher.metrics.run_totals import EndedTotals, RunTotals
from batcher.metrics.slo import Slo
from batcher.metrics.timeseries import TimeSeries
from batcher.request import NOTHING_UNREAD, Unread
from batcher.trace.records import RequestTimeline
from batcher.trace.run import RequestFold


class EngineState(Struct, frozen=True):
    """How an engine stands at one time.

    num_waiting: outputs that have arrived and hold no slot.  num_coming: those that have not
    arrived.  kv_share: which share of the blocks sequences hold, 0 if there is no limit to them.
    """

    num_slots: int
    num_running: int = 0
    num_waiting: int = 0
    kv_share: float = 0.0
    num_coming: int = 0


def state_of(engine: "WatchedEngine", backlog: Unread = NOTHING_UNREAD) -> EngineState:
    """Return how an engine stands now, if what it does not know of is for it."""
    use, kv_share = engine.block_use, 0.0
    if use is not None and use.free is not None:
        kv_share = use.used / (use.used + use.cached + use.free)
    num_waiting, num_coming = map(add, (engine.num_waiting, engine.num_coming), backlog)
    return EngineState(engine.batch_size, engine.num_running, num_waiting, kv_share, num_coming)


class WatchedMetrics(RunMetrics):
    """The numbers of a run with those that are told of it beside its summary, which is the same.

    Times are counted whatever the run; see EndedTotals.
    """

    def __init__(
        self,
        slo: Slo | None = None,
        series: TimeSeries | None = None,
        fold: RequestFold | None = None,
    ) -> None:
        super().__init__(slo, series, fold)
        self.ended = EndedTotals()

    def totals(self, num_steps: int = 0) -> RunTotals:
        """Return what adds up so far; see RunMetrics."""
        totals = super().totals(num_steps)
        totals.ended = self.ended
        return totals

    def _count(self, event: Event, found: RequestTimeline | None) -> None:
        super()._count(event, found)
        if isinstance(event, DropEvent):
            self.ended.dropped[event.reason] += 1
        elif isinstance(event, RunEvent) and self._timed is None:
            self._timed = TimedMetrics(event, None, self._series)

    def _finish(self, event: FinishEvent, found: RequestTimeline) -> None:
        super()._finish(event, found)
        if event.reason != "unused":
            self.ended.outputs.add(event.tokens)
        if found.arrive is not None and not event.index:
            told = event.prompt_tokens  # by a server, whatever its request could say
            self.ended.prompts.add(found.arrive.prompt_tokens if told is None else told)


class BlockCounts(Protocol):
    """What KV blocks are used for; see BlockUse."""

    @property
    def used(self) -> int:
        """How many sequences hold."""

    @property
    def cached(self) -> int:
        """How many nobody holds, that can be found."""

    @property
    def free(self) -> int | None:
        """How many are empty; None without a limit."""


class WatchedEngine(Protocol):
    """What is asked of an engine while it runs, from any thread; see DrivenEngine."""

    batch_size: int

    @property
    def num_steps(self) -> int:
        """How many steps were taken."""

    @property
    def num_running(self) -> int:
        """How many slots are held."""

    @property
    def num_waiting(self) -> int:
        """How many outputs are in the waiting queue."""

    @property
    def num_coming(self) -> int:
        """How many are known that have not arrived."""

    @property
    def block_use(self) -> BlockCounts | None:
        """What the KV blocks are used for; None if there are none."""
