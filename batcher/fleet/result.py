"""What a fleet comes to: the times of all that were served, and what each replica did.

Rule: no request is kept as an object; what is kept of one are five numbers.
"""

from array import array

import numpy as np
from msgspec import Struct, field

from batcher.metrics.arrays import ServedTimes
from batcher.simulation.result import Totals
from batcher.simulation.sequence import SimulatedSequence
from batcher.timing.step_time import TICKS_PER_SECOND


class Columns:
    """The times of sequences that came to their end, as they are added."""

    def __init__(self) -> None:
        self._columns = tuple(array("d") for _ in ServedTimes._fields)

    def add(self, sequence: SimulatedSequence, num_output_tokens: int) -> None:
        """Take in one that was given tokens."""
        arrival, admitted, first_token, end, num_tokens = self._columns
        arrival.append(sequence.arrival_time)
        admitted.append(sequence.admitted_ticks / TICKS_PER_SECOND)
        first_token.append(sequence.first_token_ticks / TICKS_PER_SECOND)
        end.append(sequence.end_ticks / TICKS_PER_SECOND)
        num_tokens.append(num_output_tokens)

    @property
    def times(self) -> ServedTimes:
        """Them all, in the order in which they were added; nothing may be added after that."""
        arrival, admitted, first_token, end, num_tokens = map(np.frombuffer, self._columns)
        return ServedTimes(arrival, admitted, first_token, end, num_tokens.astype(np.int64))


class ReplicaResult(Struct):
    """What one engine did.

    num_served: sequences that were given tokens.  num_failed: those that could never run.
    kv_read: tokens before its own that each read while it decoded, summed up, less what accepted
    drafts saved.  prefill_work: see StepTime; of all prompts, and of the drafts.
    last_admission_ticks: when a sequence was last admitted for the first time; 0: none was.
    end_ticks: when its last step had ended.
    """

    num_slots: int
    num_blocks: int | None
    max_batch_tokens: int | None
    totals: Totals = field(default_factory=Totals)
    num_served: int = 0
    num_failed: int = 0
    kv_read: int = 0
    prefill_work: int = 0
    last_admission_ticks: int = 0
    end_ticks: int = 0

    def add(self, sequence: SimulatedSequence, columns: Columns) -> None:
        """Take in a sequence that has ended, or failed."""
        if sequence.has_failed:
            self.num_failed += 1
            return
        num_output = sequence.num_output_tokens
        if num_output > 1:
            decoded = num_output - 1
            self.kv_read += decoded * sequence.num_prompt_tokens + decoded * (decoded - 1) // 2
        if sequence.job.max_tokens:
            self.prefill_work += sequence.num_prompt_tokens**2 - sequence.num_cached_at_first**2
        if sequence.first_token_ticks >= 0:
            self.num_served += 1
            self.last_admission_ticks = max(self.last_admission_ticks, sequence.admitted_ticks)
            columns.add(sequence, num_output)

    @property
    def busy_ticks(self) -> int:
        """How long all its steps took together."""
        return sum(self.totals.binding_ticks.values())


class FleetResult(Struct, frozen=True):
    """What all replicas did.

    times: of all that were served.  num_refused: sequences that the router refused.
    first_arrival: in seconds; 0 if there was none.
    """

    replicas: list[ReplicaResult]
    times: ServedTimes
    first_arrival: float
    num_refused: int = 0

    @property
    def num_failed(self) -> int:
        """How many sequences could never run, or were refused."""
        return sum(replica.num_failed for replica in self.replicas) + self.num_refused

    @property
    def end_ticks(self) -> int:
        """When the last step of all had ended."""
        return max(replica.end_ticks for replica in self.replicas)

    @property
    def makespan(self) -> float:
        """From the first arrival to the end of the last step, in seconds."""
        return self.end_ticks / TICKS_PER_SECOND - self.first_arrival
