"""What the scheduler knows of a sequence: what was asked for, and where it stands."""

from typing import Self, TypeVar

from msgspec import Struct

from batcher.events import Role, SequenceName
from batcher.lifecycle import State
from batcher.scheduling.blocks import ROOT, Node, PrefixMatch

NEVER = -1  # the step or the number of what has not happened
NO_SLOT = -1


class Schedulable(Struct, eq=False, gc=False, kw_only=True):  # it is part of no cycle
    """A sample, a beam, or the negative prompt beside a sample, as far as it is scheduled.

    The first sequence of a sequence group stands for the group in the queue: `others` are admitted,
    preempted and ended together with it.

    Its fields are of three groups with one writer each, as tests/test_ownership.py checks; what
    makes a sequence (SequenceMaker, for example) gives all of them their first value.

    What was asked for, and when it arrived; set by what makes it:
    index: of the sample or beam in its request.  input_index: the request's, in the input.
    num_prompt_tokens: how many tokens it starts with.  max_tokens: how many it generates at most.
    has_default_limit: whether the request does not state that itself.
    others: the other beams, or the negative prompt.  num_slots: how many slots the group needs.
    has_siblings: whether there are other samples of its request, which start with the same tokens.
    cache_salt: whose blocks it may share.  skips_prefix_cache: it starts from no blocks but those
    of other samples of its request.
    segment_ends: where segments of the prompt end, each with the eviction priority of its blocks.
    arrived_step: the first one at or after its arrival time; None before that.

    Where it stands; set by the scheduler (scheduling/):
    admitted_step, first_token_step: the steps in which each happened first; None before.
    num_tokens: of those it starts with and those it has generated, when it began to compute them.
    num_computed_tokens: how many of them are, by the end of the step that is scheduled.  While it
    decodes both stand still, and are brought up to date when it stops: the position of the token
    that it computes in a decode step is the number of that step plus `offset`.
    last_decode_step: the one after which it has all its tokens, while it decodes.
    queue_number, admission: the numbers of when it first joined the queue, and of its admission;
    later ones have larger numbers.
    num_cached_tokens: how many tokens of its last admission were found in blocks.
    cached_from: who filled the last of these blocks, as far as it was found; None without any.
    block_table: the blocks it holds, in the order of its tokens; the first num_cached_blocks of
    them are registered, and `parent` is the node of the last of these.
    group_tables: of the further cache groups, as long as that one; see KVCache.
    prefix: what was found of it when that was last asked, while it waits.
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
        """Those of its group that the model computes: other beams only after the first fork."""
        if not self.others:
            return (self,)
        return (self, *(row for row in self.others if row.num_tokens or row.role != "beam"))

    @property
    def beams_to_fork(self) -> tuple[Self, ...]:
        """The beams of its group that begin with the first fork; one of max_tokens 1 has none."""
        if self.max_tokens <= 1:
            return ()
        return tuple(row for row in self.others if row.role == "beam" and not row.num_tokens)

    @property
    def most_tokens(self) -> int:
        """How many tokens are computed at most: the last one that is generated is not."""
        return max(self.num_prompt_tokens + self.max_tokens - 1, 1)

    @property
    def num_generated(self) -> int:
        """How many tokens it had generated when it began to compute what it knows."""
        return self.num_tokens - self.num_prompt_tokens


S = TypeVar("S", bound=Schedulable)
