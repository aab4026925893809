"""One output of a request on its way through the engine."""

from collections.abc import Callable, Mapping
from copy import copy
from typing import cast

from msgspec import Struct
from msgspec.structs import astuple

from batcher.decoding.machine import StateMachine, state_machine
from batcher.errors import FieldProblem, RequestError, describe
from batcher.events import ArriveReason, Role
from batcher.lifecycle import State
from batcher.models.base import Model
from batcher.request import Request, Result

# Fields that a model which gives only tokens can serve, and the rest as a plain request has it.
_NUM_PLAIN_FIELDS = Request.__struct_fields__.index("priority") + 1
_PLAIN_VALUES = astuple(Request(prompt=""))[_NUM_PLAIN_FIELDS:]

NEVER = -1  # the step of what has not happened
NO_SLOT = -1

Heal = Callable[[list[int]], tuple[list[int], bytes]]


class Sequence(Struct, eq=False, gc=False):  # it is part of no cycle
    """What one slot is given to: a sample, a beam, or the negative prompt beside a sample.

    Only the engine changes it.

    index: of the sample or beam in its request.  place: the request's, in the input.
    prompt_tokens: what the model reads first.
    num_healed: tokens of the prompt that are generated anew instead, from their bytes, `healing`.
    known: what an earlier run found; the model is not asked again.
    is_plain: nothing is asked for but greedy tokens until a stop.
    companions: what is admitted and ends together with this one: the other beams, or the negative
    prompt.  num_slots: how many slots they all need.
    num_jumped: tokens that were added beside the one of each step.
    """

    request: Request
    id: str
    index: int
    place: int
    prompt_tokens: list[int]
    machine: StateMachine
    reason: ArriveReason
    known: Result | None
    is_plain: bool
    role: Role = "sample"
    companions: "tuple[Sequence, ...]" = ()
    num_slots: int = 1
    num_healed: int = 0
    healing: bytes = b""
    state: State = State.PENDING
    arrived_step: int = NEVER
    admitted_step: int = NEVER
    slot: int = NO_SLOT
    num_jumped: int = 0

    @property
    def is_leader(self) -> bool:
        """Whether it is no companion of another one."""
        return self.role == "sample" or (self.role == "beam" and self.index == 0)

    @property
    def max_steps(self) -> int:
        """For how many steps it holds a slot at most; exactly so many if it is known."""
        if self.known is None:
            return self.request.max_tokens
        steps = self.known.steps
        return cast(int, steps.finished) - cast(int, steps.admitted) + 1


def make_sequences(
    request: Request,
    request_id: str,
    place: int,
    model: Model,
    reason: ArriveReason,
    known: Mapping[int, Result],
    heal: Heal,
) -> list[Sequence]:
    """Return what a valid `request` waits in the queue with: a sequence for each sample.

    Beams are companions of the first of them, a negative prompt is one of its sample.

    Raises:
        RequestError: the model's tokenizer fails on a prompt.
    """
    prompt = _encode(request.prompt, "prompt", request_id, model)
    machine = state_machine(request, model.eos_token_id)
    first = Sequence(
        request, request_id, 0, place, prompt, machine, reason, known.get(0), is_plain(request)
    )
    if first.is_plain:
        return [first]
    if request.heal:
        first.prompt_tokens, first.healing = heal(prompt)
        first.num_healed = len(prompt) - len(first.prompt_tokens)
    return _units(first, known, model)


def _units(first: Sequence, known: Mapping[int, Result], model: Model) -> list[Sequence]:
    """Return the samples of a request that is not plain, or its beams; `first` is one of them."""
    request = first.request
    if request.num_beams > 1 and request.max_tokens > 0:
        first.role = "beam"
        others = [_another(first, beam, None) for beam in range(1, request.num_beams)]
        first.companions, first.num_slots = tuple(others), request.num_beams
        return [first]
    num_samples = (request.best_of or request.n) if request.max_tokens > 0 else request.n
    samples = [_another(first, index, known.get(index)) for index in range(num_samples)]
    if request.cfg_scale != 1 and request.max_tokens > 0:
        prompt = _encode(request.negative_prompt or [], "negative_prompt", first.id, model)
        for sample in samples:
            partner = _another(first, sample.index, sample.known)
            partner.role, partner.prompt_tokens = "negative", prompt
            sample.companions, sample.num_slots = (partner,), 2
    return samples


def _another(first: Sequence, index: int, known: Result | None) -> Sequence:
    """Return a sequence like `first` that has not begun."""
    sequence = copy(first)
    sequence.index, sequence.known = index, known
    return sequence


def is_plain(request: Request) -> bool:
    """Return whether a request asks for nothing but greedy tokens until a stop."""
    return astuple(request)[_NUM_PLAIN_FIELDS:] == _PLAIN_VALUES


def _encode(prompt: str | list[int], field: str, request_id: str, model: Model) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    try:
        tokens = list(model.tokenizer.encode(prompt))
    except Exception as error:  # whatever the tokenizer's own code raises
        message = f"the tokenizer fails on the {field.replace('_', ' ')}: {describe(error)}"
        problem = FieldProblem("invalid-value", (field,), message)
        raise RequestError(request_id, [problem]) from error
    if model.vocab_size is not None and max(tokens, default=0) >= model.vocab_size:
        message = (
            f"the tokenizer makes token {max(tokens)} of the {field.replace('_', ' ')}, "
            f"and the model knows {model.vocab_size} tokens"
        )
        raise RequestError(request_id, [FieldProblem("unknown-token", (field,), message)])
    return tokens
