"""The frozen records of what a run did: the engine's output, and the lines of a trace.

Every event about a request says when (step, engine time), who (id, index, role), where (slot) and
why (reason).  index: which of the request's samples or beams it is; role: the row of a sample, that
of a beam, or the negative prompt's beside a sample; "sample" is not written.
docs/trace-format.md documents each kind and each reason.
"""

from typing import Any, Literal

from msgspec import Struct

from batcher.request import FinishReason, StopReason

TRACE_VERSION = 1

ArriveReason = Literal["input", "follow"]
AdmitReason = Literal["empty", "refill"]
Role = Literal["sample", "beam", "negative"]
EndReason = FinishReason | Literal["unused"]


class RunEvent(Struct, frozen=True, tag="run", tag_field="event", kw_only=True):
    """The first line of a trace: all that is needed to reproduce the run."""

    version: int = TRACE_VERSION
    batch: int
    policy: str = "fcfs"
    model: str
    settings: dict[str, Any]


class ArriveEvent(
    Struct, frozen=True, tag="arrive", tag_field="event", gc=False, omit_defaults=True
):
    """A sample, or all beams of a request together, joined the waiting queue.

    With max_tokens 0 it finished without that.

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


class AdmitEvent(Struct, frozen=True, tag="admit", tag_field="event", gc=False, omit_defaults=True):
    """A sequence was given a slot.

    Reason: "refill" (the step before still used the slot) or "empty" (the slot was idle).
    """

    step: int
    time: float
    id: str
    index: int
    slot: int
    reason: AdmitReason
    role: Role = "sample"


class FinishEvent(
    Struct, frozen=True, tag="finish", tag_field="event", gc=False, omit_defaults=True
):
    """A sequence ended; `step` generated its last token and `time` is when that step began.

    `slot` is None if it never held one.  `tokens` counts what it generated.  Reason: as in its
    result, or "unused" for a sequence that has none of its own: a beam beyond the n that were asked
    for, or a negative prompt.
    """

    step: int
    time: float
    id: str
    index: int
    slot: int | None
    reason: EndReason
    stop_reason: StopReason
    tokens: int
    role: Role = "sample"


class JumpEvent(Struct, frozen=True, tag="jump", tag_field="event", gc=False):
    """A constraint left only one token several times running; `tokens` were added in one step.

    They come after the token that the step chose, or, in the step that admits the row, before it.
    """

    step: int
    time: float
    id: str
    index: int
    slot: int
    tokens: int


class ForkEvent(Struct, frozen=True, tag="fork", tag_field="event", gc=False):
    """From the next step on, the beam in `slot` continues what the beam `parent` was."""

    step: int
    time: float
    id: str
    index: int
    slot: int
    parent: int


class DropEvent(Struct, frozen=True, tag="drop", tag_field="event", gc=False):
    """A sample that had finished for `reason` has no result: with best_of, others are better."""

    step: int
    time: float
    id: str
    index: int
    reason: FinishReason


class TokenEvent(Struct, frozen=True, tag="token", tag_field="event", gc=False, omit_defaults=True):
    """Tokens that a step gave to a sample, and the text that can no longer be taken back by then.

    Not part of a trace: `run --stream` writes it among the results.  state: where the text was
    generated, if the request names states.
    """

    step: int
    id: str
    index: int
    tokens: list[int]
    text: str
    state: str | None = None


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


RequestEvent = (
    ArriveEvent | AdmitEvent | JumpEvent | ForkEvent | FinishEvent | DropEvent | RejectEvent
)
Event = RunEvent | RequestEvent | EndEvent
