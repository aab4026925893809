"""Slot use, and draft outcomes."""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple, get_args

from msgspec import Struct, field

from batcher.events import BlockedReason, SpeculateReason, StepsEvent
from batcher.metrics.times import NUM_DIGITS, share_of
from batcher.speculation.settings import Acceptance, expected_speedup, simple_return
from batcher.trace.run import DraftCounts, RequestTimeline, Totals


class _IdleSpan(NamedTuple):
    """Idle slots in the steps [start, end); reason: what blocked the next request, if known."""

    start: int
    end: int
    num_slots: int
    reason: BlockedReason | None


class SlotUse:
    """Busy and idle slot-steps, summed from one event to the next.

    Idle slots wait for the next request that is admitted, so their cause is undecided until then.
    """

    def __init__(self) -> None:
        self.num_slots = self.num_occupied = 0
        self.integrated_steps = 0
        self.busy = 0
        self.idle = Counter[str]()
        self.undecided: list[_IdleSpan] = []
        self.reason: BlockedReason | None = None  # why the next request is not admitted, if known

    def occupy(self, step: int, change: int) -> None:
        """Change the number of occupied slots from `step` on."""
        if step != self.integrated_steps:
            start, self.integrated_steps = self.integrated_steps, step
            self.busy += self.num_occupied * (step - start)
            if self.num_occupied < self.num_slots:
                num_idle = self.num_slots - self.num_occupied
                self.undecided.append(_IdleSpan(start, step, num_idle, self.reason))
        self.num_occupied += change

    def restart(self, step: int) -> None:
        self.occupy(step, -self.num_occupied)
        self.reason = None
        self.undecided.clear()

    def admit(self, step: int, found: RequestTimeline) -> None:
        """Occupy a slot from `step` on, and decide why slots were idle.

        They waited for `found` since it arrived or was preempted.  Before its arrival nothing could
        fill them; before its preemption they waited for a request that is admitted later.
        """
        self.occupy(step, 1)
        self.reason = None
        if not self.undecided:
            return
        undecided, self.undecided = self.undecided, []
        is_first, arrive = len(found.admissions) == 1, found.arrive
        waits_from = arrive.step if is_first and arrive is not None else found.waits_from
        early = "empty_queue" if arrive is not None and arrive.reason == "follow" else "arrivals"
        for idle in undecided:
            since = min(max(idle.start, waits_from), idle.end)
            self.idle[idle.reason or "too_few"] += (idle.end - since) * idle.num_slots
            if is_first:
                self.idle[early] += (since - idle.start) * idle.num_slots
            elif idle.start < since:
                self.undecided.append(idle._replace(end=since))


class PositionAcceptance(Struct, frozen=True):
    """The i-th drafts of all steps, or the i-th level of draft trees."""

    drafted: int
    accepted: int
    share: float


class Speedup(Struct, frozen=True, kw_only=True):
    """Tokens of rows that speculate, relative to the same run without drafts.

    expected: theorem 3.8 of Leviathan et al. (2023), averaged over steps of k drafts each.  For a
    tree, k is its depth and the cost that of a whole level.  simple: the same for the mean k.
    """

    expected: float
    simple: float
    measured: float
    draft_cost: float | None
    in_time: float | None


class Speculation(Struct, frozen=True, kw_only=True):
    """The drafts of a run; changes: how often a row's number of drafts changed, by reason."""

    rule: Acceptance
    steps: int
    drafted: int
    accepted: int
    rejected: int
    acceptance: float
    token_acceptance: float
    by_position: list[PositionAcceptance]
    tokens_per_step: float
    wasted: float
    returned_blocks: int
    changes: dict[str, int]
    speedup: Speedup


class Durations(Totals):
    """The number of some steps, their total duration and their drafts."""

    num_steps: int = 0
    seconds: float = 0.0
    num_drafts: int = 0


