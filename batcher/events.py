"""The frozen records of what a run did: the engine's output, and the lines of a trace.

Every event about a request says when (step, engine time), who (id, index), where (slot) and why
(reason). docs/trace-format.md documents each kind and each reason.
"""

from typing import Any, Literal

from msgspec import Struct

from batcher.request import FinishReason, StopReason

TRACE_VERSION = 1

ArriveReason = Literal["input", "follow"]
AdmitReason = Literal["empty", "refill"]


class RunEvent(Struct, frozen=True, tag="run", tag_field="event", kw_only=True):
    """The first line of a trace: all that is needed to reproduce the run."""

    version: int = TRACE_VERSION
    batch: int
    policy: str = "fcfs"
    model: str
    settings: dict[str, Any]


class ArriveEvent(Struct, frozen=True, tag="arrive", tag_field="event", gc=False):
    """A request joined the waiting queue (or, with max_tokens 0, finished without one).

    `step` is the first step that starts at or after its arrival, `time` the arrival itself.  A
    request is read only when a slot is free for it, so this line may follow lines of later steps.
    Reason: "input" (the file gave the arrival time) or "follow" (it came while the run was going
    on).
    """

    step: int
    time: float
    id: str
    index: int
    reason: ArriveReason
    prompt_tokens: int
    max_tokens: int


class AdmitEvent(Struct, frozen=True, tag="admit", tag_field="event", gc=False):
    """A sequence was given a slot.

    Reason: "refill" (the step before still used the slot) or "empty" (the slot was idle).
    """

    step: int
    time: float
    id: str
    index: int
    slot: int
    reason: AdmitReason


class FinishEvent(Struct, frozen=True, tag="finish", tag_field="event", gc=False):
    """A sequence ended; `step` generated its last token and `time` is when that step began.

    `slot` is None if it never held one.  `tokens` counts what it generated.
    """

    step: int
    time: float
    id: str
    index: int
    slot: int | None
    reason: FinishReason
    stop_reason: StopReason
    tokens: int


class RejectEvent(Struct, frozen=True, tag="reject", tag_field="event", gc=False):
    """A line of the input was no valid request and became an error result; reason: its code."""

    step: int
    time: float
    id: str
    index: int
    reason: str


class EndEvent(Struct, frozen=True, tag="end", tag_field="event", gc=False):
    """The last line of a trace of a run that came to its end."""

    steps: int
    time: float
    tokens: int
    requests: int


RequestEvent = ArriveEvent | AdmitEvent | FinishEvent | RejectEvent
Event = RunEvent | RequestEvent | EndEvent
