"""The numbers of a run: events add to a Summary, and `RunTotals.report` derives its other numbers.

docs/reference/metrics.md defines every number.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import add, attrgetter
from typing import Any, ClassVar, Literal, TypeVar, get_args

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

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
    RestartEvent,
    RunEvent,
    SpeculateEvent,
    StepsEvent,
)
from batcher.metrics.counts import SlotUse, Speculation, SpeculationTotals, decode_steps_of
from batcher.metrics.slo import Goodput, Slo
from batcher.metrics.times import (
    NUM_DIGITS,
    Distribution,
    Histogram,
    Latencies,
    SecondsHistogram,
    StepFeed,
    TimeSeries,
    TokenTimes,
    WholeStep,
    is_untimed,
    share_of,
)
from batcher.request import NOTHING_UNREAD, Unread
from batcher.settings import DEFAULT_SCHEDULING, SchedulingSettings
from batcher.speculation.settings import Acceptance
from batcher.trace.run import RequestFold, RequestTimeline, Totals, aging_of, is_aged, is_follower

Unit = Literal["seconds", "steps"]
T = TypeVar("T")


def shown(kind: Callable[[], T]) -> T:
    """Return the default of a number that the JSON has even if it is 0 or null."""
    return field(default_factory=kind)


class Positions(Totals):
    """Computed positions, those with padding included."""

    total: int = 0
    padding: int = 0


class Constraints(Totals):
    """Compiled grammars, and outputs that reused one."""

    compiled: int = 0
    cache_hits: int = 0


class KvUse(Totals, kw_only=True):
    """KV blocks that sequences held, weighted by time; shares: None without a limit."""

    LARGEST: ClassVar = frozenset({"block_size", "total", "max_blocks"})

    block_size: int
    total: int | None
    mean_blocks: float = 0.0
    max_blocks: int = 0
    mean_share: float | None = None
    max_share: float | None = None


class BudgetUse(Totals, kw_only=True):
    """The used part of the token budget of steps."""

    LARGEST: ClassVar = frozenset({"max_batch_tokens"})

    max_batch_tokens: int
    mean_share: float = 0.0
    full_steps: int = 0


class PrefixHits(Totals):
    """Tokens that admissions looked for and found in the prefix cache; again: after preemptions."""

    asked: int = 0
    found: int = 0
    share: float = 0.0
    asked_again: int = 0
    found_again: int = 0


class Preemptions(Totals):
    """Preemptions of samples, or of all beams of a request, and the tokens to compute again."""

    count: int = 0
    recomputed_tokens: int = 0


class Computed(Totals, omit_defaults=True):
    """Computed tokens, and the padding of other layouts."""

    prefill_tokens: int = shown(int)
    decode_tokens: int = shown(int)
    right_padding: int = shown(int)
    left_padding: int = shown(int)
    prefill_share: float = shown(float)
    draft_tokens: int = 0


class Errors(Totals):
    """The failed outputs of one error code; example: the id of one, and its message."""

    LEAST: ClassVar = frozenset({"example"})

    count: int
    example: str


class Throughput(Struct, frozen=True, kw_only=True):
    """Rates per second of the engine's clock, or per step."""

    makespan: float
    requests: float
    prompt_tokens: float
    output_tokens: float


class WallTime(Struct, frozen=True):
    """Seconds of the wall clock, and tokens generated per second."""

    seconds: float
    tokens_per_second: float


class WorkerSummary(Struct, frozen=True, kw_only=True):
    """The numbers of one worker; busy_share: up to its own last step."""

    requests: int
    generated_tokens: int
    steps: int
    busy_share: float