class SpeculationTotals(Totals):
    """The sums behind Speculation.

    without, drafting: durations of the steps without and with drafts that computed nothing else but
    next tokens, by their rows.  num_decode_steps: of sequences that speculated.
    """

    counts: DraftCounts = field(default_factory=DraftCounts)
    without: dict[int, Durations] = field(default_factory=dict)
    drafting: dict[int, Durations] = field(default_factory=dict)
    changes: Counter[SpeculateReason] = field(default_factory=Counter)
    num_decode_steps: int = 0

    def add(self, event: StepsEvent, begin: float) -> None:
        """Add the durations of the steps of `event`, the first of which began at `begin`."""
        ends, num_drafts = [begin, *event.ends], event.drafts or [0] * len(event.ends)
        columns = zip(event.decodes, event.prefills, num_drafts, strict=False)
        for (start, end), (rows, prefills, drafts) in zip(pairwise(ends), columns, strict=False):
            if rows and prefills == drafts:
                found = (self.drafting if drafts else self.without).setdefault(rows, Durations())
                found.num_steps += 1
                found.seconds += end - start
                found.num_drafts += drafts

    def draft_cost(self) -> float | None:
        """Return the share of a step that one draft adds, at least 0; None without data."""
        taken = usual = drafts_per_row = 0.0
        for rows, drafting in self.drafting.items():
            without = self.without.get(rows)
            if without is not None:
                taken += drafting.seconds
                step = without.seconds / without.num_steps
                usual += step * drafting.num_steps
                drafts_per_row += step * drafting.num_drafts / rows
        return max(0.0, (taken - usual) / drafts_per_row) if drafts_per_row else None

    def report(self, rule: Acceptance, num_positions: int) -> Speculation | None:
        """Return the numbers of the drafts, given all computed positions; None without drafts."""
        counts = self.counts
        num_drafted, num_accepted = counts.num_drafted, counts.num_accepted
        if not num_drafted:
            return None
        tested = num_accepted + counts.num_rejecting
        acceptance = num_accepted / tested if tested else 0.0
        num_decode_steps = max(self.num_decode_steps, counts.num_steps)
        cost, mean_length = self.draft_cost(), counts.num_on_end / counts.num_steps
        level_cost = (cost or 0.0) * (num_drafted / counts.num_on_end)
        expected: float = num_decode_steps - counts.num_steps
        expected += sum(
            number * expected_speedup(acceptance, length, level_cost)
            for length, number in counts.lengths.items()
        )
        measured = 1 + num_accepted / num_decode_steps
        longer = None if cost is None else 1 + cost * num_drafted / num_decode_steps
        return Speculation(
            rule=rule,
            steps=counts.num_steps,
            drafted=num_drafted,
            accepted=num_accepted,
            rejected=counts.num_rejected,
            acceptance=share_of(num_accepted, num_drafted),
            token_acceptance=round(acceptance, NUM_DIGITS),
            by_position=[
                PositionAcceptance(drafted, accepted, share_of(accepted, drafted))
                for drafted, accepted in counts.by_position()
            ],
            tokens_per_step=round(1 + num_accepted / counts.num_steps, 3),
            wasted=share_of(num_drafted - num_accepted, num_positions),
            returned_blocks=counts.blocks,
            changes={reason: self.changes[reason] for reason in get_args(SpeculateReason)},
            speedup=Speedup(
                expected=round(expected / num_decode_steps, 3),
                simple=round(simple_return(acceptance, mean_length, level_cost), 3),
                measured=round(measured, 3),
                draft_cost=None if cost is None else round(cost, NUM_DIGITS),
                in_time=None if longer is None else round(measured / longer, 3),
            ),
        )


def decode_steps_of(found: RequestTimeline, num_tokens: int) -> int:
    """Return how many steps gave a slot tokens after its first one; 0 without drafts."""
    admissions = found.admissions
    if not any(admission.num_drafted for admission in admissions):
        return 0
    num_extra = sum(admission.num_jumped + admission.num_accepted for admission in admissions)
    num_first = sum(admission.first_token is not None for admission in admissions)
    return num_tokens - num_extra - num_first
