"""What a step is to do: who comes, who has to go, and which tokens are computed."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple

from msgspec import Struct

from batcher.events import BlockedReason, PreemptReason
from batcher.scheduling.sequence import NO_SLOT, S

NO_DRAFTS: Mapping[Any, int] = MappingProxyType({})


class Preemption(NamedTuple, Generic[S]):
    """A group that loses its slots and its blocks, for whom and why.

    num_computed_tokens: for each of its sequences, the tokens that are to be computed again.  They
    still name the slots they had.
    """

    first: S
    beneficiary: S
    reason: PreemptReason
    num_computed_tokens: dict[S, int]

    def forget_slots(self) -> None:
        """Let the sequences be without slots, once all is told of those they had."""
        for row in self.num_computed_tokens:
            row.slot = NO_SLOT


class Blocked(Struct, Generic[S], frozen=True):
    """Why the first of the waiting queue was not admitted, though a slot was free for it."""

    first: S
    reason: BlockedReason
    num_blocks: int


class SchedulerOutput(Struct, Generic[S], eq=False):
    """What a step does beside giving every decoding row its next token.

    Of sequence groups, the first sequences are named.

    preempted: before anything else.  admitted: groups that were given slots, in order.
    num_scheduled_tokens: of rows that have more than one token to compute, or begin, how many are
    computed, in order; `num_computed_tokens` counts them already.
    has_continued: whether some are of groups admitted before.
    prefill_finished: groups that give a token in this step and did not in the one before.
    is_decode_step: whether the decoding rows go on, and those whose prefill is finished.
    grown: decoding rows whose next token lies in another block than the one after the last.
    num_drafts: of rows that speculate, how many drafts there is room for, of those wanted.
    blocked: news of why nobody else was admitted.
    budget: how many more tokens it may compute.
    """

    preempted: list[Preemption[S]] = []
    admitted: list[S] = []
    num_scheduled_tokens: dict[S, int] = {}
    prefill_finished: list[S] = []
    grown: list[S] = []
    num_drafts: Mapping[S, int] = NO_DRAFTS
    is_decode_step: bool = True
    blocked: Blocked[S] | None = None
    budget: int = 0
    has_continued: bool = False