class Summary(Totals, omit_defaults=True):
    """Every number of a run.

    Events add to the counts.  The sum of the counts of several workers is that of one run:
    `batch` counts the slots of all, `steps` those of the longest worker.
    """

    LARGEST: ClassVar = frozenset({"steps", "longest_output"})

    requests: int = shown(int)
    outputs: int = shown(int)
    ok: int = shown(int)
    failed: int = shown(int)
    rejected: int = shown(int)
    aborted: int = shown(int)
    unfinished: int = shown(int)
    finish_reasons: dict[str, int] = shown(dict)
    prompt_tokens: int = shown(int)
    generated_tokens: int = shown(int)
    longest_output: int = shown(int)
    batch: int = shown(int)
    steps: int = shown(int)
    least_steps: int = shown(int)
    tokens_per_step: float = shown(float)
    busy_slot_steps: int = shown(int)
    idle_slot_steps: int = shown(int)
    busy_share: float = shown(float)
    idle: dict[str, int] = shown(dict)
    positions: Positions = shown(Positions)
    jumps: int = shown(int)
    jumped_tokens: int = shown(int)
    forks: int = shown(int)
    constraints: Constraints = shown(Constraints)
    wait: Distribution | None = shown(lambda: None)
    first_token: Distribution | None = shown(lambda: None)
    latency: Distribution | None = shown(lambda: None)
    latencies: Latencies | None = None
    throughput: Throughput | None = None
    goodput: Goodput | None = None
    kv: KvUse | None = None
    budget: BudgetUse | None = None
    prefix_cache: PrefixHits | None = None
    preemptions: Preemptions | None = None
    blocked: dict[str, int] | None = None
    computed: Computed | None = None
    speculation: Speculation | None = None
    aged: int | None = None
    cut_by_default: int = 0
    errors: dict[str, Errors] | None = None
    wall: WallTime | None = None
    workers: list[WorkerSummary] | None = None


def unit_of(summary: Summary, *, is_timed: bool) -> Unit:
    return "seconds" if is_timed or summary.goodput is not None else "steps"


