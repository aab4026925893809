"""One output of a request on its way through the engine."""

from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from batcher.decoding.logprobs import PromptLogprobs
from batcher.decoding.stop_matcher import AutomatonPlace
from batcher.decoding.stops import StopAutomaton, stop_automaton
from batcher.errors import Failure, InvariantError
from batcher.events import ArriveReason, Role
from batcher.models.base import ANY_LENGTH, UNLIMITED, Context, Model, eos_token_ids_of
from batcher.prompts import Prompt, read_prompt
from batcher.request import TO_THE_END, Request, is_plain, num_queued_as
from batcher.result import (
    ConstraintCheck,
    ConstraintOutcome,
    FinishReason,
    LengthLimit,
    Result,
    TokenLogprob,
)
from batcher.scheduling.sequence import NEVER, Schedulable
from batcher.tokens import NO_TOKENS, Tokens

if TYPE_CHECKING:
    from batcher.decoding.beams import BeamSearch
    from batcher.decoding.sampling import SuspendedSampling
    from batcher.engine.rows import RowState


class Suspended(Struct, frozen=True):
    """What the tables knew of a row that is out of the batch for a while; None for what not.

    search: of a group of beams, with its first row.
    """

    place: AutomatonPlace | None
    state: "RowState | None" = None
    sampling: "SuspendedSampling | None" = None
    search: "BeamSearch | None" = None


class DroppedTurns(NamedTuple):
    """How many of the oldest turns of a session are dropped, and how many tokens of them."""

    num_turns: int
    num_tokens: int


NOTHING_DROPPED = DroppedTurns(0, 0)


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

    stopped: list[int] = []
    failed: dict[int, Failure] = {}
    jumps: dict[int, list[int]] = {}
    forks: list[tuple[int, int]] = []
    num_accepted: dict[int, int] = {}
    given: dict[int, list[int]] = {}
    ways: dict[int, list[int]] = {}


NOTHING_DECODED = Decoded()


class More(Struct, gc=False):  # as Sequence
    """What only sequences have that are not plain, or not computed anew.

    Set below and by sessions.py, jumped_step by model_runner.py.

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
    What was asked for, beside that of Schedulable; set by SequenceMaker:
    request: what it is an output of.  prompt: what the model reads first.
    automaton: what its output is watched for.  arrive_reason: why it arrives when it does.
    is_streamed: whether its tokens are told as they come, if the engine tells any.
    limit: what its max_tokens are, if it is not its request that states them.
    more: None for a plain sequence: greedy tokens until a stop, and nothing else.

    Where it stands: see Schedulable; set by the scheduler.

    What it has generated; set by model_runner.py and rows.py:
    generated: the tokens that the model has to compute again, or all at once; None while each goes
    to the model by itself.
    suspended: enough to go on as if nothing had been, while its group waits; None of the row of a
    negative prompt.
    """

    request: Request
    prompt: Prompt
    automaton: StopAutomaton
    arrive_reason: ArriveReason
    is_streamed: bool = True
    limit: LengthLimit | None = None
    more: More | None = None

    generated: list[int] | None = None
    suspended: Suspended | None = None

    @property
    def speculates(self) -> bool:
        """Whether it may be given drafts: no beam is, nor who has a negative prompt beside it."""
        is_alone = self.role == "sample" and not self.others
        is_computed = self.more is None or self.more.replayed is None
        return is_alone and is_computed and self.request.speculate

    @property
    def healing(self) -> bytes:
        return b"" if self.more is None else self.more.healing

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


# From requests to sequences.

Heal = Callable[[Tokens], tuple[list[int], bytes]]


