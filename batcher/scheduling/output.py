"""What a step is to do: who comes, who has to go, and which tokens are computed."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple

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


class Blocked(NamedTuple, Generic[S]):
    """Why the first of the waiting queue was not admitted, though a slot was free for it."""

    first: S
    reason: BlockedReason
    num_blocks: int


class SchedulerOutput(Generic[S]):
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

    __slots__ = (
        "admitted",
        "blocked",
        "budget",
        "grown",
        "has_continued",
        "is_decode_step",
        "num_drafts",
        "num_scheduled_tokens",
        "preempted",
        "prefill_finished",
    )

    def __init__(self) -> None:
        self.preempted: list[Preemption[S]] = []
        self.admitted: list[S] = []
        self.num_scheduled_tokens: dict[S, int] = {}
        self.prefill_finished: list[S] = []
        self.grown: list[S] = []
        self.num_drafts: Mapping[S, int] = NO_DRAFTS
        self.is_decode_step = True
        self.blocked: Blocked[S] | None = None
        self.budget = 0
        self.has_continued = False
