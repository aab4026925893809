"""What drafts brought a run: how many were accepted, what they cost, how much faster it was.

Rule: what is expected is told beside what was measured, and both of the same steps.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, get_args

from msgspec import Struct, field

from batcher.events import (
    AcceptEvent,
    DraftEvent,
    Event,
    FinishEvent,
    RollbackEvent,
    SpeculateEvent,
    SpeculateReason,
    StepsEvent,
)
from batcher.speculation.formulas import expected_speedup, simple_return
from batcher.speculation.settings import Acceptance
from batcher.totals import Totals
from batcher.trace.drafts import DraftCounts, StepDrafts
from batcher.trace.records import RequestTimeline

NUM_DIGITS = 6


class PositionAcceptance(Struct, frozen=True):
    """What became of the i-th drafts of all steps; share: of the drafted, those accepted.

    Of a tree the i-th are those of its i-th level, which count as one.
    """

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

    expected: by (1 - a^(k+1)) / ((1 - a) (1 + c k)), the mean over their steps, of k drafts each
    (Leviathan et al., 2023, theorem 3.8); of a tree, k is how deep it is, and c for all drafts of a
    level.  simple: k a / (1 + c), with the mean k of steps that drafted.
    measured: tokens of a decode step.  draft_cost: c, by how much a draft made a step longer, in
    steps without any; None where nothing tells that, and taken for 0.  in_time: measured, in time;
    None with it.
    """

    expected: float
    simple: float
    measured: float
    draft_cost: float | None
    in_time: float | None


class Speculation(Struct, frozen=True, kw_only=True):
    """What became of the drafts of a run.

    rule: which of them were accepted, see SpeculationSettings.acceptance.
    steps: how often a step verified drafts of a row.  acceptance: accepted of drafted.
    token_acceptance: a, accepted of those whose drafts before them were; of a tree, how often one
    of them was.  by_position: the first comes first.  tokens_per_step: that such a step gave, with
    the one that every step gives.  wasted: drafts that were not accepted, of all positions
    computed.  returned_blocks: given back after rejections.
    """

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
        """Return how much longer a draft of a row made a step, in steps without any.

        None where no steps can be compared; never less than 0.
        """
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
    """What adds up of drafts.

    changes: as in DraftChanges.  num_decode_steps: of sequences that speculated.
    """

    counts: DraftCounts = field(default_factory=DraftCounts)
    costs: DraftedStepCosts = field(default_factory=DraftedStepCosts)
    changes: Counter[SpeculateReason] = field(default_factory=Counter)
    num_decode_steps: int = 0

    def numbers(self, rule: Acceptance, num_positions: int) -> Speculation | None:
        """Return what became of the drafts, None if there were none.

        num_positions: how many were computed in all.
        """
        counts = self.counts
        num_drafted, num_accepted = counts.num_drafted, counts.num_accepted
        if not num_drafted:
            return None
        num_decode_steps = self.num_decode_steps
        tested = num_accepted + counts.num_rejecting
        acceptance = num_accepted / tested if tested else 0.0
        return Speculation(
            rule=rule,
            steps=counts.num_steps,
            drafted=num_drafted,
            accepted=num_accepted,
            rejected=counts.num_rejected,
            acceptance=_share(num_accepted, num_drafted),
            token_acceptance=round(acceptance, NUM_DIGITS),
            by_position=[
                PositionAcceptance(drafted, accepted, _share(accepted, drafted))
                for drafted, accepted in counts.by_position()
            ],
            tokens_per_step=round(1 + num_accepted / counts.num_steps, 3),
            wasted=_share(num_drafted - num_accepted, num_positions),
            returned_blocks=counts.blocks,
            changes=DraftChanges(*(self.changes[why] for why in get_args(SpeculateReason))),
            speedup=self._speedup(acceptance, max(num_decode_steps, counts.num_steps)),
        )

    def _speedup(self, acceptance: float, num_decode_steps: int) -> Speedup:
        """Return what is expected and what was measured over so many steps."""
        counts, cost = self.counts, self.costs.draft_cost()
        mean_length = counts.num_on_end / counts.num_steps
        level_cost = (cost or 0.0) * (counts.num_drafted / counts.num_on_end)
        num_others = num_decode_steps - counts.num_steps
        expected = num_others + sum(
            number * expected_speedup(acceptance, length, level_cost)
            for length, number in counts.lengths.items()
        )
        measured = 1 + counts.num_accepted / num_decode_steps
        longer = None if cost is None else 1 + cost * counts.num_drafted / num_decode_steps
        return Speedup(
            expected=round(expected / num_decode_steps, 3),
            simple=round(simple_return(acceptance, mean_length, level_cost), 3),
            measured=round(measured, 3),
            draft_cost=None if cost is None else round(cost, NUM_DIGITS),
            in_time=None if longer is None else round(measured / longer, 3),
        )


class SpeculationCount:
    """Takes in what the events of a run tell of its drafts.

    totals: that, of sequences that have ended as far as it is of sequences.
    """

    def __init__(self) -> None:
        self.totals = SpeculationTotals()
        self.has_drafts = False
        self._end = 0.0  # of the last step
        self._takers: dict[type[Event], Callable[[Any], None]] = {
            SpeculateEvent: self._change,
            StepsEvent: self._take_steps,
        }

    def take(self, event: Event, found: RequestTimeline | None) -> None:
        """Take in an event that tells of `found`, which the fold has found right."""
        taker = self._takers.get(type(event))
        if taker is not None:
            taker(event)
        elif found is not None and found.admission is not None:
            record = found.admission.drafts
            if record is not None and record.latest is not None:
                self._take_drafts(event, record.latest)

    def finish(self, event: FinishEvent, found: RequestTimeline) -> None:
        """Take in that a sequence has ended."""
        self.totals.num_decode_steps += decode_steps_of(found, event.tokens)

    def _take_drafts(self, event: Event, drafts: StepDrafts) -> None:
        """Take in an event that tells of the drafts of a step, if it does."""
        match event:
            case DraftEvent():
                self.has_drafts = True
                self.totals.counts.draft(drafts)
            case AcceptEvent():
                self.totals.counts.accepted_lengths[event.tokens] += 1
            case RollbackEvent():
                self.totals.counts.reject(event, drafts)
            case _:
                pass

    def _change(self, event: SpeculateEvent) -> None:
        self.totals.changes[event.reason] += 1

    def _take_steps(self, event: StepsEvent) -> None:
        if self.has_drafts:
            self.totals.costs.take(event, self._end)
        if event.ends:
            self._end = event.ends[-1]

    def totals_after(self, num_steps: int, running: Iterable[RequestTimeline]) -> SpeculationTotals:
        """Return all of it, with the sequences that have not ended after so many steps."""
        totals = self.totals.copy()
        totals.num_decode_steps += sum(
            decode_steps_of(found, found.tokens_after(num_steps - 1)) for found in running
        )
        return totals


def decode_steps_of(found: RequestTimeline, num_tokens: int) -> int:
    """Return how many steps gave a sequence of `num_tokens` others than the first in a slot.

    0 if no step drafted for it.
    """
    admissions = found.admissions
    if not any(admission.num_drafted for admission in admissions):
        return 0
    num_beside = sum(admission.num_jumped + admission.num_accepted for admission in admissions)
    num_first = sum(admission.first_token is not None for admission in admissions)
    return num_tokens - num_beside - num_first


def _share(part: int, whole: int) -> float:
    return round(part / whole, NUM_DIGITS) if whole else 0.0
