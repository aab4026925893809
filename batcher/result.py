"""The result of a request.

Rule: docs/reference/requests-and-results.md fixes the names and order of the fields.
"""

from typing import Any, Literal

from msgspec import Struct

from batcher.errors import InvariantError

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
NUM_DIGITS = 6  # of log-probabilities, after the decimal point

FinishReason = Literal["stop", "length", "error", "aborted"]
StopReason = int | list[int] | str | None
LengthLimit = Literal["max_context"]
ConstraintOutcome = Literal["complete", "incomplete"]
ConstraintCheck = Literal["none"]


class Usage(Struct, frozen=True, gc=False):
    """Numbers of prompt and output tokens."""

    prompt_tokens: int
    completion_tokens: int


class StepTimes(Struct, frozen=True, gc=False):
    """Steps of a request's events, or None; its slot is held from `admitted` to `finished`."""

    arrived: int | None
    admitted: int | None
    first_token: int | None
    finished: int | None


class ErrorInfo(Struct, frozen=True, omit_defaults=True):
    """Why a request failed; line, column and field of a mistake in it; status of an HTTP error."""

    code: str
    message: str
    line: int | None = None
    column: int | None = None
    field: str | None = None
    status: int | None = None


class TopLogprob(Struct, frozen=True, gc=False):
    """A token and its natural log-probability, at least LOWEST_LOGPROB.

    token: its id; its text if a server does not report ids.
    """

    token: int | str
    logprob: float


class TokenLogprob(Struct, frozen=True, gc=False):
    """A generated token, and the most likely tokens at its position, most likely first."""

    token: int | str
    logprob: float
    top: list[TopLogprob]


class PromptLogprob(Struct, frozen=True, gc=False):
    """A token of the prompt, like TokenLogprob; the first has no logprob and an empty `top`."""

    token: int | str
    logprob: float | None
    top: list[TopLogprob]


class Segment(Struct, frozen=True, gc=False):
    """The output of one state, without markers.

    tokens: those with a byte in `text`; a token across a marker may be in two segments.
    """

    state: str
    text: str
    tokens: list[int]


class Result(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Exactly one for every output of every request.

    index: of the output, from 0.  tokens: None if a server does not report ids.  error: why it
    failed.  cumulative_logprob, logprobs, prompt_logprobs: if requested.  score: of beam search.
    segments: of a request with states.  constraint: whether the output is complete.
    constraint_check: "none" if only the maker of the output could check it.  constraint_verified:
    keywords of the schema that only the check of the whole output decided.  limit: that ended an
    output of finish_reason "length", if not max_tokens.  From servers: reasoning, refusal,
    tool_calls and function_call, in OpenAI's forms.  None is not written.
    """

    id: str
    index: int
    text: str
    tokens: list[int] | None
    finish_reason: FinishReason
    stop_reason: StopReason
    usage: Usage
    slot: int | None
    steps: StepTimes
    error: ErrorInfo | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[PromptLogprob] | None = None
    score: float | None = None
    segments: list[Segment] | None = None
    constraint: ConstraintOutcome | None = None
    constraint_check: ConstraintCheck | None = None
    constraint_verified: tuple[str, ...] | None = None
    limit: LengthLimit | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, str] | None = None

    @property
    def token_ids(self) -> list[int]:
        if self.tokens is None:
            raise InvariantError(f"the token ids of {self.id!r} are not known")
        return self.tokens
