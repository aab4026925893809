"""The scheduler's view of a sequence: the request's limits, and the progress."""

from typing import Self, TypeVar

from msgspec import Struct

from batcher.events import Role, SequenceName
from batcher.lifecycle import State
from batcher.scheduling.blocks import ROOT, Node, PrefixMatch

NEVER = -1  # the step of something that has not happened
NO_SLOT = -1


class Schedulable(Struct, eq=False, gc=False, kw_only=True):  # part of no cycle
    """A sample, a beam, or the negative prompt of a sample, as the scheduler sees it.

    The first sequence of a group represents the group in the queue; `others` are admitted,
    preempted and ended together with it.

    Its fields form three groups with one writer each; tests/test_ownership.py checks this.  The
    creator of a sequence (for example SequenceMaker) sets all initial values.

    What was requested, and its arrival; set by the creator:
    index: of the sample or beam in its request.  input_index: of the request in the input.
    num_prompt_tokens: tokens at the start.  max_tokens: the most tokens to generate.
    has_default_limit: whether the request has no max_tokens.
    others: the other beams, or the negative prompt.  num_slots: slots of the group.
    has_siblings: whether its request has other samples, which start with the same tokens.
    cache_salt: only sequences with the same salt share blocks.  skips_prefix_cache: it shares
    blocks only with other samples of its request.
    segment_ends: where segments of the prompt end, each with the eviction priority of its blocks.
    arrived_step: the first step at or after its arrival time; None before that.

    Its progress; set by the scheduler (scheduling/):
    admitted_step, first_token_step: the first steps of each; None before.
    num_tokens: known tokens: the prompt, and the output when it began to compute them.
    num_computed_tokens: computed tokens at the end of the scheduled step.  While it decodes, both
    numbers stand still and are updated when it stops: the position of the token that it computes in
    a decode step is the number of that step plus `offset`.
    last_decode_step: the step after which it has all its tokens, while it decodes.
    queue_number, admission: the order of joining the queue first, and of the last admission.
    num_cached_tokens: prefix-cache hits of the last admission.
    cached_from: the sequence that filled the last of these blocks, if known.
    block_table: its blocks, in the order of its tokens; the first num_cached_blocks are registered,
    and `parent` is the node of the last of these.
    group_tables: of the further cache groups, all of one length; see KVCache.
    prefix: its last match, while it waits.
    """

    id: str
    index: int = 0
    input_index: int = 0
    arrival_time: float = 0.0
    num_prompt_tokens: int
    max_tokens: int
    has_default_limit: bool = False
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    skips_prefix_cache: bool = False
    segment_ends: tuple[tuple[int, int], ...] = ()
    role: Role = "sample"
    others: tuple[Self, ...] = ()
    num_slots: int = 1
    has_siblings: bool = False
    arrived_step: int | None = None

    state: State = State.PENDING
    slot: int = NO_SLOT
    admitted_step: int | None = None
    first_token_step: int | None = None
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    cached_from: SequenceName | None = None
    offset: int = 0
    is_decoding: bool = False
    last_decode_step: int = NEVER
    queue_number: int = NEVER
    admission: int = NEVER
    block_table: list[int] = []
    group_tables: tuple[list[int], ...] = ()
    num_cached_blocks: int = 0
    parent: Node = ROOT
    prefix: PrefixMatch | None = None

    @property
    def name(self) -> SequenceName:
        return SequenceName(self.id, self.index, self.role)

    @property
    def is_first(self) -> bool:
        return self.role == "sample" or (self.role == "beam" and self.index == 0)

    @property
    def group(self) -> tuple[Self, ...]:
        return (self, *self.others)

    @property
    def computed_group(self) -> tuple[Self, ...]:
        """The rows of its group that the model computes; other beams only after the first fork."""
        if not self.others:
            return (self,)
        return (self, *(row for row in self.others if row.num_tokens or row.role != "beam"))

    @property
    def beams_to_fork(self) -> tuple[Self, ...]:
        """The beams that start with the first fork; none if max_tokens is 1."""
        if self.max_tokens <= 1:
            return ()
        return tuple(row for row in self.others if row.role == "beam" and not row.num_tokens)

    @property
    def most_tokens(self) -> int:
        """The largest number of computed tokens: the last generated token is not computed."""
        return max(self.num_prompt_tokens + self.max_tokens - 1, 1)

    @property
    def num_generated(self) -> int:
        """The number of tokens it had generated when it began to compute its known tokens."""
        return self.num_tokens - self.num_prompt_tokens


S = TypeVar("S", bound=Schedulable)
