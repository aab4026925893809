"""One output of a request while the engine decodes it."""

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
    """The table entries of a row that is out of the batch; None for each it has none of.

    search: the beams of its group, kept with the first row.
    """

    place: AutomatonPlace | None
    state: "RowState | None" = None
    sampling: "SuspendedSampling | None" = None
    search: "BeamSearch | None" = None


class DroppedTurns(NamedTuple):
    """The numbers of oldest session turns that were dropped, and of their tokens."""

    num_turns: int
    num_tokens: int


NOTHING_DROPPED = DroppedTurns(0, 0)


# The outcome of decoding: of a step, and of a row at its end.


class Generated(Struct, frozen=True, gc=False):
    """The output of a row before it becomes a Result.

    failure: an error in the output itself.  The other fields are as in Result.
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
    """The outcome of a step beyond one more token in every row.

    Groups are named by the slots of their first rows.

    stopped: rows that ended with a stop.  failed: rows without a token.
    uncomputed: those among them that the model has not computed.
    jumps: the tokens of rows that received several.
    forks: (source, target) of beams: target continues from the state of source.
    num_accepted: accepted drafts, by row.
    ways: for rows with draft trees, the numbers of the accepted drafts in the Proposal.
    given: the tokens of each row that speculates, jumps included.
    """

    stopped: list[int] = []
    failed: dict[int, Failure] = {}
    jumps: dict[int, list[int]] = {}
    forks: list[tuple[int, int]] = []
    num_accepted: dict[int, int] = {}
    given: dict[int, list[int]] = {}
    ways: dict[int, list[int]] = {}
    uncomputed: frozenset[int] = frozenset()


NOTHING_DECODED = Decoded()


class More(Struct, gc=False):  # part of no cycle, like Sequence
    """The fields of sequences that are not plain, or that are replayed.

    Set below and by sessions.py; jumped_step is set by model_runner.py.

    replayed: the result of an earlier run, which replaces the model.
    num_healed: prompt tokens that are generated again from their bytes, `healing`.
    prompt_logprobs: shared by all samples; None if not requested.
    failure: why it can never run, if so.
    dropped: turns of its session that the context has no capacity for.
    overflow: the error at the end of max_tokens, if KV blocks set that limit.
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


class Sequence(Schedulable, eq=False, gc=False, kw_only=True):  # part of no cycle
    """One row of the batch: a sample, a beam, or the negative prompt of a sample.

    Its fields form three groups with one writer each; tests/test_ownership.py checks this.
    What was requested, in addition to Schedulable; set by SequenceMaker:
    request: the request.  prompt: the tokens that the model reads first.
    automaton: the stops of its output.  arrive_reason: of its ArriveEvent.
    is_streamed: whether a streaming engine returns its tokens.
    limit: the origin of max_tokens, if not the request.
    more: None for a plain sequence: greedy tokens until a stop, and nothing else.

    Its progress: see Schedulable; set by the scheduler.

    Its output; set by model_runner.py and rows.py:
    generated: the tokens that the model computes again, or several at once; None while each token
    goes to the model by itself.
    suspended: the state to resume from while its group waits; None for the row of a negative
    prompt.
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
        """Whether it may have drafts; beams and samples with a negative prompt have none."""
        is_alone = self.role == "sample" and not self.others
        is_computed = self.more is None or self.more.replayed is None
        return is_alone and is_computed and self.request.speculate

    @property
    def healing(self) -> bytes:
        return b"" if self.more is None else self.more.healing

    def known_tokens(self, start: int, stop: int) -> Tokens:
        """Return the tokens start..stop of its prompt followed by `generated`."""
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


# Making sequences of requests.

Heal = Callable[[Tokens], tuple[list[int], bytes]]


class SequenceMaker:
    """Makes the sequences of requests.

    context: the context limits of the model.  heal: see VocabularyIndex.heal.
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
        """Return a sequence for each sample of a request, or the first of its beams.

        history: the tokens of the earlier turns of its session.
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
            first.skips_prefix_cache = True  # cached tokens would have no scores
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
    """Return `first` with max_tokens reduced to what the context can hold.

    negative: the negative prompt, whose row receives the same tokens.
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
    """Return the largest number of decode steps of a sequence; the exact number if replayed.

    A prompt with log-probabilities is computed even if nothing is generated after it.
    """
    if replayed is None or replayed.slot is None:
        return max(request.output_limit, int(request.prompt_logprobs is not None))
    steps = replayed.steps
    if steps.finished is None or steps.admitted is None:
        raise InvariantError(f"the result of {replayed.id!r} has a slot, and was never admitted")
    return steps.finished - steps.admitted + 1


def limited_to_blocks(first: Sequence, room: int, code: str) -> None:
    """Set max_tokens of a group without one to `room`; reaching it is an error.

    code: the code of that error.
    """
    message = (
        f"it has filled all KV blocks with {first.num_prompt_tokens} prompt and {room} output "
        "tokens: set max_tokens, or raise --kv-blocks"
    )
    for row in first.group:
        row.max_tokens, row.request = room, replace(row.request, max_tokens=room)
        row.more = row.more or More()
        row.more.overflow = Failure(code, message)