class SequenceMaker:
    """Makes sequences of requests for a model.

    context: what its rows may be.  heal: see VocabularyIndex.heal.
    """

    def __init__(self, model: Model, context: Context, heal: Heal) -> None:
        self._model, self._context, self._heal = model, context, heal
        self._eos_token_ids = eos_token_ids_of(model)

    def make(
        self,
        request: Request,
        request_id: str,
        input_index: int,
        arrive_reason: ArriveReason,
        replayed: Mapping[int, Result],
        is_streamed: bool,  # noqa: FBT001 - one of the fields of a Turn, in their order
        history: Tokens = NO_TOKENS,
    ) -> list[Sequence]:
        """Return what a request waits with: a sequence for each sample, or the first of its beams.

        history: the tokens of the turns before it in its session.
        """
        prompt = read_prompt(request.prompt, "prompt", request_id, self._model, history)
        num_tokens, context = prompt.num_tokens, self._context
        stated = max_tokens = request.max_tokens
        if max_tokens is None or max_tokens == TO_THE_END:
            max_tokens = context.output_limit(request.output_limit, num_tokens)
        if stated == TO_THE_END:
            request = replace(request, max_tokens=max_tokens)
        first = Sequence(
            id=request_id,
            input_index=input_index,
            arrival_time=request.arrival_time,
            num_prompt_tokens=num_tokens,
            num_tokens=num_tokens,
            max_tokens=max_tokens,
            has_default_limit=stated is None or stated == TO_THE_END,
            request=request,
            prompt=prompt,
            automaton=stop_automaton(request, self._eos_token_ids),
            arrive_reason=arrive_reason,
            is_streamed=is_streamed,
        )
        if stated == TO_THE_END and context.max_context != UNLIMITED:
            first.limit = "max_context"
        if prompt.segment_ends:
            first.segment_ends = prompt.segment_ends
        if request.cache_salt is not None:
            first.cache_salt = request.cache_salt
        if request.priority or request.deadline is not None:
            first.priority, first.deadline = request.priority, request.deadline
        has_room = context is ANY_LENGTH or context.holds(num_tokens, max_tokens)
        if has_room and not replayed and is_plain(request):
            return [first]
        first.more = more = More()
        if request.prompt_logprobs is not None:
            more.prompt_logprobs = PromptLogprobs(prompt, request.prompt_logprobs)
            first.skips_prefix_cache = True  # what is found there is not computed
        if request.heal:
            kept, more.healing = self._heal(prompt.tokens)
            more.num_healed = first.num_tokens - len(kept)
            first = _beginning_with(prompt.cut(len(kept)), first)
        negative = None
        if request.cfg_scale != 1 and _num_steps(request, None) > 0:
            text = request.negative_prompt or []
            negative = read_prompt(text, "negative_prompt", first.id, self._model)
        first = _fitted(first, negative, self._context)
        request = first.request
        if request.num_beams > 1 and request.output_limit:
            beams = [
                _another(first, index, None, role="beam") for index in range(request.num_beams)
            ]
            beam, *others = beams
            beam.others = tuple(replace(other, num_tokens=0) for other in others)  # before the fork
            beam.num_slots = request.num_beams
            return [beam]
        num_samples = num_queued_as(request)
        first.has_siblings = num_samples > 1
        samples = [_another(first, index, replayed.get(index)) for index in range(num_samples)]
        if negative is not None:
            for sample in samples:
                partner = _another(first, sample.index, replayed.get(sample.index), role="negative")
                partner = _beginning_with(negative, partner)
                sample.others, sample.num_slots = (partner,), 2
        return samples


def _fitted(first: Sequence, negative: Prompt | None, context: Context) -> Sequence:
    """Return `first` with as many tokens to generate as its context has room for.

    negative: the prompt of the row beside it, if there is one, which is given the same tokens.
    """
    request, more = first.request, first.more
    whole = "prompt" if request.session is None else "conversation"
    prompts = {whole: first.num_tokens}
    if negative is not None:
        prompts["negative prompt"] = negative.num_tokens
    most, longest = request.output_limit, max(prompts.values())
    if more is None or all(context.holds(n, most) for n in prompts.values()):
        return first
    is_computed = _num_steps(request, None) > 0
    more.failure = context.why_never(prompts, most, is_computed=is_computed)
    room = context.max_context - longest
    if more.failure is not None or room >= most:
        return first
    request = replace(request, max_tokens=room)
    return replace(first, request=request, max_tokens=room, limit="max_context")


def _another(
    first: Sequence, index: int, replayed: Result | None, *, role: Role = "sample"
) -> Sequence:
    more = copy(first.more) or More()
    more.replayed = replayed
    if role == "negative":
        more.prompt_logprobs = None
    max_tokens = _num_steps(first.request, replayed)
    return replace(first, index=index, role=role, more=more, max_tokens=max_tokens, block_table=[])


def _beginning_with(prompt: Prompt, sequence: Sequence) -> Sequence:
    num_tokens = prompt.num_tokens
    return replace(
        sequence,
        prompt=prompt,
        segment_ends=prompt.segment_ends,
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
    )


def _num_steps(request: Request, replayed: Result | None) -> int:
    """Return for how many steps a sequence decodes at most; exactly so many if it is replayed.

    A prompt whose log-probabilities are told is computed even if nothing is generated after it.
    """
    if replayed is None or replayed.slot is None:
        return max(request.output_limit, int(request.prompt_logprobs is not None))
    steps = replayed.steps
    if steps.finished is None or steps.admitted is None:
        raise InvariantError(f"the result of {replayed.id!r} has a slot, and was never admitted")
    return steps.finished - steps.admitted + 1


def limited_to_blocks(first: Sequence, room: int, code: str) -> None:
    """Let a group that states no limit generate `room` tokens, and fail if it needs more.

    code: of that failure.
    """
    message = (
        f"it has filled all KV blocks: they hold {first.num_prompt_tokens} prompt tokens and "
        f"{room} more, and its request has no max_tokens; use more --kv-blocks"
    )
    for row in first.group:
        row.max_tokens, row.request = room, replace(row.request, max_tokens=room)
        row.more = row.more or More()
        row.more.overflow = Failure(code, message)
