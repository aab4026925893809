"""Drafts without a model: how many there are, which are accepted, and how long they take to make.

Rule: whether a draft is accepted depends on the sample and the place in its output alone, never on
the schedule, so that all settings are compared with the same luck.
"""

from collections.abc import Iterable, Mapping
from decimal import Decimal

from msgspec import Struct

from batcher.planning.simulated_sequence import SimulatedSequence
from batcher.scheduling.batch import RunningBatch
from batcher.splitmix64 import scramble
from batcher.timing.step_time import StepTime

_BITS = 53  # as many as a float has


class AssumedDrafts(Struct, frozen=True, kw_only=True):
    """What is assumed of the drafts of rows that decode.

    num_tokens: of a row in a step, unless its request says otherwise.
    acceptance: how likely a draft is accepted if all before it are, 0 to 1.
    cost: of one draft of each row, as a share of a step that only decodes these rows.
    """

    num_tokens: int
    acceptance: float
    cost: float = 0.0

    def wanted(
        self, rows: Iterable[SimulatedSequence], decode_step: int
    ) -> dict[SimulatedSequence, int]:
        """Return how many drafts are wanted of which of the rows, those that decode.

        As the engine, which does not know where an output ends, it looks as far as max_tokens.
        """
        num_wanted: dict[SimulatedSequence, int] = {}
        for row in rows:
            if row.is_decoding:
                own = row.job.draft_tokens
                num_left = row.last_decode_step - decode_step
                num_left += row.max_tokens - row.num_output_tokens
                num = min(self.num_tokens if own is None else own, num_left)
                if num > 0:
                    num_wanted[row] = num
        return num_wanted

    def num_accepted(self, job_key: int, place: int, num_drafts: int) -> int:
        """Return how many drafts are accepted of those for the tokens from `place` of an output on.

        job_key: see `key_of`.
        """
        threshold = self.acceptance * 2**_BITS
        for number in range(num_drafts):
            if scramble(job_key + place + number) >> 64 - _BITS >= threshold:
                return number
        return num_drafts

    def ticks(
        self,
        step_time: StepTime,
        batch: RunningBatch[SimulatedSequence],
        num_drafts: Mapping[SimulatedSequence, int],
    ) -> int:
        """Return how long it takes to make drafts of rows, one after the other of each."""
        if not self.cost:
            return 0
        num_rows = len(num_drafts)
        num_read = sum(batch.decode_step + row.offset for row in num_drafts)
        each, per = Decimal(repr(self.cost)).as_integer_ratio()
        rounds = max(num_drafts.values())
        return rounds * step_time.ticks(num_rows, num_rows, num_read, 0) * each // per


def key_of(sequence: SimulatedSequence) -> int:
    """Return what the luck of a sample is drawn from."""
    job = sequence.job
    return scramble((job.input_index << 32) + job.index)


def work_of_drafts(
    batch: RunningBatch[SimulatedSequence], num_drafts: Mapping[SimulatedSequence, int]
) -> int:
    """Return the sum of P * (2 * context + P) over rows that verify P drafts in the decode step."""
    work = 0
    for row, num in num_drafts.items():
        context = batch.decode_step + row.offset + 1
        work += num * (2 * context + num)
    return work
