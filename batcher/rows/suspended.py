"""What is left of rows while they are out of the batch: enough to go on as if nothing had been."""

from msgspec import Struct

from batcher.decoding.machine_table import Place
from batcher.decoding.sampling.sampler import SuspendedSampling
from batcher.rows.beam_rows import BeamRows
from batcher.rows.row import Row


class SuspendedRow(Struct, frozen=True):
    """What the tables knew of one row; None for what they did not."""

    place: Place | None
    row: Row | None = None
    sampling: SuspendedSampling | None = None


class SuspendedRows(Struct, frozen=True):
    """The rows of a leader and its companions.

    tokens: what each of them has generated, the leader's first, for all rows that the model has to
    compute again: a request for beams has but one before its first step.
    rows: of those the tables know, the leader's first, in the order of the companions.
    """

    tokens: list[list[int]]
    rows: list[SuspendedRow]
    beams: BeamRows | None = None
