"""One output of a request on its way through the engine."""

from collections.abc import Callable, Mapping
from copy import copy
from typing import cast

from msgspec.structs import astuple

from batcher.decoding.prompt_logprobs import PromptLogprobs
from batcher.decoding.stops.automaton import StopAutomaton, stop_automaton
from batcher.events import ArriveReason
from batcher.models.base import Model
from batcher.prompts import Prompt, read_prompt
from batcher.request import Request
from batcher.result import Result
from batcher.scheduling.sequence import ScheduledSequence
from batcher.tokens import Tokens

# Fields that a model which gives only tokens can serve, and the rest as a plain request has it.
_NUM_PLAIN_FIELDS = Request.__struct_fields__.index("cache_salt") + 1
_PLAIN_VALUES = astuple(Request(prompt=""))[_NUM_PLAIN_FIELDS:]

Heal = Callable[[Tokens], tuple[list[int], bytes]]


class Sequence(ScheduledSequence, eq=False, gc=False, kw_only=True):  # it is part of no cycle
    """What one slot is given to: a sample, a beam, or the negative prompt beside a sample.

    Only the engine changes it.

    prompt: what the model reads first.
    num_healed: tokens of the prompt that are generated anew instead, from their bytes, `healing`.
    known: what an earlier run found; the model is not asked again.
    is_plain: nothing is asked for but greedy tokens until a stop.
    generated: the tokens it has generated that the model has to compute again, or all at once;
    None while each goes to the model by itself.  has_jumped: whether the last step gave it several.
    prompt_logprobs: what is told of the prompt, in one for all samples; None if nothing is.
    """

    request: Request
    prompt: Prompt
    automaton: StopAutomaton
    reason: ArriveReason
    known: Result | None
    is_plain: bool
    num_healed: int = 0
    healing: bytes = b""
    generated: list[int] | None = None
    has_jumped: bool = False
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def prompt_tokens(self) -> Tokens:
        """The tokens of its prompt; those that are drawn are, by now."""
        return self.prompt.tokens

    @property
    def rows(self) -> "tuple[Sequence, ...]":
        """Itself and its companions."""
        if not self.companions:
            return (self,)
        return (self, *cast("tuple[Sequence, ...]", self.companions))

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


def make_sequences(
    request: Request,
    request_id: str,
    place: int,
    reason: ArriveReason,
    known: Mapping[int, Result],
    model: Model,
    heal: Heal,
    history: Tokens,
) -> list[Sequence]:
    """Return what a valid `request` waits in the queue with: a sequence for each sample.

    Beams are companions of the first of them, a negative prompt is one of its sample.

    history: the tokens of the turns before it in its session.

    Raises:
        RequestError: the model's tokenizer fails on a prompt.
    """
    prompt = read_prompt(request.prompt, "prompt", request_id, model)
    if history:
        prompt = prompt.after(history, model.vocab_size)
    automaton = stop_automaton(request, model.eos_token_id)
    num_tokens = prompt.num_tokens
    first = Sequence(
        id=request_id,
        place=place,
        arrival_time=request.arrival_time,
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
        max_tokens=request.max_tokens,
        request=request,
        prompt=prompt,
        automaton=automaton,
        reason=reason,
        known=known.get(0) if known else None,
        is_plain=is_plain(request),
    )
    if known or request.max_tokens == 0:
        first.max_tokens = _num_steps(first)
    if prompt.borders:
        first.ranks = prompt.borders
    if request.cache_salt is not None:
        first.cache_salt = request.cache_salt
    if request.priority or request.deadline is not None:
        first.priority, first.deadline = request.priority, request.deadline
    if first.is_plain:
        return [first]
    if request.prompt_logprobs is not None:
        first.prompt_logprobs = PromptLogprobs(prompt, request.prompt_logprobs)
        first.skips_prefix_cache = True  # what is found there is not computed
    if request.heal:
        kept, first.healing = heal(prompt.tokens)
        _begin_with(first, prompt.cut(len(kept)))
        first.num_healed = num_tokens - len(kept)
    return _units(first, known, model)


def _units(first: Sequence, known: Mapping[int, Result], model: Model) -> list[Sequence]:
    """Return the samples of a request that is not plain, or its beams; `first` is one of them."""
    request = first.request
    if request.num_beams > 1 and request.max_tokens > 0:
        first.role = "beam"
        others = [_another(first, beam, None) for beam in range(1, request.num_beams)]
        for other in others:
            other.num_tokens = 0  # before the first fork
        first.companions, first.num_slots = tuple(others), request.num_beams
        return [first]
    num_samples = (request.best_of or request.n) if request.max_tokens > 0 else request.n
    first.has_siblings = num_samples > 1
    samples = [_another(first, index, known.get(index)) for index in range(num_samples)]
    if request.cfg_scale != 1 and first.max_tokens > 0:
        negative = request.negative_prompt or []
        prompt = read_prompt(negative, "negative_prompt", first.id, model)
        for sample in samples:
            partner = _another(first, sample.index, sample.known)
            partner.role, partner.prompt_logprobs = "negative", None
            _begin_with(partner, prompt)
            sample.companions, sample.num_slots = (partner,), 2
    return samples


def _another(first: Sequence, index: int, known: Result | None) -> Sequence:
    """Return a sequence like `first` that has not begun."""
    sequence = copy(first)
    sequence.index, sequence.known, sequence.table = index, known, []
    sequence.max_tokens = _num_steps(sequence)
    return sequence


def _begin_with(sequence: Sequence, prompt: Prompt) -> None:
    """Let `sequence` start with another prompt than its request's."""
    sequence.prompt, sequence.ranks = prompt, prompt.borders
    sequence.num_prompt_tokens = sequence.num_tokens = prompt.num_tokens


def _num_steps(sequence: Sequence) -> int:
    """Return for how many steps it decodes at most; exactly so many if it is known.

    A prompt whose log-probabilities are told is computed even if nothing is generated after it.
    """
    request = sequence.request
    if sequence.known is None or sequence.known.slot is None:
        return max(request.max_tokens, int(request.prompt_logprobs is not None))
    steps = sequence.known.steps
    return cast(int, steps.finished) - cast(int, steps.admitted) + 1


def is_plain(request: Request) -> bool:
    """Return whether a request asks for nothing but greedy tokens until a stop."""
    return astuple(request)[_NUM_PLAIN_FIELDS:] == _PLAIN_VALUES
