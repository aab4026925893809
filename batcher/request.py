"""What comes in and what goes out: a request, and the result it is given.

Both are plain records that know nothing of slots or models.  Names, defaults and order of the
fields are the contract of docs/requests-and-results.md.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_INT = 2**31 - 1
LOWEST_LOGPROB = -9999.0  # JSON has no infinity
NUM_DIGITS = 6  # of log-probabilities, after the point
MAX_TIME = 2.0**52  # seconds; up to here a clock of steps is exact

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
FinishReason = Literal["stop", "length", "error", "aborted"]
StopReason = int | list[int] | str | None
PromptType = Literal["system", "user", "assistant"]
ConstraintOutcome = Literal["complete", "incomplete"]
ConstraintCheck = Literal["none"]


class Transition(Struct, frozen=True, forbid_unknown_fields=True):
    """A way out of a state: where the text, or the token ids, `on` lead; None ends generation."""

    on: str | list[TokenId]
    to: str | None


class PromptSegment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A part of a prompt: a text, token ids, or `length` tokens that `seed` stands for.

    type: what it is good for; of blocks that are cached, those of "system" are given up after those
    of "user", and these after all others.  pin: given up last of all.
    """

    text: str | None = None
    tokens: list[TokenId] | None = None
    length: int | None = None
    seed: int | str = 0
    type: PromptType | None = None
    pin: bool = False


if TYPE_CHECKING:
    PromptInput = str | list[TokenId] | list[PromptSegment]
else:  # msgspec takes no union of two lists; the rules of validation refuse a mixed one
    PromptInput = str | list[TokenId | PromptSegment]


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One generation request, as a line of a requests file states it.

    The constructor does not check types or ranges; `Engine.add` and `batcher.decode` do, and raise
    RequestError.
    """

    prompt: PromptInput
    id: str | None = None
    max_tokens: int = 16
    stop_token: TokenId | list[TokenId] | None = None
    stop_sequence: str | list[TokenId | str | list[TokenId]] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    arrival_time: float = 0.0  # seconds
    priority: int = 0
    deadline: float | None = None  # seconds on the clock that arrival_time is read from
    session: str | None = None
    think_time: float = 0.0  # seconds
    cache_salt: str | None = None
    # How a token is chosen.
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    mirostat: int = 0  # 0 is off, else the version
    mirostat_tau: float = 5.0  # bits
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None  # token id -> what is added to its logit
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    min_tokens: int = 0
    cfg_scale: float = 1.0
    negative_prompt: str | list[TokenId] | None = None
    seed: int = 0
    # How many outputs, and what is told about them.
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    prompt_logprobs: int | None = None
    echo: bool = False
    include_stop_str_in_output: bool = False
    # Beam search.
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    # What the output has to be.
    json_schema: dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    lark: str | None = None
    gbnf: str | None = None
    heal: bool = False
    states: dict[str, list[Transition]] | None = None
    initial_state: str | None = None


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


class TopLogprob(Struct, frozen=True, gc=False):
    """A token and the natural logarithm of its probability, at least LOWEST_LOGPROB."""

    token: int
    logprob: float


class TokenLogprob(Struct, frozen=True, gc=False):
    """A generated token, and the most likely ones where it stands, most likely first."""

    token: int
    logprob: float
    top: list[TopLogprob]


class PromptLogprob(Struct, frozen=True, gc=False):
    """A token of the prompt, and the most likely ones where it stands, most likely first.

    Nothing goes before the first token, so its logprob is None, and `top` is empty.
    """

    token: int
    logprob: float | None
    top: list[TopLogprob]


class Segment(Struct, frozen=True, gc=False):
    """What was generated in one stay in a state, the markers cut out.

    tokens: those with a byte in `text`; one that goes over a marker may be in two segments.
    """

    state: str
    text: str
    tokens: list[int]


class Result(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What a request was given: exactly one for every output of every request read.

    index: which of the request's outputs it is, from 0.
    What is None is not written: error, why it failed; cumulative_logprob, of all tokens, and
    logprobs, of each, if asked for, and prompt_logprobs, of those of the prompt; score, that of
    beam search; segments, if the request names states; constraint, whether an output that has to
    follow one is a whole; constraint_check, that nothing but what made it could tell.
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
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[PromptLogprob] | None = None
    score: float | None = None
    segments: list[Segment] | None = None
    constraint: ConstraintOutcome | None = None
    constraint_check: ConstraintCheck | None = None
