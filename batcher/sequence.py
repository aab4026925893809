"""One request on its way through the engine."""

from batcher.decoding.stops import StopSet
from batcher.events import ArriveReason
from batcher.lifecycle import State
from batcher.request import Request, Result


class Sequence:
    """The mutable side of a request: where it stands, since when.  Only the engine changes it."""

    __slots__ = (
        "admitted_step",
        "arrived_step",
        "id",
        "index",
        "known",
        "prompt_tokens",
        "reason",
        "request",
        "slot",
        "state",
        "stops",
    )

    def __init__(
        self,
        request: Request,
        request_id: str,
        index: int,
        prompt_tokens: list[int],
        stops: StopSet,
        reason: ArriveReason,
        known: Result | None,
    ) -> None:
        self.request, self.id, self.index = request, request_id, index
        self.prompt_tokens, self.stops = prompt_tokens, stops
        self.reason = reason
        self.known = known  # what an earlier run found; the model is not asked again
        self.state = State.PENDING
        self.arrived_step: int | None = None
        self.admitted_step: int | None = None
        self.slot: int | None = None
