"""From the body of a request over HTTP to the request, and how its answer is to be delivered.

Rule: a body holds what that of an OpenAI Batch row may, and is read and checked as such; beside it
only how the answer comes, which a file has no use for.
"""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from batcher.request import CONSTRAINT_FIELDS, Request
from batcher.requests.json_spans import (
    NOT_JSON,
    JsonError,
    TextSpan,
    find_doubles,
    parse,
)
from batcher.requests.lines import BadLine, RequestParser, find_too_many
from batcher.requests.openai import SPELLINGS, Form
from batcher.requests.validation import show
from batcher.serving.http import BAD_REQUEST, NOT_FOUND, ApiError, of_problems


class Delivery(Struct, frozen=True):
    """How the answer comes: whole or as a stream of chunks, and whether it tells token ids.

    includes_usage: whether the last chunk tells how many tokens the answer took.
    """

    stream: bool | None = None
    stream_options: dict[Literal["include_usage"], bool | None] | None = None
    return_token_ids: bool | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.get("include_usage"))


class ClientRequest(Struct, frozen=True):
    """What a client asks for; requests: one for each prompt, which differ in nothing else."""

    requests: list[Request]
    form: Form
    delivery: Delivery


# Of a file or of a clock that all clients share: a session would show the text of another.
_NOT_OF_CLIENTS = {
    "arrival_time": "a request arrives when it comes",
    "think_time": "a request arrives when it comes",
    "deadline": "the server's clock is its own",
    "session": "sessions are of files: send the messages so far",
}
_EXPECTED = {
    "stream": "true or false",
    "stream_options": "an object with `include_usage`, true or false",
    "return_token_ids": "true or false",
}

# Constraints are compiled, which takes long.
_SLOW = {*CONSTRAINT_FIELDS, *SPELLINGS} - {"messages", "max_completion_tokens"}
MAX_QUICK_BYTES = 16 * 2**10
MAX_PROMPTS = 2048


class BodyReader:
    """Reads bodies; model: the name that requests may call it by.

    asks_tokenizer: whether texts are encoded to check them.
    """

    def __init__(self, parser: RequestParser, model: str, *, asks_tokenizer: bool) -> None:
        self._parser, self._model, self._asks_tokenizer = parser, model, asks_tokenizer

    def is_quick(self, fields: dict[str, Any]) -> bool:
        return not (self._asks_tokenizer or _has_prompts(fields)) and _SLOW.isdisjoint(fields)

    def check_model(self, name: object) -> None:
        if isinstance(name, str) and name != self._model:
            message = f"the model {name!r} does not exist; this server has {self._model!r}"
            raise ApiError(NOT_FOUND, "model_not_found", message, "model")

    def read(self, url: str, fields: dict[str, Any]) -> ClientRequest:
        """Return what the body with these `fields`, sent to `url`, asks for.

        Raises:
            ApiError: it is no request, or not one for this server.
        """
        for name, why in _NOT_OF_CLIENTS.items():
            if fields.get(name) is not None:
                message = f"`{name}` is not for requests over HTTP: {why}"
                raise ApiError(BAD_REQUEST, "unsupported-option", message, name)
        delivery = _take_delivery(fields)
        self.check_model(fields.get("model"))
        bodies = [fields]
        if _has_prompts(fields):
            if (num_prompts := len(fields["prompt"])) > MAX_PROMPTS:
                message = f"`prompt` is a list of {num_prompts} prompts, of at most {MAX_PROMPTS}"
                raise ApiError(BAD_REQUEST, "invalid-value", message, "prompt")
            bodies = [fields | {"prompt": prompt} for prompt in fields["prompt"]]
        requests = []
        for place, body in enumerate(bodies):
            parsed = self._parser.parse_body(url, body)
            if isinstance(parsed, BadLine):
                raise of_problems(parsed.problems, f"prompt {place}: " if place else "")
            requests.append(parsed.request)
        if delivery.stream and requests[0].echo:
            message = "`stream` and `echo` exclude each other: a stream has only generated text"
            raise ApiError(BAD_REQUEST, "conflicting-fields", message, "echo")
        return ClientRequest(requests, parsed.form, delivery)


def _has_prompts(fields: dict[str, Any]) -> bool:
    prompts = fields.get("prompt")
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], str | list)


def fields_of(data: bytes) -> dict[str, Any]:
    """Return the object that `data` holds, or raise an ApiError that says where it is none."""
    if not data.strip():
        raise ApiError(BAD_REQUEST, "invalid-json", "the body is empty; it is a JSON object")
    too_many = find_too_many(data, 1)
    if too_many is not None:
        raise of_problems([too_many])
    try:
        fields = msgspec.json.decode(data)
        if isinstance(fields, dict) and len(fields) < data.count(b":"):  # else each is a key
            text = data.decode()
            for path, span, first in find_doubles(text):
                places = f"{_place(text, first)}, and {_place(text, span)}"
                message = f"field `{path[-1]}` is given twice ({places})"
                raise ApiError(BAD_REQUEST, "duplicate-field", message, str(path[0]))
    except (ValueError, RecursionError):
        raise ApiError(BAD_REQUEST, "invalid-json", _why_no_json(data)) from None
    if not isinstance(fields, dict):
        names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
        message = f"the body is a JSON object, not {names.get(type(fields), 'a number')}"
        raise ApiError(BAD_REQUEST, "invalid-json", message)
    return fields


def _why_no_json(data: bytes) -> str:
    try:
        text = data.decode()
        parse(text)
    except UnicodeDecodeError as error:
        return f"the body is not UTF-8 from byte {error.start} on: {error.reason}"
    except JsonError as error:
        reason = error.message.removeprefix(NOT_JSON).replace("the line ends", "it ends")
        return f"the body is not JSON: {reason} ({_place(text, error.span)})"
    return "the body is not JSON"


def _place(text: str, span: TextSpan) -> str:
    line = text.count("\n", 0, span.start) + 1
    return f"line {line}, column {span.start - text.rfind(chr(10), 0, span.start)}"


def _take_delivery(fields: dict[str, Any]) -> Delivery:
    told = {name: fields.pop(name) for name in _EXPECTED if name in fields}
    for name, value in told.items():
        try:
            msgspec.convert({name: value}, Delivery)
        except msgspec.ValidationError:
            more = "and nothing else" if isinstance(value, dict) else f"not {show(value)}"
            message = f"`{name}` must be {_EXPECTED[name]}, {more}"
            raise ApiError(BAD_REQUEST, "invalid-type", message, name) from None
    delivery = msgspec.convert(told, Delivery)
    if delivery.stream_options is not None and not delivery.stream:
        message = "`stream_options` has no effect without `stream`; give true"
        raise ApiError(BAD_REQUEST, "conflicting-fields", message, "stream_options")
    return delivery
