"""What no run can have written, found line by line as a trace is read.

Rule: a line is wrong only by those before it, so what a run leaves that is broken off is right.
What a server answers is as it says, and is not checked.
"""

from msgspec import Struct

from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    Event,
    FinishEvent,
    JumpEvent,
    PreemptEvent,
    RunEvent,
)
from batcher.trace.records import is_follower, label_of

_Key = tuple[int | None, str, int]  # the worker, the id and the index


class _Sample(Struct):
    """One that has arrived.

    step: the one that admitted it, if it has a slot; each from that on may have given it a token.
    num_tokens: how many it had by then, or has without a slot, and was given beside those.
    """

    max_tokens: int
    step: int | None = None
    num_tokens: int = 0


class TraceChecks:
    """Takes in the events of a trace, and keeps of open samples what they asked for.

    A beam is told of otherwise: what it passes on is not what it was given.
    """

    def __init__(self) -> None:
        self._open: dict[_Key, _Sample] = {}
        self._is_remote = False

    def complaint(self, event: Event) -> str | None:
        """Return what is wrong with the next event; None for nothing."""
        match event:
            case RunEvent():
                self._is_remote = event.layout == "remote"
            case ArriveEvent():
                self._open[event.worker, event.id, event.index] = _Sample(event.max_tokens)
            case AdmitEvent():
                return self._admit(event)
            case JumpEvent() | AcceptEvent():
                sample = self._open.get((event.worker, event.id, event.index))
                if sample is not None:
                    sample.num_tokens += event.tokens
            case PreemptEvent():
                sample = self._open.get((event.worker, event.id, event.index))
                if sample is not None and event.role == "sample":
                    sample.step, sample.num_tokens = None, event.generated
            case FinishEvent():
                return self._finish(event)
        return None

    def _admit(self, event: AdmitEvent) -> str | None:
        if is_follower(event):
            return None
        sample = self._open.get((event.worker, event.id, event.index))
        if sample is None:
            label = label_of(event.id, event.index, event.role)
            return f"{label!r} is admitted, and has not arrived"
        sample.step, sample.num_tokens = event.step, event.generated
        return None

    def _finish(self, event: FinishEvent) -> str | None:
        if event.role != "sample":
            return None
        sample = self._open.pop((event.worker, event.id, event.index), None)
        if self._is_remote or not event.tokens:
            return None
        most = 0
        if sample is not None:
            num_steps = 0 if sample.step is None else event.step + 1 - sample.step
            most = min(sample.max_tokens, sample.num_tokens + num_steps)
        if event.tokens <= most:
            return None
        label = label_of(event.id, event.index, event.role)
        why = "has not arrived" if sample is None else f"can have {most:,} at most"
        return f"{label!r} ends with {event.tokens:,} tokens, and {why}"
