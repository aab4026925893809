"""One request on its way through the engine."""

from msgspec import Struct

from batcher.decoding.stops import StopSet
from batcher.events import ArriveReason
from batcher.lifecycle import State
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
