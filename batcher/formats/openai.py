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
    "store": (True, False),
    "metadata": dict,
    "prompt_cache_key": str,
    "safety_identifier": str,
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
    "xtc_threshold",
    # OpenRouter, DeepSeek, Mistral, xAI and others
    *("enable_search", "enable_thinking", "include", "models", "plugins", "preset", "prompt_mode"),
    *("provider", "random_seed", "reasoning", "route", "safe_prompt", "search_parameters"),
    *("thinking", "thinking_budget", "top_a", "transforms", "usage", "web_search"),
)

# Fields of servers with which nothing is done here; in rows some of them may say nothing.
UNSUPPORTED = frozenset((*COMPLETION_OPTIONS, *CHAT_OPTIONS, *PASSED_ON, "extra_body"))


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
