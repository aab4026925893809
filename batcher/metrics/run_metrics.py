"""The numbers of a run, folded from its events alone as they happen.

Rule: memory grows with the requests that are in the engine at once, never with all there were.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from batcher.errors import BatchdecodeError
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    BlockedReason,
    DropEvent,
    EndEvent,
    Event,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    PreemptEvent,
    RejectEvent,
    RunEvent,
)
from batcher.metrics.distributions import Histogram, SecondsHistogram
from batcher.metrics.latencies import TokenTimes
from batcher.metrics.positions import PositionCount
from batcher.metrics.resources import BlockedSteps, CacheUse, StepUse
from batcher.metrics.slo import GoodputCount, Slo
from batcher.metrics.slots import SlotUse
from batcher.metrics.speculation import SpeculationCount
from batcher.metrics.steps import WholeStep, is_untimed, open_feed
from batcher.metrics.summary import ConstraintCounts, FinishCounts, RunSummary, Throughput
from batcher.settings import DEFAULT_SCHEDULING, SchedulingSettings
from batcher.timeline.fold import RequestFold
from batcher.timeline.records import RequestTimeline

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
        self.longest_output = self.longest_run = 0
        self.num_jumps = self.num_jumped_tokens = self.num_forks = 0
        self.constraints = ConstraintCounts(0, 0)
        self.finish_reasons: Counter[str] = Counter()
        self.wait, self.first_token, self.latency = Histogram(), Histogram(), Histogram()
        self.slots, self.positions = SlotUse(), PositionCount()
        self._speculation = SpeculationCount()
        self._slo, self._series = slo, series
        self._run: RunEvent | None = None
        self._timed: TimedMetrics | None = None
        self._is_untimed = True
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
    def times(self) -> Mapping[str, SecondsHistogram]:
        """How latencies are distributed, by the names of Latencies; none if nobody asks."""
        return {} if self._timed is None else self._timed.times

    def close(self, num_steps: int) -> None:
        """Let the series know all of a run of `num_steps`, which may be broken off."""
        if self._timed is not None:
            self._timed.close(num_steps)

    def _count(self, event: Event, found: RequestTimeline | None) -> None:
        """Take in an event of a kind that is rare, which tells of `found`."""
        match event:
            case RunEvent():
                self.slots.num_slots = event.batch
                self._speculation.begin(event)
                self._run, self._is_untimed = event, is_untimed(event)
                if self._slo is not None or self._series is not None or not self._is_untimed:
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

    def _blocked_until(self, num_steps: int) -> BlockedSteps | None:
        """Return how long each reason held in a run of `num_steps`, None if none ever did."""
        steps, blocked = Counter(self._blocked_steps), self.fold.blocked
        if blocked is not None:
            steps[blocked.reason] += max(0, num_steps - blocked.step)
        elif not steps:
            return None
        return BlockedSteps(**{reason: steps[reason] for reason in get_args(BlockedReason)})

    def note_constraints(self, compiled: int, cache_hits: int) -> None:
        """Take note of the grammars of the whole run so far, which no event tells of."""
        self.constraints = ConstraintCounts(compiled, cache_hits)

    def summary(self, num_steps: int = 0) -> RunSummary:
        """Return the numbers so far.

        `num_steps` is how many steps were taken, which the events of a run that is broken off may
        not tell.
        """
        reasons = self.finish_reasons
        steps = max(self.num_steps, self.slots.integrated_steps, num_steps)
        batch, tokens = self.slots.num_slots, self.generated_tokens
        busy, idle = self.slots.totals(steps)
        num_ok = reasons["stop"] + reasons["length"]
        num_failed = reasons["error"] + self.num_rejected
        num_unfinished = self._num_open
        positions = self.positions.positions(steps, busy)
        timed: dict[str, Any] = {}
        if self._timed is not None:
            first = self._first_arrival or 0.0
            timed = self._timed.numbers(steps, first, num_ok, self.prompt_tokens, tokens)
        return RunSummary(
            requests=self.num_requests + self.num_rejected,
            outputs=num_ok + num_failed + reasons["aborted"] + num_unfinished,
            ok=num_ok,
            failed=num_failed,
            rejected=self.num_rejected,
            aborted=reasons["aborted"],
            unfinished=num_unfinished,
            finish_reasons=FinishCounts(
                reasons["stop"], reasons["length"], num_failed, reasons["aborted"]
            ),
            prompt_tokens=self.prompt_tokens,
            generated_tokens=tokens,
            longest_output=self.longest_output,
            batch=batch,
            steps=steps,
            least_steps=self._least_steps(busy),
            tokens_per_step=round(tokens / steps, 3) if steps else 0.0,
            busy_slot_steps=busy,
            idle_slot_steps=steps * batch - busy,
            busy_share=round(busy / (steps * batch), 6) if steps else 0.0,
            idle=idle,
            positions=positions,
            jumps=self.num_jumps,
            jumped_tokens=self.num_jumped_tokens,
            forks=self.num_forks,
            constraints=self.constraints,
            wait=self.wait.distribution(),
            first_token=self.first_token.distribution(),
            latency=self.latency.distribution(),
            blocked=self._blocked_until(steps),
            speculation=self._speculation.numbers(self.fold.open, steps, positions.total),
            **timed,
        )

    def _least_steps(self, busy: int) -> int:
        """Return what any schedule needs for these outputs, of which slots were `busy` so long."""
        if not self._is_untimed:  # slots are also held for what another schedule need not compute
            num_beside = self.num_jumped_tokens + self._speculation.counts.num_accepted
            busy, longest = max(0, self.generated_tokens - num_beside), 0
        else:
            longest = self.longest_run
        return max(-(-busy // self.slots.num_slots), longest) if busy else 0

    def _arrive(self, event: ArriveEvent) -> None:
        self._num_open += 1
        if self._first_arrival is None or event.time < self._first_arrival:
            self._first_arrival = event.time
        if not event.index:
            self.num_requests += 1
            self.prompt_tokens += event.prompt_tokens
        if event.deadline is not None and self._timed is None and self._run is not None:
            self._timed = TimedMetrics(self._run, None, None)  # from the first of them on

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
        self._is_untimed = is_untimed(run)
        self._has_slo, self._series = slo is not None, series
        self._feed = open_feed(run)
        self._times = TokenTimes()
        self._steps = StepUse(self._settings)
        self._cache = CacheUse()
        self._goodput = GoodputCount(slo)
        self._end = 0.0  # of the last step
        if series is not None:
            series.total_blocks = self._settings.kv_blocks
            series.has_drafts = bool(run.speculation)

    def observe(self, event: Event, found: RequestTimeline | None) -> None:
        """Take in the next event, which tells of `found`."""
        for step in self._feed.take(event, found):
            self._take(step)
        if found is not None:
            self._cache.observe(event, found)
        elif isinstance(event, EndEvent):
            rest = self._feed.take_events()
            for ended in self._times.interrupt(rest):
                self._goodput.add(ended)
            if self._series is not None:
                self._series.take_rest(rest)

    @property
    def times(self) -> Mapping[str, SecondsHistogram]:
        """How latencies are distributed, by the names of Latencies."""
        return self._times.times

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
    ) -> dict[str, Any]:
        """Return fields of the summary of a run of `num_steps` that has done so much else."""
        self.catch_up(num_steps)
        makespan = self._end - first_arrival
        numbers: dict[str, Any] = {"goodput": self._goodput.goodput(makespan)}
        if not self._is_untimed or self._has_slo:
            numbers["latencies"] = self._times.latencies()
            if makespan > 0:
                numbers["throughput"] = Throughput(
                    makespan=round(makespan, 6),
                    requests=round(num_ok / makespan, 6),
                    prompt_tokens=round(prompt_tokens / makespan, 3),
                    output_tokens=round(output_tokens / makespan, 3),
                )
        if not self._is_untimed:
            numbers |= {
                "kv": self._steps.kv(),
                "budget": self._steps.budget(),
                "computed": self._steps.computed(),
            }
        if self._settings.has_prefix_cache:
            numbers["prefix_cache"] = self._cache.prefix()
        if self._settings.kv_blocks is not None:
            numbers["preemptions"] = self._cache.preemptions()
        return numbers

    def close(self, num_steps: int) -> None:
        """Tell the series all that is left of a run of `num_steps`, which may be broken off."""
        self.catch_up(num_steps)
        if self._series is not None:
            self._series.take_rest(self._feed.take_events())

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
