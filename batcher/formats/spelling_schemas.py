"""The JSON Schemas of the names that OpenAI and vLLM have for fields of a request."""

from typing import Any

from batcher.request import MAX_INT
from batcher.validation import RANGES

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_JSON_SCHEMA: Schema = {"type": ["object", "boolean", "string", "null"]}
_CHOICE: Schema = {"type": ["array", "null"], "items": _TEXT, "minItems": 1}
_GRAMMAR: Schema = {"type": ["string", "null"], "minLength": 1}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_EMPTY: Schema = {"enum": [None, "", [], {}, False, 0]}
_PART = _object(("type", "text"), type={"const": "text"}, text=_TEXT)
_MESSAGE = _object(
    ("role", "content"),
    role={"type": "string", "minLength": 1},
    content={"anyOf": [_TEXT, {"type": "array", "items": _PART}]},
    name=_MAYBE_TEXT,
    refusal=_EMPTY,
    tool_calls=_EMPTY,
    function_call=_EMPTY,
    audio=_EMPTY,
    annotations=_EMPTY,
)
_STATED_SCHEMA = _object(
    ("schema",),
    name={},
    description={},
    schema={"type": ["object", "boolean"]},
    strict={},
)
_RESPONSE_FORMAT: Schema = {
    "anyOf": [
        _object(("type",), type={"enum": ["text", "json_object"]}, json_schema={"type": "null"}),
        _object(("type", "json_schema"), type={"const": "json_schema"}, json_schema=_STATED_SCHEMA),
        {"type": "null"},
    ]
}
_STRUCTURED_OUTPUTS: Schema = {
    **_object(
        json=_JSON_SCHEMA,
        regex=_MAYBE_TEXT,
        choice=_CHOICE,
        grammar=_GRAMMAR,
        json_object={"type": ["boolean", "null"]},
    ),
    "type": ["object", "null"],
}

SPELLING_SCHEMAS: dict[str, Schema] = {
    "messages": {"type": ["array", "null"], "items": _MESSAGE, "minItems": 1},
    "max_completion_tokens": {
        "type": ["integer", "null"],
        "minimum": RANGES["max_tokens"].smallest,
        "maximum": RANGES["max_tokens"].largest,
    },
    "stop_token_ids": {
        "type": ["array", "null"],
        "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT},
    },
    "response_format": _RESPONSE_FORMAT,
    "guided_json": _JSON_SCHEMA,
    "guided_regex": _MAYBE_TEXT,
    "guided_choice": _CHOICE,
    "guided_grammar": _GRAMMAR,
    "structured_outputs": _STRUCTURED_OUTPUTS,
}
