"""The numbers of a run, folded from its events alone as they happen.

Rule: memory grows with the requests that are in the engine at once, never with all there were.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    DropEvent,
    EndEvent,
    Event,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    PreemptEvent,
    RejectEvent,
    RestartEvent,
    RunEvent,
)
from batcher.metrics.distributions import Histogram
from batcher.metrics.latencies import TokenTimes
from batcher.metrics.positions import PositionCount
from batcher.metrics.resources import CacheUse, StepUse
from batcher.metrics.run_totals import RunTotals, TimedTotals, settings_of, summarize
from batcher.metrics.slo import GoodputCount, Slo
from batcher.metrics.slots import SlotUse
from batcher.metrics.speculation import SpeculationCount
from batcher.metrics.steps import WholeStep, is_untimed, open_feed
from batcher.metrics.summary import ConstraintCounts, RunSummary
from batcher.trace.aging import aging_of, is_aged
from batcher.trace.records import RequestTimeline
from batcher.trace.run import RequestFold

if TYPE_CHECKING:
    from batcher.metrics.timeseries import TimeSeries


_LEAVING = (AdmitEvent, FinishEvent, BlockedEvent)  # with one of them nothing else is blocked


class RunMetrics:
    """Takes in events, live or from a trace, and has the summary of them at any time.

    slo: what the run is measured by; its goodput is then told.  series: what the run over time is
    told to.  fold: the sequences of the run; None for a fold of its own.
    """

    def __init__(
        self,
        slo: Slo | None = None,
        series: "TimeSeries | None" = None,
        fold: RequestFold | None = None,
    ) -> None:
        self.fold = RequestFold() if fold is None else fold
        self.num_steps = self.num_requests = self.num_rejected = 0
        self.prompt_tokens = self.generated_tokens = 0
        self.longest_output = self.longest_run = self.num_cut = 0
        self.num_jumps = self.num_jumped_tokens = self.num_forks = 0
        self.constraints = ConstraintCounts(0, 0)
        self.finish_reasons: Counter[str] = Counter()
        self.wait, self.first_token, self.latency = Histogram(), Histogram(), Histogram()
        self.slots, self.positions = SlotUse(), PositionCount()
        self._speculation = SpeculationCount()
        self._slo, self._series = slo, series
        self._run: RunEvent | None = None
        self._restart: RestartEvent | None = None
        self._timed: TimedMetrics | None = None
        self._first_arrival: float | None = None
        self._num_open = 0  # that have arrived and not ended
        self._blocked_steps: Counter[str] = Counter()

    def observe(self, events: Iterable[Event]) -> None:
        """Take in the next events of the run.

        Raises:
            BatchdecodeError: one is of a trace that says what cannot be.
            InvariantError: one contradicts those before it.
        """
        fold = self.fold
        for event in events:  # no `match`: it takes twice as long, three times a request
            blocked = fold.blocked
            if type(event) is ArriveEvent:
                found: RequestTimeline | None = fold.arrive(event)
                self._arrive(event)
            elif type(event) is AdmitEvent:
                found = fold.admit(event)
                self._admit(event, found)
            elif type(event) is FinishEvent:
                found = fold.finish(event)
                self._finish(event, found)
            else:
                found = fold.take(event)
                self.positions.take(event, found)
                self._count(event, found)
            if blocked is not None and blocked is not fold.blocked and isinstance(event, _LEAVING):
                self._blocked_steps[blocked.reason] += max(0, event.step - blocked.step)
            if self._timed is not None:
                self._timed.observe(event, found)

    @property
    def run(self) -> RunEvent | None:
        """What began the run, None before."""
        return self._run

    def close(self, num_steps: int) -> None:
        """Let the series know all of a run of `num_steps`, which may be broken off."""
        if self._timed is not None:
            self._timed.close(num_steps)

    def _count(self, event: Event, found: RequestTimeline | None) -> None:
        """Take in an event of a kind that is rare, which tells of `found`."""
        match event:
            case RunEvent():
                self.slots.num_slots = event.batch
                self._run = event
                is_timed = not is_untimed(event)
                if self._slo is not None or self._series is not None or is_timed:
                    self._timed = TimedMetrics(event, self._slo, self._series)
            case EndEvent():
                self.num_steps = event.steps
            case PreemptEvent():
                self.slots.leave(event.step)
            case BlockedEvent():
                self.slots.block(event.step, event.reason)
            case JumpEvent():
                self.num_jumps += 1
                self.num_jumped_tokens += event.tokens
            case ForkEvent():
                self.num_forks += 1
            case DropEvent():
                self.finish_reasons[event.reason] -= 1
            case RejectEvent():
                self.num_rejected += 1
            case _:
                self._speculation.take(event, found)

    def go_on_from(self, event: RestartEvent) -> None:
        """Let the steps begin where those of another worker end, behind the first event.

        What the two have done adds up as `in_turn` says.
        """
        self._restart, self.num_steps = event, event.step
        self.slots.go_on_from(event.step)
        if self._timed is not None:
            self._timed.go_on_from(event)

    def _blocked_until(self, num_steps: int) -> Counter[str] | None:
        """Return how long each reason held in a run of `num_steps`, None if none ever did."""
        steps, blocked = Counter(self._blocked_steps), self.fold.blocked
        if blocked is not None:
            steps[blocked.reason] += max(0, num_steps - blocked.step)
        elif not steps:
            return None
        return steps

    def note_constraints(self, compiled: int, cache_hits: int) -> None:
        """Take note of the grammars of the whole run so far, which no event tells of."""
        self.constraints = ConstraintCounts(compiled, cache_hits)

    def summary(self, num_steps: int = 0) -> RunSummary:
        """Return the numbers so far; see `totals`."""
        return summarize(self.totals(num_steps), self._run, self._slo)

    def totals(self, num_steps: int = 0) -> RunTotals:
        """Return what adds up so far; some of it is still counted on.

        `num_steps` is how many steps were taken, which the events of a run that is broken off may
        not tell.
        """
        steps = max(self.num_steps, self.slots.integrated_steps, num_steps)
        busy, idle = self.slots.totals(steps)
        positions = self.positions.positions(steps, busy)
        if self._timed is not None:
            self._timed.catch_up(steps)
        return RunTotals(
            num_slots=self.slots.num_slots,
            num_steps=steps,
            num_requests=self.num_requests,
            num_rejected=self.num_rejected,
            num_unfinished=self._num_open,
            num_open=sum(not r.index and r.arrive is not None for r in self.fold.open),
            finish_reasons=self.finish_reasons,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            longest_output=self.longest_output,
            longest_run=self.longest_run,
            num_cut=self.num_cut,
            busy=busy,
            idle=idle,
            num_positions=positions.total,
            num_padding=positions.padding,
            num_jumps=self.num_jumps,
            num_jumped_tokens=self.num_jumped_tokens,
            num_forks=self.num_forks,
            num_compiled=self.constraints.compiled,
            num_compiled_before=self.constraints.cache_hits,
            first_arrival=self._first_arrival,
            wait=self.wait,
            first_token=self.first_token,
            latency=self.latency,
            blocked_steps=self._blocked_until(steps),
            speculation=self._speculation.totals_after(steps, self.fold.open),
            timed=None if self._timed is None else self._timed.totals(),
        )

    def _arrive(self, event: ArriveEvent) -> None:
        self._num_open += 1
        if self._first_arrival is None or event.time < self._first_arrival:
            self._first_arrival = event.time
        if not event.index:
            self.num_requests += 1
            self.prompt_tokens += event.prompt_tokens
        if event.deadline is not None and self._timed is None and self._run is not None:
            self._timed = TimedMetrics(self._run, None, None)  # from the first of them on
            if self._restart is not None:
                self._timed.go_on_from(self._restart)

    def _admit(self, event: AdmitEvent, found: RequestTimeline) -> None:
        arrive = found.arrive
        if arrive is None:
            self.slots.join(event.step)
            self.positions.begun += event.tokens - 1
            return
        self.positions.begun += (event.tokens or arrive.prompt_tokens) - event.cached - 1
        self.num_steps = event.step + 1
        if len(found.admissions) == 1:
            self.slots.take(event.step, arrive)
            self.wait.add(event.step - arrive.step)
        else:
            self.slots.take_again(event.step, found.waits_from)

    def _count_prompt(self, num_tokens: int | None, found: RequestTimeline) -> None:
        """Take in how long a prompt is, if a server says it, whatever its request could say."""
        if num_tokens is not None and not found.index:
            known = 0 if found.arrive is None else found.arrive.prompt_tokens
            self.prompt_tokens += num_tokens - known

    def _finish(self, event: FinishEvent, found: RequestTimeline) -> None:
        self.finish_reasons[event.reason] += 1  # of "unused" nothing is said
        self._count_prompt(event.prompt_tokens, found)
        if self.num_jumps:
            self.positions.finish(event)
        if self._speculation.has_drafts:
            self._speculation.finish(event, found)
        self.generated_tokens += event.tokens
        if event.tokens > self.longest_output:  # noqa: PLR1730 - as in Histogram.add
            self.longest_output = event.tokens
        if event.slot is not None:
            self.slots.leave(event.step + 1)
        arrive = found.arrive
        if arrive is None:  # it came along with another one, or was aborted before it arrived
            self.num_requests += event.index == 0 and event.role != "negative"
            return
        self._num_open -= 1
        admissions = found.admissions
        if not admissions:
            return
        end, admitted = event.step + 1, admissions[0].event.step
        if end - admitted > self.longest_run:  # noqa: PLR1730 - max() takes twice as long
            self.longest_run = end - admitted
        first_token = admissions[0].first_token if len(admissions) == 1 else found.first_token
        if event.tokens and first_token is not None:
            self.first_token.add(first_token + 1 - arrive.step)
        self.num_cut += arrive.default_limit and event.reason == "length"
        if event.reason in {"stop", "length"}:
            self.latency.add(end - arrive.step)


class TimedMetrics:
    """Takes in the events of a run after its first, and has those numbers at any time.

    slo: what the run is measured by.  series: what the run over time is told to.

    Raises:
        BatchdecodeError: the run event has settings that there are not.
    """

    def __init__(self, run: RunEvent, slo: Slo | None, series: "TimeSeries | None") -> None:
        self._settings = settings_of(run)
        self._slo, self._series = slo, series
        self._feed = open_feed(run)
        self._times = TokenTimes()
        self._steps = StepUse()
        self._cache = CacheUse()
        self._goodput = GoodputCount()
        self._aging, self._num_aged = aging_of(run), 0
        self._end = 0.0  # of the last step
        if series is not None:
            series.total_blocks = self._settings.kv_blocks
            series.has_drafts = bool(run.speculation)

    def go_on_from(self, event: RestartEvent) -> None:
        """Let the steps begin where those of another worker end."""
        self._feed.go_on_from(event.step, event.time)
        self._end = event.time

    def observe(self, event: Event, found: RequestTimeline | None) -> None:
        """Take in the next event, which tells of `found`."""
        for step in self._feed.take(event, found):
            self._take(step)
        if found is not None:
            self._cache.observe(event, found)
            if self._aging is not None and isinstance(event, AdmitEvent):
                self._num_aged += is_aged(event, found.arrive, self._aging)
        elif isinstance(event, EndEvent):
            rest = self._feed.take_events()
            for ended in self._times.interrupt(rest):
                self._goodput.add(ended, self._slo)
            if self._series is not None:
                self._series.take_rest(rest)

    def catch_up(self, num_steps: int) -> None:
        """Take in the steps before `num_steps`, of which no more events come."""
        for step in self._feed.catch_up(num_steps):
            self._take(step)

    def totals(self) -> TimedTotals:
        """Return what adds up of the steps so far."""
        times = self._times.times
        return TimedTotals(
            times, self._steps, self._cache, self._goodput, self._end, self._num_aged
        )

    def close(self, num_steps: int) -> None:
        """Tell the series all that is left of a run of `num_steps`, which may be broken off."""
        self.catch_up(num_steps)
        if self._series is not None:
            self._series.take_rest(self._feed.take_events())

    def _take(self, step: WholeStep) -> None:
        self._end = step.end
        self._steps.observe(step, self._settings)
        given, all_ended = self._times.observe(step)
        for ended in all_ended:
            self._goodput.add(ended, self._slo)
        if self._series is not None:
            self._series.take(step, given)
