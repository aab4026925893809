"""Rows that are out of the batch for a while."""

from typing import TYPE_CHECKING

from msgspec import Struct

from batcher.decoding.stop_matcher import AutomatonPlace

if TYPE_CHECKING:  # plain rows need none of it
    from batcher.decoding.sampling import SuspendedSampling
    from batcher.engine.rows import BeamRows, RowState


class SuspendedRow(Struct, frozen=True):
    """What the tables knew of one row; None for what they did not."""

    place: AutomatonPlace | None
    state: "RowState | None" = None
    sampling: "SuspendedSampling | None" = None


class SuspendedRows(Struct, frozen=True):
    """The rows of a group: enough to go on as if nothing had been.

    tokens: what each of them has generated, in the order of the group, for all rows that the model
    has to compute again: a request for beams has but one before its first step.
    rows: of those the tables know, in the order of the group.
    """

    tokens: list[list[int]]
    rows: list[SuspendedRow]
    beams: "BeamRows | None" = None
