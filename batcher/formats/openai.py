"""OpenAI Batch rows: what a row may hold, beside the fields of a request.

Rule: an option that would change the output and is not supported is an error, never ignored.
"""

from typing import Any, Literal

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


# Fields of rows and lines that are the server's business, where one answers: sent as they are.
PASSED_ON = (
    *("messages", "model", "response_format", "tools", "tool_choice", "parallel_tool_calls"),
    *("functions", "function_call", "suffix", "user", "metadata", "store", "service_tier"),
    *("modalities", "audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"),
    *("safety_identifier", "prompt_cache_key", "chat_template_kwargs"),
)


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
