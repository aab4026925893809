"""The numbers of a run that are told while it goes on, and what is asked of its engine for them."""

import pickle
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from batcher.events import DropEvent, Event, FinishEvent, RunEvent
from batcher.metrics.distributions import Histogram, SecondsHistogram
from batcher.metrics.run_metrics import RunMetrics, TimedMetrics
from batcher.metrics.run_totals import RunTotals
from batcher.metrics.slo import Slo
from batcher.metrics.timeseries import TimeSeries
from batcher.timeline.fold import RequestFold
from batcher.timeline.records import RequestTimeline


class Snapshot(NamedTuple):
    """The numbers of a run at one time, which nobody changes; fields as of WatchedMetrics."""

    run: RunEvent | None
    totals: RunTotals
    prompts: Histogram
    outputs: Histogram
    dropped: Counter[str]

    @property
    def times(self) -> Mapping[str, SecondsHistogram]:
        """How latencies are distributed, by the names of Latencies."""
        return {} if self.totals.timed is None else self.totals.timed.times


class WatchedMetrics(RunMetrics):
    """The numbers of a run with those that are told of it beside its summary, which is the same.

    Times are counted whatever the run.  prompts, outputs: how many tokens those have that ended.
    dropped: samples that were counted as ended and are no results, by why they had ended.
    """

    def __init__(
        self,
        slo: Slo | None = None,
        series: TimeSeries | None = None,
        fold: RequestFold | None = None,
    ) -> None:
        super().__init__(slo, series, fold)
        self.prompts, self.outputs = Histogram(), Histogram()
        self.dropped: Counter[str] = Counter()

    def snapshot(self, num_steps: int) -> bytes:
        """Return the numbers after `num_steps`, a Snapshot, pickled: nothing copies it sooner."""
        totals = self.totals(num_steps)
        return pickle.dumps(Snapshot(self._run, totals, self.prompts, self.outputs, self.dropped))

    def _count(self, event: Event, found: RequestTimeline | None) -> None:
        super()._count(event, found)
        if isinstance(event, DropEvent):
            self.dropped[event.reason] += 1
        elif isinstance(event, RunEvent) and self._timed is None:
            self._timed = TimedMetrics(event, None, self._series)

    def _finish(self, event: FinishEvent, found: RequestTimeline) -> None:
        super()._finish(event, found)
        if event.reason != "unused":
            self.outputs.add(event.tokens)
        if found.arrive is not None and not event.index:
            told = event.prompt_tokens  # by a server, whatever its request could say
            self.prompts.add(found.arrive.prompt_tokens if told is None else told)


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
    def num_pending(self) -> int:
        """How many are known that have not joined it yet."""

    @property
    def block_use(self) -> BlockCounts | None:
        """What the KV blocks are used for; None if there are none."""
