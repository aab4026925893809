"""The numbers of a run that depend on how long its steps took, or on what they computed."""

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.events import (
    EndEvent,
    Event,
    RunEvent,
)
from batcher.metrics.latencies import Latencies, TokenTimes
from batcher.metrics.resources import (
    BudgetUse,
    CacheUse,
    Computed,
    KvUse,
    Preemptions,
    PrefixHits,
    StepUse,
)
from batcher.metrics.slo import Goodput, GoodputCount, Slo
from batcher.metrics.steps import WholeStep, is_plain, open_feed
from batcher.metrics.summary import Throughput
from batcher.settings import DEFAULT_SCHEDULING, SchedulingSettings
from batcher.timeline.requests import RequestTimeline

if TYPE_CHECKING:
    from batcher.metrics.timeseries import TimeSeries


class TimedNumbers(Struct, frozen=True, kw_only=True):
    """Those fields of a RunSummary, by the same names."""

    latencies: Latencies | None = None
    throughput: Throughput | None = None
    goodput: Goodput | None = None
    kv: KvUse | None = None
    budget: BudgetUse | None = None
    prefix_cache: PrefixHits | None = None
    preemptions: Preemptions | None = None
    computed: Computed | None = None


class TimedMetrics:
    """Takes in the events of a run after its first, and has those numbers at any time.

    slo: what the run is measured by.  series: what the run over time is told to.

    Raises:
        BatchdecodeError: the run event has settings that there are not.
    """

    def __init__(self, run: RunEvent, slo: Slo | None, series: "TimeSeries | None") -> None:
        self._settings = settings_of(run)
        self._is_plain = is_plain(run)
        self._has_slo, self._series = slo is not None, series
        self._feed = open_feed(run)
        self._times = TokenTimes()
        self._steps = StepUse(self._settings)
        self._cache = CacheUse()
        self._goodput = GoodputCount(slo)
        self._end = 0.0  # of the last step
        if series is not None:
            series.total_blocks = self._settings.kv_blocks

    def observe(self, event: Event, found: RequestTimeline | None) -> None:
        """Take in the next event, which tells of `found`."""
        for step in self._feed.take(event, found):
            self._take(step)
        if found is not None:
            self._cache.observe(event, found)
        elif isinstance(event, EndEvent):
            rest = self._feed.rest()
            for ended in self._times.interrupt(rest):
                self._goodput.add(ended)
            if self._series is not None:
                self._series.take_rest(rest)

    def catch_up(self, num_steps: int) -> None:
        """Take in the steps before `num_steps`, of which no more events come."""
        for step in self._feed.catch_up(num_steps):
            self._take(step)

    def numbers(
        self,
        num_steps: int,
        first_arrival: float,
        num_ok: int,
        prompt_tokens: int,
        output_tokens: int,
    ) -> TimedNumbers:
        """Return the numbers of a run of `num_steps` that has done so much else."""
        self.catch_up(num_steps)
        makespan = self._end - first_arrival
        numbers: dict[str, Any] = {"goodput": self._goodput.goodput(makespan)}
        if not self._is_plain or self._has_slo:
            numbers["latencies"] = self._times.latencies()
            if makespan > 0:
                numbers["throughput"] = Throughput(
                    makespan=round(makespan, 6),
                    requests=round(num_ok / makespan, 6),
                    prompt_tokens=round(prompt_tokens / makespan, 3),
                    output_tokens=round(output_tokens / makespan, 3),
                )
        if not self._is_plain:
            numbers |= {
                "kv": self._steps.kv(),
                "budget": self._steps.budget(),
                "computed": self._steps.computed(),
            }
        if self._settings.has_prefix_cache:
            numbers["prefix_cache"] = self._cache.prefix()
        if self._settings.kv_blocks is not None:
            numbers["preemptions"] = self._cache.preemptions()
        return TimedNumbers(**numbers)

    def close(self, num_steps: int) -> None:
        """Tell the series all that is left of a run of `num_steps`, which may be broken off."""
        self.catch_up(num_steps)
        if self._series is not None:
            self._series.take_rest(self._feed.rest())

    def _take(self, step: WholeStep) -> None:
        self._end = step.end
        self._steps.observe(step)
        given, all_ended = self._times.observe(step)
        for ended in all_ended:
            self._goodput.add(ended)
        if self._series is not None:
            self._series.take(step, given)


def settings_of(run: RunEvent) -> SchedulingSettings:
    """Return the settings that a run event holds.

    Raises:
        BatchdecodeError: one of them has no such value.
    """
    if not run.scheduling:
        return DEFAULT_SCHEDULING
    try:
        return msgspec.convert(run.scheduling, SchedulingSettings)
    except msgspec.ValidationError as error:
        raise BatchdecodeError(f"the run event of the trace: scheduling: {error}") from error
