"""Every number of a run, counted event by event, and the summary of them as one record."""

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import add, attrgetter
from typing import Any, ClassVar, Literal, Protocol, get_args

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
from batcher.metrics.counts import (
    BlockedSteps,
    BudgetUse,
    Computed,
    IdleCauses,
    KvUse,
    Positions,
    Preemptions,
    PrefixHits,
    SlotUse,
    Speculation,
    SpeculationTotals,
    decode_steps_of,
    share_of,
)
from batcher.metrics.slo import Goodput, GoodputCount, Slo
from batcher.metrics.times import (
    Distribution,
    Histogram,
    Latencies,
    SecondsHistogram,
    TimeSeries,
    TokenTimes,
    WholeStep,
    is_untimed,
    open_feed,
)
from batcher.request import NOTHING_UNREAD, Unread
from batcher.settings import DEFAULT_SCHEDULING, SchedulingSettings
from batcher.speculation.settings import Acceptance
from batcher.trace.run import RequestFold, RequestTimeline, Totals, aging_of, is_aged, is_follower

Unit = Literal["seconds", "steps"]


class FinishCounts(Struct, frozen=True):
    """How many results there are of each finish reason; rejected lines count as errors."""

    stop: int
    length: int
    error: int
    aborted: int


class ConstraintCounts(Struct, frozen=True):
    """How many grammars were compiled, and how often one was there already."""

    compiled: int
    cache_hits: int


class Throughput(Struct, frozen=True, kw_only=True):
    """The work done in a second of the engine's clock, on average."""

    makespan: float
    requests: float
    prompt_tokens: float
    output_tokens: float


class WallTime(Struct, frozen=True, kw_only=True):
    """Seconds by the wall clock, and the tokens generated in one of them."""

    seconds: float
    tokens_per_second: float


class WorkerSummary(Struct, frozen=True, kw_only=True):
    """What one of several workers did; busy_share: of its slot-steps, up to its own last step."""

    requests: int
    generated_tokens: int
    steps: int
    busy_share: float


