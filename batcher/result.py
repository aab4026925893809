"""What goes out: the result that a request is given.

Names and order of the fields are the contract of docs/requests-and-results.md.
"""

from typing import Any, Literal

from msgspec import Struct

from batcher.errors import InvariantError

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
NUM_DIGITS = 6  # of log-probabilities, after the point

FinishReason = Literal["stop", "length", "error", "aborted"]
StopReason = int | list[int] | str | None
LengthLimit = Literal["max_context"]
ConstraintOutcome = Literal["complete", "incomplete"]
ConstraintCheck = Literal["none"]


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
    """Why a request failed; line, column and field where the fault is in its text.

    status: of the answer of a server, if it sent one.
    """

    code: str
    message: str
    line: int | None = None
    column: int | None = None
    field: str | None = None
    status: int | None = None


class TopLogprob(Struct, frozen=True, gc=False):
    """A token and the natural logarithm of its probability, at least LOWEST_LOGPROB.

    token: its id; its text where a server does not tell that.
    """

    token: int | str
    logprob: float


class TokenLogprob(Struct, frozen=True, gc=False):
    """A generated token, and the most likely ones where it stands, most likely first."""

    token: int | str
    logprob: float
    top: list[TopLogprob]


class PromptLogprob(Struct, frozen=True, gc=False):
    """A token of the prompt, and the most likely ones where it stands, most likely first.

    Nothing goes before the first token, so its logprob is None, and `top` is empty.
    """

    token: int | str
    logprob: float | None
    top: list[TopLogprob]


class Segment(Struct, frozen=True, gc=False):
    """A part of the output that one state has generated, the markers cut out.

    tokens: those with a byte in `text`; one that goes over a marker may be in two segments.
    """

    state: str
    text: str
    tokens: list[int]


class Result(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What a request was given: exactly one for every output of every request read.

    index: which of the request's outputs it is, from 0.  tokens: None if a server does not tell
    their ids.
    What is None is not written: error, why it failed; cumulative_logprob, of all tokens, and
    logprobs, of each, if asked for, and prompt_logprobs, of those of the prompt; score, that of
    beam search; segments, if the request names states; constraint, whether an output that has to
    follow one is a whole; constraint_check, that nothing but what made it could tell;
    constraint_verified, keywords of the schema that only the check of the whole output has decided;
    limit, which one an output of finish_reason "length" has reached, if it is not max_tokens; and
    of a server's model reasoning, what it thought, refusal, what it said in place of an answer,
    tool_calls and function_call, what it calls, in OpenAI's forms.
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
        """The ids of its tokens, which whoever has a model knows."""
        if self.tokens is None:
            raise InvariantError(f"nobody has told the tokens of {self.id!r}")
        return self.tokens
