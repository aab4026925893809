"""What comes in: a request, a plain record that knows nothing of slots or models.

Names, defaults and order of the fields are the contract of docs/requests-and-results.md.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import astuple

MAX_INT = 2**31 - 1
MAX_TIME = 2.0**52  # seconds; up to here a clock of steps is exact

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
PromptType = Literal["system", "user", "assistant"]


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


# Fields that a model which gives only tokens can serve, and the rest as a plain request has it.
_NUM_PLAIN_FIELDS = Request.__struct_fields__.index("cache_salt") + 1
_PLAIN_VALUES = astuple(Request(prompt=""))[_NUM_PLAIN_FIELDS:]


def is_plain(request: Request) -> bool:
    """Return whether a request asks for nothing but greedy tokens until a stop."""
    return astuple(request)[_NUM_PLAIN_FIELDS:] == _PLAIN_VALUES
