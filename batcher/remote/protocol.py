"""OpenAI's protocol: what a request asks for, as a body.

Rule: a body holds what the row states and nothing else, but for what a stream needs.  What no
server has a field for is refused before anything is sent, see SERVED.
"""

from typing import Any
from zlib import crc32

from msgspec import Struct

from batcher.request import REQUEST_FIELDS, Request, ServerRequest

COMPLETIONS_PATH, CHAT_PATH = "/completions", "/chat/completions"

# What the queue acts on itself, what servers know by the same name, and what by another one.
_OURS = ("prompt", "id", "arrival_time", "priority", "deadline", "session", "think_time", "n")
_SENT = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "typical_p", "seed"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "ignore_eos"),
    *("bad_words", "allowed_token_ids", "cache_salt", "mirostat", "mirostat_tau", "mirostat_eta"),
    "include_stop_str_in_output",
)
_RENAMED = ("stop", "stop_sequence", "stop_token", "logprobs", "json_schema", "extra_body")
_STRUCTURED = {"regex": "regex", "choice": "choice", "lark": "grammar", "gbnf": "grammar"}  # vLLM's
SERVED = frozenset((*_OURS, *_SENT, *_RENAMED, *_STRUCTURED))
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_FORMATS = ("response_format", "structured_outputs", *_GUIDED)


class Body(Struct, frozen=True):
    """What is sent, and to which of the paths of a server."""

    path: str
    fields: dict[str, Any]


def is_chat(request: Request) -> bool:
    """Return whether a request is messages, and no text to go on from."""
    return request.extra_body is not None and "messages" in request.extra_body


def body_of(
    request: Request, index: int, model: str | None, extra_body: dict[str, Any], history: Any
) -> Body:
    """Return what is sent for sample `index` of a request.

    model: goes before the one that the request names.  extra_body: of all requests; it goes before
    the fields of a request, but for those in an extra_body of its own, and null removes any.
    history: the text, or the messages, that the request goes on from.
    """
    own = request.extra_body or {}
    stated = request.stated if isinstance(request, ServerRequest) else frozenset()
    fields = {
        "stream": True,
        "stream_options": {"include_usage": True},
        **_asked_for(request, own, stated),
        **own,
    }
    if is_chat(request):
        path = CHAT_PATH
        if request.logprobs is not None:
            fields["logprobs"] = True
        if request.logprobs:
            fields["top_logprobs"] = request.logprobs
    else:
        path = COMPLETIONS_PATH
        fields["prompt"] = history + request.prompt if history else request.prompt
        if request.logprobs is not None:
            fields["logprobs"] = request.logprobs
    fields |= extra_body
    fields |= {name: value for name, value in own.items() if name not in stated}
    if path == CHAT_PATH and history:
        fields["messages"] = [*history, *fields["messages"]]
    if model is not None:
        fields["model"] = model
    if index:  # samples differ even if a server repeats itself, and a second run gets the same ones
        seed = fields.setdefault("seed", crc32(str(request.id).encode(errors="replace")) >> 1)
        if isinstance(seed, int):
            fields["seed"] = seed + index
    fields |= {name: None for name, value in extra_body.items() if value is None}
    return Body(path, {name: value for name, value in fields.items() if value is not None})


def _asked_for(request: Request, own: dict[str, Any], stated: frozenset[str]) -> dict[str, Any]:
    """Return what is asked for of texts and chats alike.

    own: what the request says in the server's words, and is not said again in ours.
    """
    fields: dict[str, Any] = {}
    for name in _SENT:
        value = getattr(request, name)
        if name in stated or REQUEST_FIELDS[name].asks(value):
            fields[name] = value
    if "max_completion_tokens" in own:
        fields.pop("max_tokens", None)
    stops = [stop for given in (request.stop_sequence, request.stop) for stop in listed(given)]
    if stops:
        fields["stop"] = stops if request.stop_sequence else request.stop
    if stop_tokens := listed(request.stop_token):
        fields["stop_token_ids"] = stop_tokens
    if own.keys().isdisjoint(_FORMATS):
        if request.json_schema is not None:
            fields["response_format"] = _response_format(request.json_schema)
        for name, key in _STRUCTURED.items():
            if (value := getattr(request, name)) is not None:
                fields["structured_outputs"] = {key: value}
    return fields


def listed(stops: Any) -> list[Any]:
    """Return stops as a list, whether they are given as one, by themselves or not at all."""
    if stops is None:
        return []
    return stops if isinstance(stops, list) else [stops]


def _response_format(schema: Any) -> dict[str, Any]:
    if schema == {"type": "object"}:
        return {"type": "json_object"}
    stated = {} if schema is True else schema
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": stated}}
