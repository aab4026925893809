"""What comes in and what goes out: a request, and the result it is given.

Both are plain records that know nothing of slots or models.  Names, defaults and order of the
fields are the contract of docs/requests-and-results.md.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

MAX_INT = 2**31 - 1
MAX_TIME = 2.0**52  # seconds; up to here a clock of steps is exact

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
FinishReason = Literal["stop", "length", "error", "aborted"]
StopReason = int | list[int] | str | None


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One generation request, as a line of a requests file states it.

    The constructor does not check types or ranges; `Engine.add` and `batcher.decode` do, and raise
    RequestError.
    """

    prompt: str | list[TokenId]
    id: str | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] = 16
    stop_token: TokenId | list[TokenId] | None = None
    stop_sequence: str | list[TokenId | str | list[TokenId]] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    arrival_time: Annotated[float, Meta(ge=0, le=MAX_TIME)] = 0.0
    priority: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] = 0


class Usage(Struct, frozen=True, gc=False):
    """How many tokens went in and came out."""

    prompt_tokens: int
    completion_tokens: int


class StepTimes(Struct, frozen=True, gc=False):
    """The steps at which things happened to a request; None for what never did.

    `finished` is the step that generated the last token, so a request holds its slot from
    `admitted` up to and including `finished`.
    """

    arrived: int | None
    admitted: int | None
    first_token: int | None
    finished: int | None


class ErrorInfo(Struct, frozen=True, omit_defaults=True):
    """Why a request failed; line, column and field where the fault is in its text."""

    code: str
    message: str
    line: int | None = None
    column: int | None = None
    field: str | None = None


class Result(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What a request was given: exactly one for every request read.

    error: why it failed; None, and not written, for the others.
    """

    id: str
    index: int
    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stop_reason: StopReason
    usage: Usage
    slot: int | None
    steps: StepTimes
    error: ErrorInfo | None = None