class RunSummary(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Every number of a run; docs/summary.md and docs/metrics.md define each.

    Those with a default say nothing of some runs and are not written then: see `_timed_numbers`.
    """

    requests: int
    outputs: int
    ok: int
    failed: int
    rejected: int
    aborted: int
    unfinished: int
    finish_reasons: FinishCounts
    prompt_tokens: int
    generated_tokens: int
    longest_output: int
    batch: int
    steps: int
    least_steps: int
    tokens_per_step: float
    busy_slot_steps: int
    idle_slot_steps: int
    busy_share: float
    idle: IdleCauses
    positions: Positions
    jumps: int
    jumped_tokens: int
    forks: int
    constraints: ConstraintCounts
    wait: Distribution | None
    first_token: Distribution | None
    latency: Distribution | None
    latencies: Latencies | None = None
    throughput: Throughput | None = None
    goodput: Goodput | None = None
    kv: KvUse | None = None
    budget: BudgetUse | None = None
    prefix_cache: PrefixHits | None = None
    preemptions: Preemptions | None = None
    blocked: BlockedSteps | None = None
    computed: Computed | None = None
    speculation: Speculation | None = None
    aged: int | None = None
    cut_by_default: int = 0
    wall: WallTime | None = None
    workers: list[WorkerSummary] | None = None


def unit_of(summary: RunSummary, *, is_timed: bool) -> Unit:
    return "seconds" if is_timed or summary.goodput is not None else "steps"


def with_wall_clock(summary: RunSummary, seconds: float) -> RunSummary:
    rate = summary.generated_tokens / seconds if seconds else 0.0
    wall = WallTime(seconds=round(seconds, 3), tokens_per_second=round(rate, 3))
    return replace(summary, wall=wall)


def encode_summary(summary: RunSummary) -> bytes:
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


class TimedTotals(Totals):
    """What adds up of the times of a run, of what its steps computed and held, and of its cache.

    times: by what they are of, see Latencies.  end: of the last step, in seconds.
    num_full: steps that computed as many tokens as they may.  seconds, block_seconds: how long all
    took, and the sum of the blocks held in each times how long it took.
    hits: as in PrefixHits, by name.  recomputed: tokens that preemptions threw away.
    num_aged: admissions that `--aging` decided.
    """

    LARGEST: ClassVar = frozenset({"end", "max_blocks"})

    times: dict[str, SecondsHistogram]
    goodput: GoodputCount = field(default_factory=GoodputCount)
    end: float = 0.0
    num_steps: int = 0
    num_full: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    draft_tokens: int = 0
    right_padding: int = 0
    left_padding: int = 0
    max_blocks: int = 0
    seconds: float = 0.0
    block_seconds: float = 0.0
    hits: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("asked", "found", "asked_again", "found_again"), 0)
    )
    num_preempted: int = 0
    recomputed: int = 0
    num_aged: int = 0


class EndedTotals(Totals):
    """What is told of outputs that have ended beside the summary, of a run that is watched.

    prompts, outputs: how many tokens those have that ended.
    dropped: samples that were counted as ended and are no results, by why they had ended.
    lost_tokens: those of samples that ended before their worker died, and were decoded again.
    """

    prompts: Histogram = field(default_factory=Histogram)
    outputs: Histogram = field(default_factory=Histogram)
    dropped: Counter[str] = field(default_factory=Counter)
    lost_tokens: int = 0


class RunTotals(Totals, kw_only=True):
    """What adds up of a run, or of one of its workers; fields are named as in RunSummary.

    The summary of several workers follows from the sum of their totals as that of a run from its
    own; docs/summary.md says what steps, seconds and shares are then.

    num_slots: of all workers.  num_steps: of the worker that took most.  longest_run: the most
    steps that a sequence took from its admission to its end.  num_cut: outputs that ended at a
    limit which their requests do not state.  busy: slot-steps with a sequence.
    idle: those without, by cause, without `tail`.  first_arrival: in seconds.
    """

    LARGEST: ClassVar = frozenset({"num_steps", "longest_output", "longest_run"})
    LEAST: ClassVar = frozenset({"first_arrival"})

    num_slots: int
    num_steps: int = 0
    num_requests: int = 0
    num_rejected: int = 0
    num_unfinished: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    longest_output: int = 0
    longest_run: int = 0
    num_cut: int = 0
    busy: int = 0
    idle: dict[str, int] = field(default_factory=dict)
    num_positions: int = 0
    num_padding: int = 0
    num_jumps: int = 0
    num_jumped_tokens: int = 0
    num_forks: int = 0
    num_compiled: int = 0
    num_compiled_before: int = 0
    first_arrival: float | None = None
    wait: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    blocked_steps: Counter[str] | None = None
    speculation: SpeculationTotals = field(default_factory=SpeculationTotals)
    timed: TimedTotals | None = None
    ended: EndedTotals | None = None


def summarize(totals: RunTotals, run: RunEvent | None, slo: Slo | None = None) -> RunSummary:
    reasons, steps, slots = totals.finish_reasons, totals.num_steps, totals.num_slots
    num_ok = reasons["stop"] + reasons["length"]
    num_failed = reasons["error"] + totals.num_rejected
    busy, tokens = totals.busy, totals.generated_tokens
    num_idle = steps * slots - busy
    needed, longest = busy, totals.longest_run  # slot-steps, and steps of one request
    if run is not None and not is_untimed(run):
        # Slots are also held for what another schedule need not compute.
        num_beside = totals.num_jumped_tokens + totals.speculation.counts.num_accepted
        needed, longest = max(0, tokens - num_beside), 0
    blocked, blocked_steps = totals.blocked_steps, None
    if blocked is not None:
        blocked_steps = BlockedSteps(**{why: blocked[why] for why in get_args(BlockedReason)})
    speculation = None
    if run is not None:
        is_sampled = run.speculation.get("acceptance") == "leviathan"
        rule: Acceptance = "leviathan" if is_sampled else "exact"
        speculation = totals.speculation.numbers(rule, totals.num_positions)
    return RunSummary(
        requests=totals.num_requests + totals.num_rejected,
        outputs=num_ok + num_failed + reasons["aborted"] + totals.num_unfinished,
        ok=num_ok,
        failed=num_failed,
        rejected=totals.num_rejected,
        aborted=reasons["aborted"],
        unfinished=totals.num_unfinished,
        finish_reasons=FinishCounts(
            reasons["stop"], reasons["length"], num_failed, reasons["aborted"]
        ),
        prompt_tokens=totals.prompt_tokens,
        generated_tokens=tokens,
        longest_output=totals.longest_output,
        batch=slots,
        steps=steps,
        least_steps=max(-(-needed // slots), longest) if needed else 0,
        tokens_per_step=round(tokens / steps, 3) if steps else 0.0,
        busy_slot_steps=busy,
        idle_slot_steps=num_idle,
        busy_share=share_of(busy, steps * slots),
        idle=IdleCauses(tail=num_idle - sum(totals.idle.values()), **totals.idle),
        positions=Positions(total=totals.num_positions, padding=totals.num_padding),
        jumps=totals.num_jumps,
        jumped_tokens=totals.num_jumped_tokens,
        forks=totals.num_forks,
        constraints=ConstraintCounts(totals.num_compiled, totals.num_compiled_before),
        wait=totals.wait.distribution(),
        first_token=totals.first_token.distribution(),
        latency=totals.latency.distribution(),
        blocked=blocked_steps,
        speculation=speculation,
        cut_by_default=min(totals.num_cut, reasons["length"]),  # some of best_of are dropped
        **_timed_numbers(totals, run, slo),
    )


def settings_of(run: RunEvent) -> SchedulingSettings:
    if not run.scheduling:
        return DEFAULT_SCHEDULING
    try:
        return msgspec.convert(run.scheduling, SchedulingSettings)
    except msgspec.ValidationError as error:
        raise BatchdecodeError(f"the run event of the trace: scheduling: {error}") from error


def _timed_numbers(totals: RunTotals, run: RunEvent | None, slo: Slo | None) -> dict[str, Any]:
    timed = totals.timed
    if timed is None or run is None:
        return {}
    settings, is_plain = settings_of(run), is_untimed(run)
    makespan = timed.end - (totals.first_arrival or 0.0)
    numbers: dict[str, Any] = {"goodput": timed.goodput.goodput(slo, makespan)}
    if not is_plain or slo is not None:
        latencies = {name: times.distribution() for name, times in timed.times.items()}
        if run.step_time.get("tokens") == "unknown":  # see trace/logs.py
            latencies["itl"] = None
        numbers["latencies"] = Latencies(**latencies)
        if makespan > 0:
            num_ok = totals.finish_reasons["stop"] + totals.finish_reasons["length"]
            numbers["throughput"] = Throughput(
                makespan=round(makespan, 6),
                requests=round(num_ok / makespan, 6),
                prompt_tokens=round(totals.prompt_tokens / makespan, 3),
                output_tokens=round(totals.generated_tokens / makespan, 3),
            )
    if not is_plain:
        if settings.is_paged:
            total, mean = settings.kv_blocks, 0.0
            if timed.seconds:
                mean = timed.block_seconds / timed.seconds
            numbers["kv"] = KvUse(
                block_size=settings.block_size,
                total=total,
                mean_blocks=round(mean, 3),
                max_blocks=timed.max_blocks,
                mean_share=None if total is None else round(mean / total, 6),
                max_share=None if total is None else round(timed.max_blocks / total, 6),
            )
        if (budget := settings.max_batch_tokens) is not None:
            num_tokens = timed.prefill_tokens + timed.decode_tokens + timed.draft_tokens
            numbers["budget"] = BudgetUse(
                max_batch_tokens=budget,
                mean_share=round(num_tokens / max(1, timed.num_steps) / budget, 6),
                full_steps=timed.num_full,
            )
        numbers["computed"] = Computed(
            prefill_tokens=timed.prefill_tokens,
            decode_tokens=timed.decode_tokens,
            right_padding=timed.right_padding,
            left_padding=timed.left_padding,
            prefill_share=share_of(timed.right_padding, timed.prefill_tokens + timed.right_padding),
            draft_tokens=timed.draft_tokens,
        )
    if settings.has_prefix_cache:
        hits = timed.hits
        numbers["prefix_cache"] = PrefixHits(share=share_of(hits["found"], hits["asked"]), **hits)
    if settings.kv_blocks is not None or settings.preempt_for is not None:
        numbers["preemptions"] = Preemptions(
            count=timed.num_preempted, recomputed_tokens=timed.recomputed
        )
    if aging_of(run) is not None:
        numbers["aged"] = timed.num_aged
    return numbers


class RunMetrics:
    """Takes in events, live or from a trace, and has the summary of them at any time.

    slo: the limits of goodput.  series: the run over time.  fold: the sequences of the run, if
    shared.  is_watched: whether EndedTotals, and times of any run, are counted.  worker_series: the
    run over time, or None, of each of several workers, whose numbers are `workers`.
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
            num_slots=0,
            speculation=SpeculationTotals(counts=self.fold.drafts),
            ended=EndedTotals() if is_watched else None,
        )
        self._slots = SlotUse()
        self._slo, self._series = slo, series
        self._timed: TimedMetrics | None = None
        self._blocked_steps: Counter[str] = Counter()
        self._end = 0.0  # of the last step that is told of
        # Of requests with several samples: how many have not ended, and how the others have.
        self._samples: dict[str, tuple[int, list[FinishEvent]]] = {}
        # Positions.  Where a run tells of its steps, they say it.  In any other a sequence computes
        # what it begins with in the step of its admission, and in every later one the token it was
        # given last, with those that a constraint has forced behind it, and drafts.
        self._has_steps = self._is_padded = False
        self._num_begun = 0  # what sequences began with and was not cached, less one for each
        self._num_jumped = 0
        self._last_jumps: dict[tuple[str, int], tuple[int, int]] = {}  # the step, and the tokens

    def observe(self, events: Iterable[Event]) -> None:
        """Take in the next events of the run; raise if one says what cannot be."""
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
                counted = self.counted
                counted.num_unfinished += 1
                if counted.first_arrival is None or event.time < counted.first_arrival:
                    counted.first_arrival = event.time
                if event.index:
                    num_left, ended = self._samples.get(event.id, (1, []))
                    self._samples[event.id] = num_left + 1, ended
                else:
                    counted.num_requests += 1
                    counted.prompt_tokens += event.prompt_tokens
                if event.deadline is not None and self._timed is None and self.run is not None:
                    self._timed = TimedMetrics(self.run, None, None)  # from the first of them on
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
                self._blocked_steps[blocked.reason] += blocked.end - blocked.start
            if self._timed is not None:
                self._timed.observe(event, found)

    def close(self, num_steps: int) -> None:
        for worker in self.workers:
            worker.close(worker.counted.num_steps)
        if self._timed is not None:
            self._timed.close(num_steps)

    def _restart(self, restart: RestartEvent) -> None:
        """Take back what a worker that died had not answered: another one decodes all of it."""
        counted, lost = self.counted, {each.id for each in self.fold.open if each.arrive}
        for end in sorted(self.fold.ends_at(restart), key=attrgetter("step")):
            found = self.fold.finish(end)
            self._end_jumps(end)
            if self.fold.drafts.num_drafted:
                counted.speculation.num_decode_steps += decode_steps_of(found, end.tokens)
            if self._timed is not None:
                self._timed.observe(end, found)
        self.fold.take(restart)
        self._slots.restart(restart.step)
        counted.num_steps = max(counted.num_steps, restart.step)
        counted.num_requests -= len(lost)
        counted.num_unfinished = 0
        for _, all_ended in self._samples.values():
            for end in all_ended:
                counted.finish_reasons[end.reason] -= 1
                counted.generated_tokens -= end.tokens
                if counted.ended is not None:
                    counted.ended.dropped[end.reason] += 1
                    counted.ended.lost_tokens += end.tokens
        self._samples.clear()

    def note_constraints(self, compiled: int, cache_hits: int) -> None:
        self.counted.num_compiled, self.counted.num_compiled_before = compiled, cache_hits

    def summary(self, num_steps: int = 0) -> RunSummary:
        summary = summarize(self.totals(num_steps), self.run, self._slo)
        if not self.workers:
            return summary
        workers = [
            WorkerSummary(
                requests=totals.num_requests,
                generated_tokens=totals.generated_tokens,
                steps=totals.num_steps,
                busy_share=share_of(totals.busy, totals.num_steps * totals.num_slots),
            )
            for totals in (worker.totals() for worker in self.workers)
        ]
        return replace(summary, workers=workers)

    def totals(self, num_steps: int = 0) -> RunTotals:
        """Return what adds up so far; some of it is still counted on.

        num_steps: that were taken, if the events of a run that is broken off do not say it.
        """
        if self.workers:
            first, *others = [worker.totals() for worker in self.workers]
            totals = first.copy()
            for each in others:
                totals.merge(each)
            return totals
        counted, sequences = self.counted, self.fold.open
        steps = max(counted.num_steps, self._slots.integrated_steps, num_steps)
        slots, num_positions = self._slots, counted.num_positions + counted.num_padding
        busy = slots.busy + slots.num_occupied * (steps - slots.integrated_steps)
        if not self._has_steps:
            pending = sum(n for step, n in self._last_jumps.values() if step + 1 >= steps)
            num_positions = busy + self.fold.drafts.num_drafted
            num_positions += self._num_begun + self._num_jumped - pending
        if self._timed is not None:
            self._timed.catch_up(steps)
        blocked_steps, blocked = Counter(self._blocked_steps), self.fold.blocked
        if blocked is not None:
            blocked_steps[blocked.reason] += max(0, steps - blocked.step)
        speculation = counted.speculation
        num_begun = sum(decode_steps_of(each, each.tokens_after(steps - 1)) for each in sequences)
        return replace(
            counted,
            num_steps=steps,
            busy=busy,
            idle=dict(slots.idle),  # of those undecided so far, the cause is the tail
            num_positions=num_positions,
            blocked_steps=blocked_steps if blocked_steps or blocked is not None else None,
            speculation=replace(
                speculation, num_decode_steps=speculation.num_decode_steps + num_begun
            ),
            timed=None if self._timed is None else self._timed.totals,
        )

    def _count(self, event: Event, found: RequestTimeline | None) -> None:
        counted, speculation = self.counted, self.counted.speculation
        match event:
            case RunEvent():
                self.run = event
                counted.num_slots = self._slots.num_slots = event.batch
                self._is_padded = event.layout == "padded"
                self._has_steps = self._is_padded or not is_untimed(event)
                needs_times = not is_untimed(event) or counted.ended is not None
                if needs_times or self._slo is not None or self._series is not None:
                    self._timed = TimedMetrics(event, self._slo, self._series)
            case EndEvent():
                counted.num_steps = event.steps
            case PreemptEvent():
                self._slots.occupy(event.step, -1)
            case BlockedEvent():
                self._slots.occupy(event.step, 0)
                self._slots.reason = event.reason
            case JumpEvent():
                counted.num_jumps += 1
                counted.num_jumped_tokens += event.tokens
                if found is not None and found.admission is not None:
                    admit = found.admission.event
                    is_first = event.tokens == found.admission.num_jumped
                    if not (admit.tokens and is_first and event.step == admit.step):
                        num_tokens = event.tokens * found.num_rows  # else it began with them
                        self._num_jumped += num_tokens
                        self._last_jumps[event.id, event.index] = event.step, num_tokens
            case ForkEvent():
                counted.num_forks += 1
            case DropEvent():
                counted.finish_reasons[event.reason] -= 1
                if counted.ended is not None:
                    counted.ended.dropped[event.reason] += 1
            case RejectEvent():
                counted.num_rejected += 1
            case SpeculateEvent():
                speculation.changes[event.reason] += 1
            case StepsEvent():
                counted.num_positions += sum(event.decodes) + sum(event.prefills)
                counted.num_padding += sum(event.prefill_padding) if self._is_padded else 0
                if self.fold.drafts.num_drafted:
                    speculation.costs.take(event, self._end)
                if event.ends:
                    self._end = event.ends[-1]

    def _admit(self, event: AdmitEvent, found: RequestTimeline) -> None:
        arrive = found.arrive
        if arrive is None:
            self._slots.occupy(event.step, 1)
            self._num_begun += event.tokens - 1
            return
        self._num_begun += (event.tokens or arrive.prompt_tokens) - event.cached - 1
        self.counted.num_steps = event.step + 1
        if len(found.admissions) == 1:
            self._slots.take(event.step, arrive)
            self.counted.wait.add(event.step - arrive.step)
        else:
            self._slots.take_again(event.step, found.waits_from)

    def _finish(self, event: FinishEvent, found: RequestTimeline) -> None:
        counted, arrive, admissions = self.counted, found.arrive, found.admissions
        counted.finish_reasons[event.reason] += 1  # of "unused" nothing is said
        if event.prompt_tokens is not None and not found.index:  # a server counts them itself
            num_known = 0 if arrive is None else arrive.prompt_tokens
            counted.prompt_tokens += event.prompt_tokens - num_known
        if counted.num_jumps:
            self._end_jumps(event)
        if self.fold.drafts.num_drafted:
            counted.speculation.num_decode_steps += decode_steps_of(found, event.tokens)
        counted.generated_tokens += event.tokens
        if event.tokens > counted.longest_output:  # noqa: PLR1730 - as in Histogram.add
            counted.longest_output = event.tokens
        if event.slot is not None:
            self._slots.occupy(event.step + 1, -1)
        if counted.ended is not None:
            if event.reason != "unused":
                counted.ended.outputs.add(event.tokens)
            if arrive is not None and not event.index:
                told = event.prompt_tokens
                counted.ended.prompts.add(arrive.prompt_tokens if told is None else told)
        if arrive is None:  # it came along with another one, or was aborted before it arrived
            counted.num_requests += event.index == 0 and event.role != "negative"
            return
        counted.num_unfinished -= 1
        if self._samples and event.id in self._samples:
            num_left, ended = self._samples[event.id]
            ended.append(event)
            self._samples[event.id] = num_left - 1, ended
            if num_left == 1:
                del self._samples[event.id]
        if not admissions:
            return
        end, admitted = event.step + 1, admissions[0].event.step
        if end - admitted > counted.longest_run:  # noqa: PLR1730 - max() takes twice as long
            counted.longest_run = end - admitted
        first_token = admissions[0].first_token if len(admissions) == 1 else found.first_token
        if event.tokens and first_token is not None:
            counted.first_token.add(first_token + 1 - arrive.step)
        counted.num_cut += arrive.default_limit and event.reason == "length"
        if event.reason in {"stop", "length"}:
            counted.latency.add(end - arrive.step)

    def _end_jumps(self, event: FinishEvent) -> None:
        step, num_tokens = self._last_jumps.pop((event.id, event.index), (-1, 0))
        if step == event.step:  # there is no later one that would compute them
            self._num_jumped -= num_tokens


