"""What a step is to do: who comes, who has to go, and which tokens are computed."""

from typing import NamedTuple

from batcher.events import BlockedReason, PreemptReason
from batcher.scheduling.sequence import ScheduledSequence


class PlannedChunk(NamedTuple):
    """Tokens of one row that a step computes, from position `start` on."""

    sequence: ScheduledSequence
    start: int
    num_tokens: int


class Preemption(NamedTuple):
    """A leader that loses its slot and its blocks, for whom and why.

    num_computed: for it and each companion, the tokens that are to be computed again.  They still
    name the slots they had.
    """

    leader: ScheduledSequence
    beneficiary: ScheduledSequence
    reason: PreemptReason
    num_computed: dict[ScheduledSequence, int]


class Hold(NamedTuple):
    """Why the first of the waiting queue was not let in, though a slot was free for it."""

    leader: ScheduledSequence
    reason: BlockedReason
    num_blocks: int


class StepPlan:
    """What a step does beside giving every decoding row its next token.

    preempted: before anything else.  has_preempted: whether anybody had to give way, even if only
    one that the same plan had let in.  admitted: leaders that were given slots, in order.
    chunks: of rows that have more than one token to compute, or begin, in order.  has_continued:
    whether some are of leaders admitted before.
    begun: leaders that give a token in this step and did not in the one before.
    decodes: whether this is a decode step: the decoding rows go on, and those that have begun.
    grown: decoding rows whose next token lies in another block than the one after the last.
    hold: news of why nobody else was let in.
    budget: how many more tokens it may compute.  decode_step: the number of the decode step it is.
    """

    __slots__ = (
        "admitted",
        "begun",
        "budget",
        "chunks",
        "decode_step",
        "decodes",
        "grown",
        "has_continued",
        "has_preempted",
        "hold",
        "preempted",
    )

    def __init__(self, decode_step: int) -> None:
        self.decode_step = decode_step
        self.preempted: list[Preemption] = []
        self.admitted: list[ScheduledSequence] = []
        self.chunks: list[PlannedChunk] = []
        self.begun: list[ScheduledSequence] = []
        self.grown: list[ScheduledSequence] = []
        self.decodes = True
        self.hold: Hold | None = None
        self.budget = 0
        self.has_preempted = self.has_continued = False

    def merge_chunks(self) -> None:
        """Make one chunk of those that follow each other in the same row."""
        merged: dict[ScheduledSequence, PlannedChunk] = {}
        for chunk in self.chunks:
            before = merged.get(chunk.sequence)
            if before is not None:
                num_tokens = before.num_tokens + chunk.num_tokens
                chunk = PlannedChunk(chunk.sequence, before.start, num_tokens)  # noqa: PLW2901
            merged[chunk.sequence] = chunk
        self.chunks = list(merged.values())


NOTHING_NEW = StepPlan(-1)  # for most steps; nothing is ever put into it
