"""One output of a request on its way through the engine."""

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from batcher.decoding.logprobs import PromptLogprobs
from batcher.decoding.stop_matcher import AutomatonPlace
from batcher.decoding.stops import StopAutomaton
from batcher.errors import Failure
from batcher.events import ArriveReason
from batcher.models.base import Context
from batcher.prompts import Prompt
from batcher.request import Request
from batcher.result import (
    ConstraintCheck,
    ConstraintOutcome,
    FinishReason,
    LengthLimit,
    Result,
    TokenLogprob,
)
from batcher.scheduling.sequence import NEVER, Schedulable
from batcher.tokens import NO_TOKENS, Tokens, joined

if TYPE_CHECKING:
    from batcher.decoding.sampling import SuspendedSampling
    from batcher.engine.rows import BeamRows, RowState
    from batcher.speculation.proposal import Proposal

# Rows that are out of the batch for a while.


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


# What the conversation of a session has come to, and which of its turns are dropped.
#
# Rule: of one session at most one turn is a sequence; the others wait here, in input order.


class Turn(NamedTuple):
    """A request of a session as it was added to the engine.

    replayed: what an earlier run found, by index.  is_streamed: see Engine.enqueue.
    """

    request: Request
    request_id: str
    input_index: int
    arrive_reason: ArriveReason
    replayed: Mapping[int, Result]
    is_streamed: bool


class PastTurn(NamedTuple):
    """A turn that has ended.

    tokens: its own prompt, and its output.  num_lasting: how many of them, from the first on, stay
    if it is dropped.
    """

    tokens: Tokens
    num_lasting: int


class DroppedTurns(NamedTuple):
    """How many of the oldest turns are dropped for another one, and how many tokens of them."""

    num_turns: int
    num_tokens: int


NOTHING_DROPPED = DroppedTurns(0, 0)


class Session:
    """What one conversation has come to.

    kept: the tokens that have stayed of turns that were dropped.  past: the turns that have ended
    since.  end: when the last of them did; None before the first has.
    num_history: how many tokens the turn that is a sequence goes on from.
    failure: why no turn can go on from here, if that is so.
    active: the id of the turn that is a sequence; None if there is none.  turns: that wait for it.
    """

    def __init__(self) -> None:
        self.kept: Tokens = NO_TOKENS
        self.past: list[PastTurn] = []
        self.num_history = 0
        self.end: float | None = None
        self.failure: str | None = None
        self.active: str | None = None
        self.turns: deque[Turn] = deque()

    def history(self, vocab_size: int | None) -> Tokens:
        return joined((self.kept, *(turn.tokens for turn in self.past)), vocab_size)

    def drop(self, num_more: int, context: Context, vocab_size: int | None) -> DroppedTurns:
        """Drop the oldest turns until `num_more` tokens fit behind the others, or none is left."""
        lengths = [(len(turn.tokens), turn.num_lasting) for turn in self.past]
        number = context.num_dropped(lengths, len(self.kept) + num_more)
        if not number:
            return NOTHING_DROPPED
        dropped, self.past = self.past[:number], self.past[number:]
        lasting = [turn.tokens[: turn.num_lasting] for turn in dropped]
        self.kept = joined((self.kept, *lasting), vocab_size)
        return DroppedTurns(number, sum(len(turn.tokens) - turn.num_lasting for turn in dropped))

    def break_off(self, request_id: str, outcome: str, place: int) -> list[Turn]:
        """Let nothing go on after a turn; return those that wait, from `place` on."""
        if self.failure is None:
            self.failure = (
                f"a turn before it in its session, request {request_id!r}, ended with {outcome!r}"
            )
        turns = list(self.turns)[place:]
        for _ in turns:
            self.turns.pop()
        return turns


# What decoding comes to: of a step, and of a row at its end.


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


class SequenceExtras(Struct, gc=False):  # as Sequence
    """What only sequences have that are not plain, or not computed anew.

    Set by inputs.py, jumped_step by model_runner.py.

    replayed: what an earlier run found; the model is not asked again.
    num_healed: tokens of the prompt that are generated anew instead, from their bytes, `healing`.
    prompt_logprobs: what is told of the prompt, in one for all samples; None if nothing is.
    failure: why it can never run, if so.
    dropped: which turns of its session it does not go on from, since the context has no room.
    overflow: how it fails at the end of its max_tokens, which are all that KV blocks can hold.
    jumped_step: the last step that gave it several tokens.
    """

    replayed: Result | None = None
    num_healed: int = 0
    healing: bytes = b""
    prompt_logprobs: PromptLogprobs | None = None
    failure: Failure | None = None
    dropped: DroppedTurns = NOTHING_DROPPED
    overflow: Failure | None = None
    jumped_step: int = NEVER


class Sequence(Schedulable, eq=False, gc=False, kw_only=True):  # it is part of no cycle
    """What one slot is given to: a sample, a beam, or the negative prompt beside a sample.

    Its fields are of three groups with one writer each, as tests/test_ownership.py checks.
    What was asked for, beside that of Schedulable; set by inputs.py:
    request: what it is an output of.  prompt: what the model reads first.
    automaton: what its output is watched for.  arrive_reason: why it arrives when it does.
    is_streamed: whether its tokens are told as they come, if the engine tells any.
    limit: what its max_tokens are, if it is not its request that states them.
    extras: None for a plain sequence: greedy tokens until a stop, and nothing else.

    Where it stands: see Schedulable; set by the scheduler.

    What it has generated; set by model_runner.py:
    generated: the tokens that the model has to compute again, or all at once; None while each goes
    to the model by itself.
    """

    request: Request
    prompt: Prompt
    automaton: StopAutomaton
    arrive_reason: ArriveReason
    is_streamed: bool = True
    limit: LengthLimit | None = None
    extras: SequenceExtras | None = None

    generated: list[int] | None = None

    @property
    def speculates(self) -> bool:
        """Whether it may be given drafts: no beam is, nor who has a negative prompt beside it."""
        is_alone = self.role == "sample" and not self.others
        is_computed = self.extras is None or self.extras.replayed is None
        return is_alone and is_computed and self.request.speculate

    @property
    def healing(self) -> bytes:
        return b"" if self.extras is None else self.extras.healing

    def known_tokens(self, start: int, stop: int) -> Tokens:
        """Return the tokens start..stop of its prompt and of what is `generated`."""
        prompt, num_prompt = self.prompt.tokens, self.num_prompt_tokens
        if stop <= num_prompt:
            return prompt if stop - start == num_prompt else prompt[start:stop]
        generated = self.generated or []
        rest = generated[max(start - num_prompt, 0) : stop - num_prompt]
        if start >= num_prompt:
            return rest
        known = prompt[start:]  # a copy
        known.extend(rest)
        return known