class TimedMetrics:
    """Takes in the events of a run after its first, and has those numbers at any time."""

    def __init__(self, run: RunEvent, slo: Slo | None, series: TimeSeries | None) -> None:
        self._settings = settings_of(run)
        self._slo, self._series = slo, series
        self._feed, self._times, self._aging = open_feed(run), TokenTimes(), aging_of(run)
        self.totals = TimedTotals(times=self._times.times)
        if series is not None:
            series.total_blocks = self._settings.kv_blocks
            series.has_drafts = bool(run.speculation)

    def observe(self, event: Event, found: RequestTimeline | None) -> None:
        totals = self.totals
        for step in self._feed.take(event, found):
            self._take(step)
        if found is not None:
            if isinstance(event, PreemptEvent):
                totals.num_preempted += not is_follower(event)
            elif isinstance(event, AdmitEvent):
                self._count_admission(event, found)
        elif isinstance(event, EndEvent):
            rest = self._feed.take_events()
            for ended in self._times.interrupt(rest):
                totals.goodput.add(ended, self._slo)
            if self._series is not None:
                self._series.take_rest(rest)

    def _count_admission(self, event: AdmitEvent, found: RequestTimeline) -> None:
        totals, arrive = self.totals, found.arrive
        lost = found.admissions[-2].preempt if len(found.admissions) > 1 else None
        if lost is not None:
            totals.recomputed += max(0, lost.tokens - event.cached)
        if arrive is None:  # it came along with another one
            return
        again = "" if lost is None else "_again"
        totals.hits[f"asked{again}"] += arrive.prompt_tokens + event.generated
        totals.hits[f"found{again}"] += event.cached
        if self._aging is not None:
            totals.num_aged += is_aged(event, arrive, self._aging)

    def catch_up(self, num_steps: int) -> None:
        for step in self._feed.catch_up(num_steps):
            self._take(step)

    def close(self, num_steps: int) -> None:
        self.catch_up(num_steps)
        if self._series is not None:
            self._series.take_rest(self._feed.take_events())

    def _take(self, step: WholeStep) -> None:
        totals, duration = self.totals, step.end - step.start
        totals.end = step.end
        totals.num_steps += 1
        totals.num_full += step.decodes + step.prefills == self._settings.max_batch_tokens
        totals.prefill_tokens += step.prefills - step.drafts
        totals.draft_tokens += step.drafts
        totals.decode_tokens += step.decodes
        totals.right_padding += step.prefill_padding
        totals.left_padding += step.decode_padding
        totals.max_blocks = max(totals.max_blocks, step.blocks)
        totals.seconds += duration
        totals.block_seconds += step.blocks * duration
        given, all_ended = self._times.observe(step)
        for ended in all_ended:
            totals.goodput.add(ended, self._slo)
        if self._series is not None:
            self._series.take(step, given)


class WatchedEngine(Protocol):
    """The numbers of an engine that any thread may read while it runs; see Engine."""

    batch_size: int

    @property
    def num_steps(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_coming(self) -> int: ...
    @property
    def block_use(self) -> Any: ...  # a BlockUse, or None


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
    use, kv_share = engine.block_use, 0.0
    if use is not None and use.free is not None:
        kv_share = use.used / (use.used + use.cached + use.free)
    num_waiting, num_coming = map(add, (engine.num_waiting, engine.num_coming), backlog)
    return EngineState(engine.batch_size, engine.num_running, num_waiting, kv_share, num_coming)
