"""What the steps of a run used: blocks, tokens, the prefix cache, positions, slots and drafts.

Rule: only what was computed and held counts, whatever came of it.  docs/metrics.md defines every
number.
"""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple, get_args

from msgspec import Struct, field

from batcher.events import ArriveEvent, BlockedReason, SpeculateReason, StepsEvent
from batcher.speculation.settings import Acceptance, expected_speedup, simple_return
from batcher.trace.run import DraftCounts, RequestTimeline, Totals


class KvUse(Struct, frozen=True, kw_only=True):
    """Blocks that sequences held; shares are None without a limit of blocks."""

    block_size: int
    total: int | None
    mean_blocks: float
    max_blocks: int
    mean_share: float | None
    max_share: float | None


class BudgetUse(Struct, frozen=True, kw_only=True):
    """The part of the token budget of steps that was computed."""

    max_batch_tokens: int
    mean_share: float
    full_steps: int


class PrefixHits(Struct, frozen=True, kw_only=True):
    """Tokens found in blocks, of all that samples were admitted with, first or again."""

    asked: int
    found: int
    share: float
    asked_again: int
    found_again: int


class Preemptions(Struct, frozen=True, kw_only=True):
    """Preemptions of samples or beams of a request, and the tokens computed again after them."""

    count: int
    recomputed_tokens: int


