"""What a simulation comes to: the times of each sequence, and what the steps were used for."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from msgspec import Struct, field

from batcher.metrics.arrays import ServedTimes
from batcher.planning.simulated_sequence import SimulatedSequence
from batcher.timing.step_time import TICKS_PER_SECOND


class SimulationTotals(Struct, gc=False):
    """What all steps come to.

    num_steps: those that computed something.  num_prompt_steps: those in which no row decoded on,
    as all that decode stood still.
    computed_tokens: known, generated or drafted.  prefill_tokens: those of them that were known.
    recomputed_tokens: computed, lost by preemptions, and not found in blocks again.
    asked_tokens, found_tokens: what sequences were admitted with the first time, and what of it was
    found in blocks.  num_cached: found in blocks by all admissions.
    slot_steps, block_steps: slots and blocks held, summed over all steps.
    num_drafts, num_accepted: drafts that were verified, and those of them that were accepted.
    num_draft_rows: the rows that verified some, summed over all steps.  draft_ticks: how long it
    took to make them.  draft_work: what verifying them adds to prefill_work, see StepTime.
    num_loaded_blocks: read back from a second tier.  loading_ticks: how long that took.
    unread_tokens: how much less all rows read since accepted tokens needed no step of their own.
    binding_ticks: how long each of arrivals (nobody waited), slots, kv, tokens, preemption and
    batch kept the first of the waiting queue out of steps.
    """

    num_steps: int = 0
    num_prompt_steps: int = 0
    computed_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0
    asked_tokens: int = 0
    found_tokens: int = 0
    num_cached: int = 0
    slot_steps: int = 0
    block_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_draft_rows: int = 0
    draft_ticks: int = 0
    draft_work: int = 0
    num_loaded_blocks: int = 0
    loading_ticks: int = 0
    unread_tokens: int = 0
    binding_ticks: Counter[str] = field(default_factory=Counter)

    @property
    def binding_shares(self) -> dict[str, float]:
        """The share of each of binding_ticks in the time of all steps; largest first."""
        total = self.binding_ticks.total()
        shares = self.binding_ticks.most_common()
        return {name: count / total for name, count in shares} if total else {}


class SimulationResult(Struct, frozen=True):
    """sequences: in the order of the workload's jobs.

    num_slots, num_blocks, max_batch_tokens: the limits; None for none.
    end_ticks: when the last step had ended.
    """

    sequences: list[SimulatedSequence]
    totals: SimulationTotals
    num_slots: int
    num_blocks: int | None
    max_batch_tokens: int | None
    end_ticks: int

    @property
    def end(self) -> float:
        """When the last step had ended, in seconds."""
        return self.end_ticks / TICKS_PER_SECOND


def times_of(sequences: Iterable[SimulatedSequence]) -> ServedTimes:
    """Return the times of sequences that came to their end."""
    return served_times(
        (
            sequence.arrival_time,
            sequence.admitted,
            sequence.first_token,
            sequence.end,
            sequence.num_output_tokens,
        )
        for sequence in sequences
    )


def served_times(rows: Iterable[tuple[float | None, ...]]) -> ServedTimes:
    """Return the fields of ServedTimes, given by request, as columns; None is NaN."""
    table = np.array([*rows], float).reshape(-1, len(ServedTimes._fields))
    arrival, admitted, first_token, end, num_tokens = np.ascontiguousarray(table.T)
    return ServedTimes(arrival, admitted, first_token, end, num_tokens.astype(np.int64))