def numbers_of(record: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers of a summary that are not zero, each with its path.

    record: the summary as JSON.  A distribution or a list of records is one value.
    """
    for name, value in record.items():
        if isinstance(value, dict) and "p50" not in value:
            yield from numbers_of(value, f"{within}{name}.")
        elif value:
            yield f"{within}{name}", value


def with_wall_clock(summary: Summary, seconds: float) -> Summary:
    rate = summary.generated_tokens / seconds if seconds else 0.0
    return replace(summary, wall=WallTime(round(seconds, 3), round(rate, 3)))


def encode_summary(summary: Summary) -> bytes:
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


class RunTotals(Totals):
    """The sums of a run, or of one of its workers.

    numbers: the counts that the summary reports as they are.  longest_run: the most steps from an
    admission to the end of a sequence.  first_arrival, end: seconds.  times: empty if the run has
    no use for them.  seconds, block_seconds: of the timed steps.

    For Prometheus alone, prompts and outputs in a watched run only: prompts, outputs: tokens of
    those that ended.  dropped: samples of best_of that ended and are no results, by finish reason.
    lost_tokens: of samples that ended before their worker died.
    """

    LARGEST: ClassVar = frozenset({"longest_run", "end"})
    LEAST: ClassVar = frozenset({"first_arrival"})

    numbers: Summary = field(default_factory=Summary)
    reasons: Counter[str] = field(default_factory=Counter)
    longest_run: int = 0
    first_arrival: float | None = None
    wait: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    speculation: SpeculationTotals = field(default_factory=SpeculationTotals)
    times: dict[str, SecondsHistogram] = field(default_factory=dict)
    end: float = 0.0
    timed_steps: int = 0
    seconds: float = 0.0
    block_seconds: float = 0.0
    prompts: Histogram | None = None
    outputs: Histogram | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    lost_tokens: int = 0

    def report(self, run: RunEvent | None, slo: Slo | None = None) -> Summary:
        """Return the counts with the numbers that follow from them."""
        numbers, reasons = self.numbers, self.reasons
        steps, slots, tokens = numbers.steps, numbers.batch, numbers.generated_tokens
        busy, num_idle = numbers.busy_slot_steps, steps * slots - numbers.busy_slot_steps
        num_ok, num_aborted = reasons["stop"] + reasons["length"], reasons["aborted"]
        num_failed = reasons["error"] + numbers.rejected
        is_plain = run is None or is_untimed(run)
        needed, longest = busy, self.longest_run  # slot-steps, and steps of one request
        if not is_plain:  # slots also held what another schedule need not compute
            num_extra = numbers.jumped_tokens + self.speculation.counts.num_accepted
            needed, longest = max(0, tokens - num_extra), 0
        idle = _in_order(numbers.idle, ("arrivals", "empty_queue", "too_few"))
        blocked = numbers.blocked
        if blocked is not None:
            blocked = _in_order(blocked, ("kv", "tokens", "preemption", "batch"))
        found = replace(
            numbers,
            outputs=num_ok + num_failed + num_aborted + numbers.unfinished,
            ok=num_ok,
            failed=num_failed,
            aborted=num_aborted,
            finish_reasons={
                "stop": reasons["stop"],
                "length": reasons["length"],
                "error": num_failed,
                "aborted": num_aborted,
            },
            least_steps=max(-(-needed // slots), longest) if needed else 0,
            tokens_per_step=round(tokens / steps, 3) if steps else 0.0,
            idle_slot_steps=num_idle,
            busy_share=share_of(busy, steps * slots),
            idle={"tail": num_idle - sum(idle.values())} | idle,
            wait=self.wait.distribution(),
            first_token=self.first_token.distribution(),
            latency=self.latency.distribution(),
            blocked=blocked,
            cut_by_default=min(numbers.cut_by_default, reasons["length"]),  # some are dropped
        )
        if run is not None:
            is_sampled = run.speculation.get("acceptance") == "leviathan"
            rule: Acceptance = "leviathan" if is_sampled else "exact"
            found.speculation = self.speculation.report(rule, numbers.positions.total)
        makespan = self.end - (self.first_arrival or 0.0)
        if (goodput := found.goodput) is not None:
            limits = {} if slo is None else slo.limits
            found.goodput = None
            if slo is not None or goodput.requests:
                counts = goodput.requests, goodput.good
                found.goodput = Goodput.of(limits, *counts, makespan, goodput.missed)
        if run is not None and self.times and (not is_plain or slo is not None):
            latencies = {name: times.distribution() for name, times in self.times.items()}
            if run.step_time.get("tokens") == "unknown":  # see trace/logs.py
                latencies["itl"] = None
            found.latencies = Latencies(**latencies)
            if makespan > 0:
                found.throughput = Throughput(
                    makespan=round(makespan, NUM_DIGITS),
                    requests=round(num_ok / makespan, NUM_DIGITS),
                    prompt_tokens=round(numbers.prompt_tokens / makespan, 3),
                    output_tokens=round(tokens / makespan, 3),
                )
        if (kv := found.kv) is not None:
            mean = self.block_seconds / self.seconds if self.seconds else 0.0
            found.kv = replace(kv, mean_blocks=round(mean, 3))
            if kv.total is not None:
                found.kv.mean_share = round(mean / kv.total, NUM_DIGITS)
                found.kv.max_share = round(kv.max_blocks / kv.total, NUM_DIGITS)
        if (done := found.computed) is not None:
            share = share_of(done.right_padding, done.prefill_tokens + done.right_padding)
            found.computed = replace(done, prefill_share=share)
            if (budget := found.budget) is not None:
                num_tokens = done.prefill_tokens + done.decode_tokens + done.draft_tokens
                mean = num_tokens / max(1, self.timed_steps) / budget.max_batch_tokens
                found.budget = replace(budget, mean_share=round(mean, NUM_DIGITS))
        if (hits := found.prefix_cache) is not None:
            found.prefix_cache = replace(hits, share=share_of(hits.found, hits.asked))
        return found


def _in_order(counts: Mapping[str, int], shown: Sequence[str]) -> dict[str, int]:
    """Return counts by cause: those of `shown`, and of what blocks an admission if it did."""
    blocking = (cause for cause in get_args(BlockedReason) if counts.get(cause))
    return {cause: counts.get(cause, 0) for cause in (*shown, *blocking)}


def settings_of(run: RunEvent) -> SchedulingSettings:
    if not run.scheduling:
        return DEFAULT_SCHEDULING
    try:
        return msgspec.convert(run.scheduling, SchedulingSettings)
    except msgspec.ValidationError as error:
        raise BatchdecodeError(
            f"invalid `scheduling` in the run event of the trace: {error}"
        ) from error


class RunMetrics:
    """Counts the events of a run, live or from a trace, and reports its summary at any time.

    slo: the limits of goodput.  series: the run over time.  fold: the sequences of the run, if
    shared.  is_watched: whether to count for Prometheus, and times in every run.  worker_series:
    the time series, or None, of each of several workers, whose numbers are `workers`.
    """

    def __init__(
        self,
        slo: Slo | None = None,
        series: TimeSeries | None = None,
        fold: RequestFold | None = None,
        *,
        is_watched: bool = False,
        worker_series: Sequence[TimeSeries | None] = (),
    ) -> None:
        self.workers = [RunMetrics(slo, own, is_watched=is_watched) for own in worker_series]
        self.fold = RequestFold() if fold is None else fold
        self.run: RunEvent | None = None
        self.counted = RunTotals(
            speculation=SpeculationTotals(counts=self.fold.drafts),
            prompts=Histogram() if is_watched else None,
            outputs=Histogram() if is_watched else None,
        )
        self._slots = SlotUse()
        self._slo, self._series = slo, series
        self._feed: StepFeed | None = None  # None if the run has no use for times
        self._token_times, self._goodput = TokenTimes(), Goodput()
        self._aging: float | None = None
        self._blocked: Counter[str] = Counter()
        self._end = 0.0  # of the last step with a steps event
        # Requests with several samples: how many have not ended, and the ends of the others.
        self._samples: dict[str, tuple[int, list[FinishEvent]]] = {}
        # Steps events count positions.  In a run without them a sequence computes its first tokens
        # in the step of its admission, and in each later step its newest token, the tokens that a
        # constraint forced after it, and drafts.
        self._has_steps = self._is_padded = False
        self._num_begun = 0  # first tokens that were not cached, less one per admission
        self._num_jumped = 0
        self._last_jumps: dict[tuple[str, int], tuple[int, int]] = {}  # the step, and the tokens

    def observe(self, events: Iterable[Event]) -> None:
        """Count the next events of the run; raise if one of them is impossible."""
        if self.workers:
            for event in events:
                if isinstance(event, RunEvent):
                    self.run = event
                    for worker in self.workers:
                        worker.observe((event,))
                else:
                    self.workers[event.worker or 0].observe((event,))
            return
        fold = self.fold
        for event in events:  # no `match`: it takes twice as long, three times a request
            if type(event) is ArriveEvent:
                found: RequestTimeline | None = fold.arrive(event)
                self._arrive(event)
            elif type(event) is AdmitEvent:
                found = fold.admit(event)
                self._admit(event, found)
            elif type(event) is FinishEvent:
                found = fold.finish(event)
                self._finish(event, found)
            elif type(event) is RestartEvent:
                found = None
                self._restart(event)
            else:
                found = fold.take(event)
                self._count(event, found)
            if fold.unblocked is not None:
                blocked, fold.unblocked = fold.unblocked, None
                self._blocked[blocked.reason] += blocked.end - blocked.start
            if self._feed is not None:
                for step in self._feed.take(event, found):
                    self._add_step(step)

    def close(self, num_steps: int) -> None:
        for worker in self.workers:
            worker.close(worker.counted.numbers.steps)
        self._catch_up(num_steps)
        if self._feed is not None and self._series is not None:
            self._series.take_rest(self._feed.take_events())

    def note_constraints(self, compiled: int, cache_hits: int) -> None:
        constraints = self.counted.numbers.constraints
        constraints.compiled += compiled
        constraints.cache_hits += cache_hits

    def note_steps(self, num_steps: int) -> None:
        self.counted.numbers.steps = max(self.counted.numbers.steps, num_steps)

    def summary(self, num_steps: int = 0) -> Summary:
        summary = self.totals(num_steps).report(self.run, self._slo)
        if self.workers:
            summary.workers = [
                WorkerSummary(
                    requests=numbers.requests - numbers.rejected,
                    generated_tokens=numbers.generated_tokens,
                    steps=numbers.steps,
                    busy_share=share_of(numbers.busy_slot_steps, numbers.steps * numbers.batch),
                )
                for numbers in (worker.totals().numbers for worker in self.workers)
            ]
        return summary

    def totals(self, num_steps: int = 0) -> RunTotals:
        """Return the sums so far, parts of which are still being counted.

        num_steps: the steps so far, which the events of an interrupted run may not have.
        """
        if self.workers:
            first, *others = [worker.totals() for worker in self.workers]
            totals = first.copy()
            for each in others:
                totals.merge(each)
            return totals
        counted, slots = self.counted, self._slots
        steps = max(counted.numbers.steps, slots.integrated_steps, num_steps)
        busy = slots.busy + slots.num_occupied * (steps - slots.integrated_steps)
        positions = counted.numbers.positions
        if not self._has_steps:
            pending = sum(n for step, n in self._last_jumps.values() if step + 1 >= steps)
            num_begun = self._num_begun + self._num_jumped - pending
            positions = Positions(busy + self.fold.drafts.num_drafted + num_begun)
        self._catch_up(steps)
        blocked, open_block = Counter(self._blocked), self.fold.blocked
        if open_block is not None:
            blocked[open_block.reason] += max(0, steps - open_block.step)
        speculation = counted.speculation
        num_begun = sum(
            decode_steps_of(found, found.tokens_after(steps - 1)) for found in self.fold.open
        )
        return replace(
            counted,
            numbers=replace(
                counted.numbers,
                steps=steps,
                busy_slot_steps=busy,
                idle=dict(slots.idle),  # undecided slot-steps count as the tail
                positions=positions,
                blocked=blocked if blocked or open_block is not None else None,
            ),
            speculation=replace(
                speculation, num_decode_steps=speculation.num_decode_steps + num_begun
            ),
        )

    def _begin(self, run: RunEvent) -> None:
        counted, numbers = self.counted, self.counted.numbers
        self.run = run
        numbers.batch = self._slots.num_slots = run.batch
        self._is_padded, is_plain = run.layout == "padded", is_untimed(run)
        self._has_steps = self._is_padded or not is_plain
        has_readers = self._slo is not None or self._series is not None
        if not is_plain or has_readers or counted.outputs is not None:
            self._begin_times(run)
        if is_plain:
            return
        settings, self._aging = settings_of(run), aging_of(run)
        numbers.computed = Computed()
        if settings.is_paged:
            numbers.kv = KvUse(block_size=settings.block_size, total=settings.kv_blocks)
        if settings.max_batch_tokens is not None:
            numbers.budget = BudgetUse(max_batch_tokens=settings.max_batch_tokens)
        if settings.has_prefix_cache:
            numbers.prefix_cache = PrefixHits()
        if settings.kv_blocks is not None or settings.preempt_for is not None:
            numbers.preemptions = Preemptions()
        if self._aging is not None:
            numbers.aged = 0
        if self._series is not None:
            self._series.total_blocks = settings.kv_blocks

    def _begin_times(self, run: RunEvent) -> None:
        self._feed = StepFeed(run)
        self.counted.times = self._token_times.times
        self.counted.numbers.goodput = self._goodput
        if self._series is not None:
            self._series.has_drafts = bool(run.speculation)

    def _count(self, event: Event, found: RequestTimeline | None) -> None:
        counted, speculation = self.counted, self.counted.speculation
        numbers = counted.numbers
        match event:
            case RunEvent():
                self._begin(event)
            case EndEvent():
                numbers.steps = event.steps
                self._catch_up(event.steps)
                rest = [] if self._feed is None else self._feed.take_events()
                for request in self._token_times.interrupt(rest):
                    self._goodput.add(request, self._slo)
                if self._series is not None:
                    self._series.take_rest(rest)
            case PreemptEvent():
                self._slots.occupy(event.step, -1)
                if numbers.preemptions is not None and found is not None:
                    numbers.preemptions.count += not is_follower(event)
            case BlockedEvent():
                self._slots.occupy(event.step, 0)
                self._slots.reason = event.reason
            case JumpEvent():
                numbers.jumps += 1
                numbers.jumped_tokens += event.tokens
                if found is not None and found.admission is not None:
                    admit = found.admission.event
                    is_first = event.tokens == found.admission.num_jumped
                    if not (admit.tokens and is_first and event.step == admit.step):
                        num_tokens = event.tokens * found.num_rows  # else it began with them
                        self._num_jumped += num_tokens
                        self._last_jumps[event.id, event.index] = event.step, num_tokens
            case ForkEvent():
                numbers.forks += 1
            case DropEvent():
                counted.reasons[event.reason] -= 1
                counted.dropped[event.reason] += 1
            case RejectEvent():
                numbers.requests += 1
                numbers.rejected += 1
                self._count_error(event.reason, f"request {event.id}")
            case SpeculateEvent():
                speculation.changes[event.reason] += 1
            case StepsEvent():
                padding = sum(event.prefill_padding) if self._is_padded else 0
                numbers.positions.padding += padding
                numbers.positions.total += sum(event.decodes) + sum(event.prefills) + padding
                if self.fold.drafts.num_drafted:
                    speculation.add(event, self._end)
                if event.ends:
                    self._end = event.ends[-1]

    def _arrive(self, event: ArriveEvent) -> None:
        counted, numbers = self.counted, self.counted.numbers
        numbers.unfinished += 1
        if counted.first_arrival is None or event.time < counted.first_arrival:
            counted.first_arrival = event.time
        if event.index:
            num_left, ended = self._samples.get(event.id, (1, []))
            self._samples[event.id] = num_left + 1, ended
        else:
            numbers.requests += 1
            numbers.prompt_tokens += event.prompt_tokens
        if event.deadline is not None and self._feed is None and self.run is not None:
            self._begin_times(self.run)  # from the first deadline on

    def _admit(self, event: AdmitEvent, found: RequestTimeline) -> None:
        numbers, arrive, is_first = self.counted.numbers, found.arrive, len(found.admissions) == 1
        lost = None if is_first else found.admissions[-2].preempt
        if lost is not None and numbers.preemptions is not None:
            numbers.preemptions.recomputed_tokens += max(0, lost.tokens - event.cached)
        if arrive is None:  # a partner or beam
            self._slots.occupy(event.step, 1)
            self._num_begun += event.tokens - 1
            return
        self._num_begun += (event.tokens or arrive.prompt_tokens) - event.cached - 1
        numbers.steps = event.step + 1
        self._slots.admit(event.step, found)
        if is_first:
            self.counted.wait.add(event.step - arrive.step)
        if (hits := numbers.prefix_cache) is not None:
            num_asked = arrive.prompt_tokens + event.generated
            if lost is None:
                hits.asked += num_asked
                hits.found += event.cached
            else:
                hits.asked_again += num_asked
                hits.found_again += event.cached
        if numbers.aged is not None and self._aging is not None:
            numbers.aged += is_aged(event, arrive, self._aging)

    def _finish(self, event: FinishEvent, found: RequestTimeline) -> None:
        counted, arrive, admissions = self.counted, found.arrive, found.admissions
        numbers = counted.numbers
        counted.reasons[event.reason] += 1
        if event.error is not None:
            self._count_error(event.error.code, f"request {event.id}: {event.error.message}")
        if event.prompt_tokens is not None and not found.index:  # the count of a server
            num_known = 0 if arrive is None else arrive.prompt_tokens
            numbers.prompt_tokens += event.prompt_tokens - num_known
        if numbers.jumps:
            self._end_jumps(event)
        if self.fold.drafts.num_drafted:
            counted.speculation.num_decode_steps += decode_steps_of(found, event.tokens)
        numbers.generated_tokens += event.tokens
        if event.tokens > numbers.longest_output:  # noqa: PLR1730 - as in Histogram.add
            numbers.longest_output = event.tokens
        if event.slot is not None:
            self._slots.occupy(event.step + 1, -1)
        if counted.outputs is not None and event.reason != "unused":
            counted.outputs.add(event.tokens)
        if counted.prompts is not None and arrive is not None and not event.index:
            known = event.prompt_tokens
            counted.prompts.add(arrive.prompt_tokens if known is None else known)
        if arrive is None:  # a partner or beam, or aborted before its arrival
            numbers.requests += event.index == 0 and event.role != "negative"
            return
        numbers.unfinished -= 1
        if self._samples and event.id in self._samples:
            num_left, ended = self._samples[event.id]
            ended.append(event)
            self._samples[event.id] = num_left - 1, ended
            if num_left == 1:
                del self._samples[event.id]
        if not admissions:
            return
        end, admitted = event.step + 1, admissions[0].event.step
        if end - admitted > counted.longest_run:  # noqa: PLR1730 - as in Histogram.add
            counted.longest_run = end - admitted
        first_token = admissions[0].first_token if len(admissions) == 1 else found.first_token
        if event.tokens and first_token is not None:
            counted.first_token.add(first_token + 1 - arrive.step)
        numbers.cut_by_default += arrive.default_limit and event.reason == "length"
        if event.reason in {"stop", "length"}:
            counted.latency.add(end - arrive.step)

    def _count_error(self, code: str, example: str) -> None:
        errors = self.counted.numbers.errors = self.counted.numbers.errors or {}
        errors.setdefault(code, Errors(0, example)).count += 1

    def _end_jumps(self, event: FinishEvent) -> None:
        step, num_tokens = self._last_jumps.pop((event.id, event.index), (-1, 0))
        if step == event.step:  # no later step computes them
            self._num_jumped -= num_tokens

    def _restart(self, restart: RestartEvent) -> None:
        """Take back the unanswered requests of a dead worker; another worker decodes them."""
        counted, lost = self.counted, {each.id for each in self.fold.open if each.arrive}
        numbers = counted.numbers
        for end in sorted(self.fold.ends_at(restart), key=attrgetter("step")):
            found = self.fold.finish(end)
            self._end_jumps(end)
            if self.fold.drafts.num_drafted:
                counted.speculation.num_decode_steps += decode_steps_of(found, end.tokens)
            if self._feed is not None:
                for step in self._feed.take(end, found):
                    self._add_step(step)
        self.fold.take(restart)
        self._slots.restart(restart.step)
        self.note_steps(restart.step)
        numbers.requests -= len(lost)
        numbers.unfinished = 0
        for _, all_ended in self._samples.values():
            for end in all_ended:
                counted.reasons[end.reason] -= 1
                counted.dropped[end.reason] += 1
                numbers.generated_tokens -= end.tokens
                counted.lost_tokens += end.tokens
        self._samples.clear()

    def _catch_up(self, num_steps: int) -> None:
        if self._feed is not None:
            for step in self._feed.catch_up(num_steps):
                self._add_step(step)

    def _add_step(self, step: WholeStep) -> None:
        totals, numbers, duration = self.counted, self.counted.numbers, step.end - step.start
        totals.end = step.end
        totals.timed_steps += 1
        totals.seconds += duration
        totals.block_seconds += step.blocks * duration
        if (done := numbers.computed) is not None:
            done.prefill_tokens += step.prefills - step.drafts
            done.draft_tokens += step.drafts
            done.decode_tokens += step.decodes
            done.right_padding += step.prefill_padding
            done.left_padding += step.decode_padding
        if numbers.kv is not None:
            numbers.kv.max_blocks = max(numbers.kv.max_blocks, step.blocks)
        if (budget := numbers.budget) is not None:
            budget.full_steps += step.decodes + step.prefills == budget.max_batch_tokens
        given, ended = self._token_times.observe(step)
        for request in ended:
            self._goodput.add(request, self._slo)
        if self._series is not None:
            self._series.take(step, given)


class EngineState(Struct, frozen=True):
    """The gauges of an engine at one time.

    num_waiting: outputs that have arrived and hold no slot.  num_coming: outputs that have not
    arrived.  kv_share: the share of KV blocks that sequences hold, 0 without a limit.
    """

    num_slots: int
    num_running: int = 0
    num_waiting: int = 0
    kv_share: float = 0.0
    num_coming: int = 0


def state_of(engine: Any, backlog: Unread = NOTHING_UNREAD) -> EngineState:
    """Return the state of an Engine, which may be running in another thread."""
    use, kv_share = engine.block_use, 0.0
    if use is not None and use.free is not None:
        kv_share = use.used / (use.used + use.cached + use.free)
    num_waiting, num_coming = map(add, (engine.num_waiting, engine.num_coming), backlog)
    return EngineState(engine.batch_size, engine.num_running, num_waiting, kv_share, num_coming)