class BlockedSteps(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Steps in which a slot was free for the first of the queue, and it was not admitted."""

    kv: int
    tokens: int
    preemption: int
    batch: int
    rate: int = 0
    concurrency: int = 0


class Computed(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens that were computed, and the padding of other layouts beside."""

    prefill_tokens: int
    decode_tokens: int
    right_padding: int
    left_padding: int
    prefill_share: float
    draft_tokens: int = 0


class Positions(Struct, frozen=True, kw_only=True):
    """total: how many positions were computed.  padding: how many of them held no token."""

    total: int
    padding: int


class IdleCauses(Struct, frozen=True, omit_defaults=True):
    """Slot-steps without a sequence, by what would have filled them; see BlockedEvent."""

    tail: int
    arrivals: int
    empty_queue: int
    too_few: int
    kv: int = 0
    tokens: int = 0
    preemption: int = 0
    batch: int = 0
    rate: int = 0
    concurrency: int = 0


class _Idle(NamedTuple):
    """So many idle slots in the steps [start, end); reason: what blocked the next, if known."""

    start: int
    end: int
    num_slots: int
    reason: BlockedReason | None


class SlotUse:
    """Busy and idle slot-steps, integrated from one event to the next.

    Which request the idle slots were waiting for is known when the next one is admitted: until then
    they are undecided.
    """

    def __init__(self) -> None:
        self.num_slots = self.num_occupied = 0
        self.integrated_steps = 0
        self.busy = 0
        self.idle = dict[str, int](arrivals=0, empty_queue=0, too_few=0)
        self.undecided: list[_Idle] = []  # of all steps
        self.reason: BlockedReason | None = None  # why the next one is not admitted, if known

    def occupy(self, step: int, change: int) -> None:
        """From `step` on, let so many slots more be occupied."""
        if step != self.integrated_steps:
            start, self.integrated_steps = self.integrated_steps, step
            self.busy += self.num_occupied * (step - start)
            if self.num_occupied < self.num_slots:
                num_idle = self.num_slots - self.num_occupied
                self.undecided.append(_Idle(start, step, num_idle, self.reason))
        self.num_occupied += change

    def restart(self, step: int) -> None:
        self.occupy(step, -self.num_occupied)
        self.reason = None
        self.undecided.clear()

    def take(self, step: int, arrive: ArriveEvent) -> None:
        """Occupy a slot from `step` on, with a request that arrived as `arrive` says."""
        self.occupy(step, 1)
        for start, end, num_idle, reason in self.undecided:
            arrived = min(max(start, arrive.step), end)
            cause = "empty_queue" if arrive.reason == "follow" else "arrivals"
            self._count(cause, (arrived - start) * num_idle)
            self._count(reason or "too_few", (end - arrived) * num_idle)
        self.undecided.clear()
        self.reason = None

    def take_again(self, step: int, preempted: int) -> None:
        """Occupy a slot from `step` on, with a sequence that was preempted before `preempted`.

        Slots that were idle before that were not waiting for it, but for one still to come.
        """
        self.occupy(step, 1)
        undecided, self.undecided, self.reason = self.undecided, [], None
        for idle in undecided:
            waited = max(0, idle.end - max(idle.start, preempted))
            self._count(idle.reason or "too_few", waited * idle.num_slots)
            if idle.start < preempted:
                self.undecided.append(idle._replace(end=min(idle.end, preempted)))

    def _count(self, cause: str, slot_steps: int) -> None:
        self.idle[cause] = self.idle.get(cause, 0) + slot_steps


NUM_DIGITS = 6


class PositionAcceptance(Struct, frozen=True):
    """What became of the i-th drafts of all steps, or of the i-th level of trees."""

    drafted: int
    accepted: int
    share: float


class DraftChanges(Struct, frozen=True):
    """How often another number of drafts was wanted for a row, by the reason."""

    gain: int
    cost: int
    failure: int


class Speedup(Struct, frozen=True, kw_only=True):
    """How many times as many tokens rows that speculate were given as without drafts.

    expected: by theorem 3.8 of Leviathan et al. (2023), the mean over steps of k drafts each; of a
    tree, k is how deep it is, and the cost that of all drafts of a level.  simple: by the mean k.
    """

    expected: float
    simple: float
    measured: float
    draft_cost: float | None
    in_time: float | None


class Speculation(Struct, frozen=True, kw_only=True):
    """What became of the drafts of a run."""

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
    changes: DraftChanges
    speedup: Speedup


class Durations(Totals):
    """How long some steps took together, and how many drafts they verified."""

    num_steps: int = 0
    seconds: float = 0.0
    num_drafts: int = 0


class DraftedStepCosts(Totals):
    """Finds out how much longer steps took that verified drafts, from when steps ended.

    Steps are compared that computed nothing but next tokens and drafts, of equally many rows each.
    Those before the first drafts are left out.
    without, drafting: by the number of rows.
    """

    without: dict[int, Durations] = field(default_factory=dict)
    drafting: dict[int, Durations] = field(default_factory=dict)

    def take(self, event: StepsEvent, begin: float) -> None:
        """Take in what the next steps computed, and when they ended; the first began at `begin`."""
        ends, num_drafts = [begin, *event.ends], event.drafts or [0] * len(event.ends)
        columns = zip(event.decodes, event.prefills, num_drafts, strict=False)
        for (start, end), (rows, prefills, drafts) in zip(pairwise(ends), columns, strict=False):
            if rows and prefills == drafts:
                found = (self.drafting if drafts else self.without).setdefault(rows, Durations())
                found.num_steps += 1
                found.seconds += end - start
                found.num_drafts += drafts

    def draft_cost(self) -> float | None:
        """Return how much longer a draft made a step, at least 0; None if nothing compares."""
        taken = usual = 0.0
        drafts_per_row = 0.0
        for rows, drafting in self.drafting.items():
            without = self.without.get(rows)
            if without is not None:
                taken += drafting.seconds
                step = without.seconds / without.num_steps
                usual += step * drafting.num_steps
                drafts_per_row += step * drafting.num_drafts / rows
        return max(0.0, (taken - usual) / drafts_per_row) if drafts_per_row else None


class SpeculationTotals(Totals):
    """What adds up of drafts; num_decode_steps: of sequences that speculated."""

    counts: DraftCounts = field(default_factory=DraftCounts)
    costs: DraftedStepCosts = field(default_factory=DraftedStepCosts)
    changes: Counter[SpeculateReason] = field(default_factory=Counter)
    num_decode_steps: int = 0

    def numbers(self, rule: Acceptance, num_positions: int) -> Speculation | None:
        """Return what became of the drafts among so many positions, None if there were none."""
        counts = self.counts
        num_drafted, num_accepted = counts.num_drafted, counts.num_accepted
        if not num_drafted:
            return None
        tested = num_accepted + counts.num_rejecting
        acceptance = num_accepted / tested if tested else 0.0
        num_decode_steps = max(self.num_decode_steps, counts.num_steps)
        cost, mean_length = self.costs.draft_cost(), counts.num_on_end / counts.num_steps
        level_cost = (cost or 0.0) * (num_drafted / counts.num_on_end)
        expected = (
            num_decode_steps
            - counts.num_steps
            + sum(
                number * expected_speedup(acceptance, length, level_cost)
                for length, number in counts.lengths.items()
            )
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
            changes=DraftChanges(*(self.changes[why] for why in get_args(SpeculateReason))),
            speedup=Speedup(
                expected=round(expected / num_decode_steps, 3),
                simple=round(simple_return(acceptance, mean_length, level_cost), 3),
                measured=round(measured, 3),
                draft_cost=None if cost is None else round(cost, NUM_DIGITS),
                in_time=None if longer is None else round(measured / longer, 3),
            ),
        )


def decode_steps_of(found: RequestTimeline, num_tokens: int) -> int:
    """Return how many steps gave others than the first token in a slot; 0 without drafts."""
    admissions = found.admissions
    if not any(admission.num_drafted for admission in admissions):
        return 0
    num_beside = sum(admission.num_jumped + admission.num_accepted for admission in admissions)
    num_first = sum(admission.first_token is not None for admission in admissions)
    return num_tokens - num_beside - num_first


def share_of(part: int, whole: int) -> float:
    return round(part / whole, NUM_DIGITS) if whole else 0.0
