"""One request on its way through the engine."""

from typing import cast

from msgspec import Struct

from batcher.decoding.stops import StopSet, stop_set
from batcher.errors import FieldProblem, RequestError, describe
from batcher.events import ArriveReason
from batcher.lifecycle import State
from batcher.models.base import Model
from batcher.request import Request, Result


class Sequence(Struct, eq=False):
    """The mutable side of a request: where it stands, since when.  Only the engine changes it.

    known: what an earlier run found; the model is not asked again.
    """

    request: Request
    id: str
    index: int
    prompt_tokens: list[int]
    stops: StopSet
    reason: ArriveReason
    known: Result | None
    state: State = State.PENDING
    arrived_step: int | None = None
    admitted_step: int | None = None
    slot: int | None = None

    @property
    def max_steps(self) -> int:
        """For how many steps it holds a slot at most; exactly so many if it is known."""
        if self.known is None:
            return self.request.max_tokens
        steps = self.known.steps
        return cast(int, steps.finished) - cast(int, steps.admitted) + 1


def make_sequence(
    request: Request,
    request_id: str,
    index: int,
    model: Model,
    reason: ArriveReason,
    known: Result | None,
) -> Sequence:
    """Return the sequence of a valid `request`.

    Raises:
        RequestError: the model's tokenizer fails on the prompt.
    """
    prompt = request.prompt
    try:
        tokens = list(model.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
    except Exception as error:  # whatever the tokenizer's own code raises
        message = f"the tokenizer fails on the prompt: {describe(error)}"
        problem = FieldProblem("invalid-value", ("prompt",), message)
        raise RequestError(request_id, [problem]) from error
    stops = stop_set(request, model.eos_token_id)
    return Sequence(request, request_id, index, tokens, stops, reason, known)
