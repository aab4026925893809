"""OpenAI Batch rows: what a row may hold, beside the fields of a request.

Rule: an option that would change the output and is not supported is an error, never ignored.
"""

from typing import Any, Literal

from msgspec import Struct

from batcher.request import Request

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
URLS = (COMPLETIONS_URL, CHAT_URL)

Form = Literal["result", "completion", "echoed completion", "chat"]
"""How a line is answered: by results of our own, or by a row; an echoed completion is one whose
logprobs begin with those of the prompt, as its text does."""

# The values that ask for nothing but what is done anyway; null always is one of them.
Supported = dict[str, type[str] | type[dict[str, Any]] | tuple[object, ...]]
_EVERYWHERE: Supported = {
    "model": str,
    "user": str,
    "stream": (False,),
    "stream_options": (),
    "store": (False,),
    "metadata": dict,
    "service_tier": ("auto", "default"),
}
COMPLETION_OPTIONS: Supported = {**_EVERYWHERE, "suffix": ("",)}
CHAT_OPTIONS: Supported = {
    **_EVERYWHERE,
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
}
OPTIONS = {COMPLETIONS_URL: COMPLETION_OPTIONS, CHAT_URL: CHAT_OPTIONS}

# Fields of OpenAI or vLLM with which nothing is done; in rows some of them may say nothing.
UNSUPPORTED = frozenset(
    (
        *CHAT_OPTIONS,
        *COMPLETION_OPTIONS,
        *("add_generation_prompt", "add_special_tokens", "allowed_tools", "audio"),
        *("chat_template", "chat_template_kwargs", "continue_final_message", "detokenize"),
        *("documents", "extra_body", "function_call", "functions", "guided_decoding_backend"),
        *("guided_whitespace_pattern", "kv_transfer_params", "logits_processors"),
        *("mm_processor_kwargs", "output_kind", "prediction", "prompt_cache_key"),
        *("prompt_embeds", "reasoning_effort", "request_id", "return_token_ids"),
        *("safety_identifier", "skip_special_tokens", "spaces_between_special_tokens"),
        *("structural_tag", "truncate_prompt_tokens", "verbosity", "vllm_xargs"),
        "web_search_options",
    )
)


class CompletionBody(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a row: the fields of a request but its id, and the options above."""

    id: None = None  # custom_id is the id; this takes away the one a body would inherit
    model: Any = None
    user: Any = None
    stream: Any = None
    stream_options: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    suffix: Any = None


class ChatBody(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a row of a chat, whose messages have become a prompt, and the options above."""

    id: None = None  # as above
    model: Any = None
    user: Any = None
    stream: Any = None
    stream_options: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    modalities: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None


class BatchRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of an OpenAI Batch file of completions."""

    custom_id: str | None = None
    method: Literal["POST"]
    url: Literal["/v1/completions"]
    body: CompletionBody


class ChatRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of an OpenAI Batch file of chats."""

    custom_id: str | None = None
    method: Literal["POST"]
    url: Literal["/v1/chat/completions"]
    body: ChatBody


def form_of(url: str | None, request: Request) -> Form:
    """Return how `request` is answered, which was read from a row with that `url`, if any."""
    if url is None:
        return "result"
    if url == CHAT_URL:
        return "chat"
    is_echoed = request.echo is True and request.logprobs is not None
    return "echoed completion" if is_echoed else "completion"


def is_supported(supported: object, value: object) -> bool:
    """Return whether `value` of an option changes nothing; supported: as in Supported."""
    if value is None:
        return True
    if isinstance(supported, type):
        return isinstance(value, supported)
    is_bool = isinstance(value, bool)  # true equals 1 in Python
    others = supported if isinstance(supported, tuple) else ()
    return any(isinstance(other, bool) == is_bool and other == value for other in others)


def has_only_supported_options(body: Request, options: Supported) -> bool:
    """Return whether all `options` of `body` have values that `is_supported` takes."""
    for option, supported in options.items():
        value = getattr(body, option)
        if value is not None and not is_supported(supported, value):
            return False
    return True
