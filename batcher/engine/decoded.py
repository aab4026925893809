"""What decoding comes to: of a step, and of a row at its end."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec import Struct

from batcher.errors import Failure
from batcher.result import ConstraintCheck, ConstraintOutcome, FinishReason, TokenLogprob

if TYPE_CHECKING:
    from batcher.speculation.proposal import Proposal


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
    constraint_verified: tuple[str, ...] | None = None
    failure: Failure | None = None


class Decoded(Struct, frozen=True):
    """What a step has led to, beside one more token in every row.

    Of groups, the slots of their first rows are given.

    stopped: rows that have come to their end.  failed: rows that got no token.
    jumps: the tokens of rows that got several.
    forks: (source, target) of beams: target goes on from what the model holds for source.
    num_accepted: how many drafts were accepted of each row that had any accepted.
    ways: which these are, of rows whose drafts were a tree: their numbers in the Proposal.
    given: the tokens of each row that speculates, those of jumps included.
    """

    stopped: list[int]
    failed: dict[int, Failure]
    jumps: dict[int, list[int]]
    forks: list[tuple[int, int]]
    num_accepted: dict[int, int] = {}
    given: dict[int, list[int]] = {}
    ways: dict[int, list[int]] = {}


NO_DRAFTS: "Mapping[int, Proposal]" = MappingProxyType({})
NOTHING_DECODED = Decoded([], {}, {}, [])
