"""The numbers of a run, folded from its events alone as they happen.

Rule: memory grows with the requests that are in the engine at once, never with all there were.
"""

from collections import Counter

import msgspec

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
    PrefillEvent,
    RejectEvent,
    RunEvent,
)
from batcher.metrics.distributions import Histogram
from batcher.metrics.resources import HoldCount
from batcher.metrics.slo import Slo
from batcher.metrics.slots import SlotUse
from batcher.metrics.steps import is_plain
from batcher.metrics.summary import ConstraintCounts, FinishCounts, RunSummary
from batcher.metrics.timed import TimedMetrics, TimedNumbers
from batcher.timeline.records import SequenceKey, is_follower, key_of

NOTHING_TIMED = TimedNumbers()
NOT_YET = -1


class RunMetrics:
    """Takes in events, live or from a trace, and has the summary of them at any time.

    slo: what the run is measured by; its goodput is then told.
    """

    def __init__(self, slo: Slo | None = None) -> None:
        self.num_steps = self.num_requests = self.num_rejected = 0
        self.prompt_tokens = self.generated_tokens = 0
        self.longest_output = self.longest_stay = 0
        self.num_jumps = self.num_jumped_tokens = self.num_forks = 0
        self.constraints = ConstraintCounts(0, 0)
        self.finish_reasons: Counter[str] = Counter()
        self.wait, self.first_token, self.latency = Histogram(), Histogram(), Histogram()
        self.slots, self.holds = SlotUse(), HoldCount()
        self._slo = slo
        self._run: RunEvent | None = None
        self._timed: TimedMetrics | None = None
        self._is_plain = True
        self._arrivals: dict[SequenceKey, ArriveEvent] = {}
        self._admit_steps: dict[SequenceKey, int] = {}  # of those that have an arrival
        # Of those that are not given a token in the step that admits them: the one that gives it.
        self._first_steps: dict[SequenceKey, int] = {}
        self._preempt_steps: dict[SequenceKey, int] = {}  # of those that are not back

    def observe(self, event: Event) -> None:
        """Take in the next event of the run.

        Raises:
            BatchdecodeError: it is one of a trace that says what cannot be.
        """
        if self._timed is not None:
            self._timed.observe(event)
        if type(event) is ArriveEvent:  # isinstance() takes longer, up to three times a request
            if event.index:
                self._arrivals[key_of(event.id, event.index, "sample")] = event
            else:
                self._arrivals[event.id] = event
                self.num_requests += 1
                self.prompt_tokens += event.prompt_tokens
            if event.deadline is not None and self._timed is None:
                self._begin_timing(event)
        elif type(event) is AdmitEvent:
            self._admit(event)
        elif type(event) is FinishEvent:
            self._finish(event)
        elif isinstance(event, RunEvent):
            self._begin(event)
        elif isinstance(event, EndEvent):
            self.num_steps = event.steps
        else:
            self._count(event)

    def _begin(self, run: RunEvent) -> None:
        self.slots.num_slots = run.batch
        self._run, self._is_plain = run, is_plain(run)
        if self._slo is not None or not self._is_plain:
            self._timed = TimedMetrics(run, self._slo)

    def _begin_timing(self, arrive: ArriveEvent) -> None:
        """Follow a plain run from its first request with a deadline on."""
        if self._run is not None:
            self._timed = TimedMetrics(self._run, self._slo)
            self._timed.observe(arrive)

    def _count(self, event: Event) -> None:
        """Take in an event of a kind that is rare."""
        if isinstance(event, PrefillEvent):
            if not event.left:
                key = key_of(event.id, event.index, event.role)
                if self._first_steps.get(key) == NOT_YET:
                    self._first_steps[key] = event.step
        elif isinstance(event, PreemptEvent):
            self._preempt(event)
        elif isinstance(event, BlockedEvent):
            self.slots.hold(event.step, event.reason)
            self.holds.begin(event)
        elif isinstance(event, JumpEvent):
            self.num_jumps += 1
            self.num_jumped_tokens += event.tokens
        elif isinstance(event, ForkEvent):
            self.num_forks += 1
        elif isinstance(event, DropEvent):
            self.finish_reasons[event.reason] -= 1
        elif isinstance(event, RejectEvent):
            self.num_rejected += 1

    def _preempt(self, event: PreemptEvent) -> None:
        self.slots.leave(event.step)
        if not is_follower(event):
            self._preempt_steps[key_of(event.id, event.index, event.role)] = event.step

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
        num_unfinished = len(self._arrivals)
        timed = NOTHING_TIMED
        if self._timed is not None:
            timed = self._timed.numbers(steps, num_ok, self.prompt_tokens, tokens)
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
            jumps=self.num_jumps,
            jumped_tokens=self.num_jumped_tokens,
            forks=self.num_forks,
            constraints=self.constraints,
            wait=self.wait.distribution(),
            first_token=self.first_token.distribution(),
            latency=self.latency.distribution(),
            holds=self.holds.steps(steps),
            **msgspec.structs.asdict(timed),
        )

    def _least_steps(self, busy: int) -> int:
        """Return what any schedule needs for these outputs, of which slots were `busy` so long."""
        if not self._is_plain:  # slots are also held for what another schedule need not compute
            busy, longest = max(0, self.generated_tokens - self.num_jumped_tokens), 0
        else:
            longest = self.longest_stay
        return max(-(-busy // self.slots.num_slots), longest) if busy else 0

    def _admit(self, event: AdmitEvent) -> None:
        key: SequenceKey = event.id
        if event.index or event.role != "sample":
            if is_follower(event):
                self.slots.join(event.step)
                return
            key = key_of(event.id, event.index, event.role)
        arrive = self._arrivals[key]
        preempted = self._preempt_steps.pop(key, None) if self._preempt_steps else None
        if preempted is None:
            self.slots.take(event.step, arrive)
        else:
            self.slots.take_again(event.step, preempted)
        self.holds.release(event)
        if key not in self._admit_steps:
            self.wait.add(event.step - arrive.step)
            self._admit_steps[key] = event.step
            if event.left:
                self._first_steps[key] = NOT_YET
        elif not event.generated:
            self._first_steps[key] = NOT_YET if event.left else event.step
        self.num_steps = event.step + 1

    def _finish(self, event: FinishEvent) -> None:
        self.finish_reasons[event.reason] += 1  # of "unused" nothing is said
        self.generated_tokens += event.tokens
        if event.tokens > self.longest_output:  # noqa: PLR1730 - as in Histogram.add
            self.longest_output = event.tokens
        if event.slot is not None:
            self.slots.leave(event.step + 1)
        else:
            self.holds.release(event)
        key: SequenceKey = event.id
        if event.index or event.role != "sample":
            if is_follower(event):
                return
            key = key_of(event.id, event.index, event.role)
        arrive = self._arrivals.pop(key, None)
        if arrive is None:  # aborted before it arrived
            self.num_requests += event.index == 0
            return
        admit_step = self._admit_steps.pop(key, None)
        if admit_step is None:
            return
        self._preempt_steps.pop(key, None)
        first_step = self._first_steps.pop(key, admit_step) if self._first_steps else admit_step
        end = event.step + 1
        if end - admit_step > self.longest_stay:  # noqa: PLR1730 - max() takes twice as long
            self.longest_stay = end - admit_step
        if event.tokens and first_step != NOT_YET:
            self.first_token.add(first_step + 1 - arrive.step)
        if event.reason in {"stop", "length"}:
            self.latency.add(end - arrive.step)
