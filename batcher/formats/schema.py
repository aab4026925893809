"""The JSON Schema of one line of each kind of file, made from the types that read and write it.

What the types do not say is added here: what fields mean, and which of them exclude each other.
"""

import json
from typing import Any, Literal, get_args

import msgspec

from batcher.errors import InvariantError
from batcher.events import Event
from batcher.formats.openai import SUPPORTED_VALUES, BatchRow
from batcher.formats.requests import RequestLine
from batcher.formats.results import ResultRow
from batcher.request import MAX_INT, Result

Kind = Literal["request", "result", "trace"]
Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPES: dict[Kind, tuple[type, ...]] = {
    "request": (RequestLine, BatchRow),
    "result": (Result, ResultRow),
    "trace": get_args(Event),
}
TITLES: dict[Kind, str] = {
    "request": "One line of a requests file: a request, or an OpenAI Batch row",
    "result": "One line of the results: a result, or an OpenAI Batch row",
    "trace": "One line of a trace; readers skip events they do not know",
}

# What a field means, by its name, or by type and name where that alone does not tell.
DESCRIPTIONS = {
    "id": "The request's id, unique in the file; the default is the 1-based line number.",
    **dict.fromkeys(SUPPORTED_VALUES, "An OpenAI option; it must not change the output."),
    "custom_id": "The request's id, as OpenAI calls it.",
    "prompt": "Text, or token ids.",
    "prompt_tokens": "The prompt as token ids; a synonym of prompt.",
    "max_tokens": "Limit on generated tokens, the prompt not counted; 0 finishes at once.",
    "stop_token": "A token id or several; generating one of them ends the output.",
    "stop_sequence": "Token ids, text, or several of one kind, that end the output.",
    "stop": "Text, or several texts, that end the output.",
    "ignore_eos": "Whether the end-of-sequence token does not end the output.",
    "arrival_time": "Seconds on the engine's clock before which the request does not exist.",
    "priority": "Lower goes first under the priority policy.",
    "method": "Always POST.",
    "url": "The only endpoint that is answered.",
    "body": "What the endpoint is asked or answers.",
    "index": "The request's place in the input, from 0.",
    "text": "The generated text, without the stop.",
    "tokens": "All generated token ids, those of the stop included.",
    "finish_reason": "Why it ended.",
    "stop_reason": "The stop that matched, as the request gave it; null for EOS or none.",
    "usage": "How many tokens went in and came out.",
    "slot": "The slot that decoded it; null if it never held one.",
    "steps": "The steps at which things happened to the request.",
    "error": "Why the request failed.",
    "Usage.prompt_tokens": "Tokens of the prompt.",
    "RowUsage.prompt_tokens": "Tokens of the prompt.",
    "ArriveEvent.prompt_tokens": "Tokens of the prompt.",
    "completion_tokens": "Generated tokens.",
    "total_tokens": "Both together.",
    "arrived": "The first step that could have admitted it.",
    "admitted": "The step that gave it a slot.",
    "first_token": "The step that generated its first token.",
    "finished": "The step that generated its last token.",
    "code": "The kind of error.",
    "message": "What is wrong, for a person.",
    "line": "The line of the input, from 1.",
    "column": "The character of the line, from 1.",
    "field": "The field, as a path.",
    "response": "The answer.",
    "status_code": "200; 400 for a bad request, 500 for a failure of the model.",
    "request_id": "Made of the index.",
    "ResultRow.id": "Made of the index.",
    "Completion.id": "Made of the index.",
    "object": "Always text_completion.",
    "created": "Always 0: the same input gives the same bytes.",
    "model": "The model's name.",
    "choices": "Always one.",
    "Choice.index": "Always 0.",
    "logprobs": "Always null.",
    "batchdecode": "What a result holds and OpenAI's rows have no place for.",
    "event": "The kind of line.",
    "version": "Of the trace format.",
    "batch": "The number of slots.",
    "policy": "The order of the waiting queue.",
    "settings": "The model's settings.",
    "step": "The step, from 0.",
    "time": "Seconds on the engine's clock.",
    "reason": "Why.",
    "FinishEvent.tokens": "How many tokens were generated.",
    "EndEvent.tokens": "How many tokens were generated.",
    "EndEvent.steps": "How many steps were taken.",
    "requests": "How many requests ended.",
}

_TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_INT}
_TEXT: Schema = {"type": "string", "minLength": 1}
_NULL: Schema = {"type": "null"}
_STRING: Schema = {"type": "string"}


def make_schema(kind: Kind) -> Schema:
    """Return the JSON Schema of one line of this kind of file."""
    tops, definitions = msgspec.json.schema_components(TYPES[kind], ref_template="#/$defs/{name}")
    if kind == "request":
        _refine_request(definitions["RequestLine"])
        _refine_body(definitions["CompletionBody"])
    for name, definition in definitions.items():
        definition["description"] = " ".join(definition["description"].split())
        for field, schema in definition["properties"].items():
            text = DESCRIPTIONS.get(f"{name}.{field}") or DESCRIPTIONS.get(field)
            if text is None:
                raise InvariantError(f"the schema does not say what {name}.{field} means")
            schema["description"] = text
    return {"$schema": DIALECT, "title": TITLES[kind], "anyOf": list(tops), "$defs": definitions}


def encode_schema(kind: Kind) -> str:
    """Return the JSON Schema of one line of this kind of file as indented JSON."""
    return json.dumps(make_schema(kind), indent=2, ensure_ascii=False) + "\n"


def _refine_request(definition: Schema) -> None:
    """Add the exact stops, and that a field and its synonym go together only when one is null."""
    definition["properties"] |= _stops()
    del definition["required"]
    definition["not"] = _given(id=_STRING, custom_id=_STRING)
    prompt, tokens = _given(prompt={"not": _NULL}), _given(prompt_tokens={"not": _NULL})
    definition["oneOf"] = [prompt, tokens]


def _refine_body(definition: Schema) -> None:
    """Add the exact stops and the options."""
    properties = definition["properties"]
    del properties["id"]
    properties |= _stops()
    types = {str: "string", int: "integer"}
    for option, supported in SUPPORTED_VALUES.items():
        if isinstance(supported, type):
            properties[option] = {"type": [types[supported], "null"]}
        else:
            properties[option] = {"enum": [*supported, None]}


def _given(**fields: Schema) -> Schema:
    return {"properties": fields, "required": list(fields)}


def _stops() -> Schema:
    """Return new schemas of the three stop fields."""
    ids, texts = _list_of(_TOKEN_ID), _list_of(_TEXT)
    return {
        "stop_token": {"anyOf": [_TOKEN_ID, ids, _NULL]},
        "stop_sequence": {"anyOf": [_TEXT, ids, _list_of(ids), texts, _NULL]},
        "stop": {"anyOf": [_TEXT, texts, _NULL]},
    }


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}
