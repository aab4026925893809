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
    **dict.fromkeys(("model", "user", "service_tier", "prompt_cache_key"), str),
    **dict.fromkeys(("safety_identifier", "prompt_cache_retention"), str),
    "metadata": dict,
    "store": (False, True),
    "stream": (False,),
    "stream_options": (),
    # vLLM's defaults
    **dict.fromkeys(
        ("detokenize", "skip_special_tokens", "spaces_between_special_tokens"), (True,)
    ),
    "use_beam_search": (False,),
}
COMPLETION_OPTIONS: Supported = {**_EVERYWHERE, "suffix": ("",)}
CHAT_OPTIONS: Supported = {
    **_EVERYWHERE,
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
}
OPTIONS: dict[str | None, Supported] = {
    COMPLETIONS_URL: COMPLETION_OPTIONS,
    CHAT_URL: CHAT_OPTIONS,
    None: COMPLETION_OPTIONS | CHAT_OPTIONS,  # of lines that are no rows
}

# Fields that are the server's business, where one answers: sent as they are.
PASSED_ON = (
    # OpenAI
    *("model", "tools", "tool_choice", "parallel_tool_calls", "allowed_tools"),
    *("functions", "function_call", "suffix", "user", "metadata", "store", "service_tier"),
    *("modalities", "audio", "prediction", "reasoning_effort", "verbosity"),
    *("web_search_options", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    # vLLM and SGLang
    *("add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs"),
    *("continue_final_message", "detokenize", "documents", "guided_decoding_backend"),
    *("guided_whitespace_pattern", "include_reasoning", "kv_transfer_params", "logits_processors"),
    *("logits_processor_args", "media_io_kwargs", "mm_processor_kwargs", "prompt_embeds"),
    *("request_id", "return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens"),
    *("spaces_between_special_tokens", "structural_tag", "thinking_token_budget"),
    *("truncate_prompt_tokens", "vllm_xargs", "custom_logit_processor", "custom_params", "ebnf"),
    *("lora_path", "no_stop_trim", "return_hidden_states", "rid"),
    *("separate_reasoning", "session_params", "stop_regex", "stream_reasoning"),
    # llama.cpp and Ollama
    *("cache_prompt", "dry_allowed_length", "dry_base", "dry_multiplier", "dynatemp_range"),
    *("grammar", "grammar_lazy", "id_slot", "keep_alive", "min_keep", "options", "samplers"),
    *("reasoning_format", "repeat_last_n", "repeat_penalty", "think", "xtc_probability"),
    *("xtc_threshold", "lora", "parse_tool_calls", "return_progress", "thinking_forced_open"),
    *("timings_per_token", "top_n_sigma"),
    # OpenRouter, DeepSeek, Mistral, xAI and others
    *("enable_search", "enable_thinking", "include", "models", "plugins", "preset", "prompt_mode"),
    *("provider", "random_seed", "reasoning", "route", "safe_prompt", "search_parameters"),
    *("thinking", "thinking_budget", "top_a", "transforms", "usage", "web_search"),
    *("do_sample", "fallbacks", "reasoning_split", "session_id", "tool_stream"),
)

# Fields of servers with which nothing is done here; in rows some of them may say nothing.
UNSUPPORTED = frozenset((*OPTIONS[None], *PASSED_ON, "extra_body"))


def url_of(row: dict[str, Any]) -> str | None:
    """Return which of the URLS a row is for, by its `url` or else its `body`; None for none."""
    url, body = row.get("url"), row.get("body")
    if url in URLS:
        return str(url)
    if url is None:
        return CHAT_URL if isinstance(body, dict) and "messages" in body else COMPLETIONS_URL
    ends = (
        end for end in (CHAT_URL, COMPLETIONS_URL) if str(url).endswith(end.removeprefix("/v1"))
    )
    return next(ends, None)


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
