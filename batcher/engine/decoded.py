"""What decoding comes to: of a step, and of a row at its end."""

from collections.abc import Mapping

from msgspec import Struct

from batcher.errors import Failure
from batcher.result import ConstraintCheck, ConstraintOutcome, FinishReason, TokenLogprob


class Generated(Struct, frozen=True, gc=False):
    """The output of a row, before it is made a result.

    failure: what is wrong with the output itself.  The others: as in the result.
    """

    tokens: list[int]
    reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    constraint: ConstraintOutcome | None = None
    constraint_check: ConstraintCheck | None = None
    failure: Failure | None = None


class Decoded(Struct, frozen=True):
    """What a step has led to, beside one more token in every row.

    Of groups, the slots of their first rows are given.

    stopped: rows that have come to their end.  failed: rows that got no token.
    jumps: the tokens of rows that got several.
    forks: (source, target) of beams: target goes on from what the model holds for source.
    """

    stopped: list[int]
    failed: Mapping[int, Failure]
    jumps: Mapping[int, list[int]]
    forks: list[tuple[int, int]]


NOTHING_DECODED = Decoded([], {}, {}, [])
