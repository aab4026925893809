"""The JSON Schema of one line of each kind of file, made from the types that read and write it.

What the types do not say is added here: what fields mean, and which of them exclude each other.
"""

import json
from copy import deepcopy
from typing import Any, Literal, get_args

import msgspec

from batcher.errors import InvariantError
from batcher.events import Event, TokenEvent
from batcher.formats.decoders import RequestLine
from batcher.formats.descriptions import DESCRIPTIONS
from batcher.formats.line_problems import NOT_NULL
from batcher.formats.openai import CHAT_OPTIONS, COMPLETION_OPTIONS, BatchRow, ChatRow, Supported
from batcher.formats.result_rows import ChatResultRow, ResultRow
from batcher.formats.spelling_schemas import SPELLING_SCHEMAS
from batcher.request import MAX_INT
from batcher.result import Result
from batcher.validation import (
    ANY_STATE,
    DEFAULTS,
    LOGIT_BIAS,
    MAX_NAME,
    RANGES,
    SEGMENT_LENGTH,
    Range,
)

Kind = Literal["request", "result", "trace"]
Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPES: dict[Kind, tuple[type, ...]] = {
    "request": (RequestLine, BatchRow, ChatRow),
    "result": (Result, ResultRow, ChatResultRow, TokenEvent),
    "trace": get_args(Event),
}
TITLES: dict[Kind, str] = {
    "request": "One line of a requests file: a request, or an OpenAI Batch row",
    "result": "One line of the results: a result, an OpenAI Batch row, or a token event (--stream)",
    "trace": "One line of a trace; readers skip events they do not know",
}

_TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_INT}
_TEXT: Schema = {"type": "string", "minLength": 1}
_NULL: Schema = {"type": "null"}
_STRING: Schema = {"type": "string"}
_SEGMENT: Schema = {"$ref": "#/$defs/PromptSegment"}


def make_schema(kind: Kind) -> Schema:
    """Return the JSON Schema of one line of this kind of file."""
    tops, definitions = msgspec.json.schema_components(TYPES[kind], ref_template="#/$defs/{name}")
    if kind == "request":
        _refine_request(definitions["RequestLine"])
        _refine_completion(definitions["CompletionBody"])
        _refine_chat(definitions["ChatBody"])
        markers = {"anyOf": [_TEXT, _list_of(_TOKEN_ID)]}
        definitions["Transition"]["properties"]["on"] = markers
        _refine_segment(definitions["PromptSegment"])
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
    """Add the exact values, and that a field and its synonym go together only if one is null."""
    definition["properties"] |= {"prompt": _prompt(_NULL)} | _exact_fields()
    del definition["required"]
    definition["not"] = _given(id=_STRING, custom_id=_STRING)
    names = ("prompt", "prompt_tokens", "messages")
    definition["oneOf"] = [_given(**{name: {"not": _NULL}}) for name in names]


def _refine_completion(definition: Schema) -> None:
    """Add the exact values and the options."""
    properties = definition["properties"]
    del properties["id"]
    properties |= {"prompt": _prompt()} | _exact_fields() | _options(COMPLETION_OPTIONS)
    del properties["messages"]


def _refine_chat(definition: Schema) -> None:
    """Add the exact values and the options, and the messages in place of the prompt."""
    properties = definition["properties"]
    del properties["id"], properties["prompt"]
    properties |= _exact_fields() | _options(CHAT_OPTIONS)
    properties["logprobs"] = {"type": ["boolean", "null"], "default": None}
    properties["top_logprobs"] = _number(RANGES["logprobs"], "null") | {"default": None}
    definition["required"] = ["messages"]


def _options(supported_values: Supported) -> dict[str, Schema]:
    """Return the schemas of OpenAI's options."""
    kinds: dict[type, str] = {str: "string", dict: "object"}
    return {
        option: {"type": [kinds[supported], "null"]}
        if isinstance(supported, type)
        else {"enum": [*supported, None]}
        for option, supported in supported_values.items()
    }


def _refine_segment(definition: Schema) -> None:
    """Add the exact values, and which fields exclude or need each other."""
    ids = _list_of(_TOKEN_ID)
    definition["properties"] |= {
        "text": {"anyOf": [_TEXT, _NULL], "default": None},
        "tokens": {"anyOf": [ids, _NULL], "default": None},
        "length": _number(SEGMENT_LENGTH, "null") | {"default": None},
        "seed": {"anyOf": [_number(RANGES["seed"]), _STRING, _NULL], "default": 0},
        "pin": {"type": ["boolean", "null"], "default": False},
    }
    contents = [_given(**{name: {"not": _NULL}}) for name in ("text", "tokens", "length")]
    definition["oneOf"] = contents
    definition["if"] = _given(seed={"enum": [0, None]})
    definition["then"], definition["else"] = True, {"anyOf": [contents[2], _absent("seed")]}


def _prompt(*others: Schema) -> Schema:
    """Return the schema of a prompt, or of what one of the `others` allows."""
    ids, segments = {"type": "array", "items": _TOKEN_ID}, _list_of(_SEGMENT)
    return {"anyOf": [_STRING, ids, segments, *others]}


def _absent(name: str) -> Schema:
    return {"not": {"required": [name]}}


def _given(**fields: Schema) -> Schema:
    return {"properties": fields, "required": list(fields)}


def _exact_fields() -> dict[str, Schema]:
    """Return new schemas of the fields whose values their types do not tell."""
    ids, texts = _list_of(_TOKEN_ID), _list_of(_TEXT)
    fields: dict[str, Schema] = {
        name: _number(allowed) if name in NOT_NULL else _number(allowed, "null")
        for name, allowed in RANGES.items()
    }
    fields |= {
        "stop_token": {"anyOf": [_TOKEN_ID, ids, _NULL]},
        "stop_sequence": {"anyOf": [_TEXT, ids, _list_of(ids), texts, _NULL]},
        "stop": {"anyOf": [_TEXT, texts, _NULL]},
        "logit_bias": {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": _bounds(LOGIT_BIAS) | {"type": "number"},
        },
        "allowed_token_ids": {"anyOf": [ids, _NULL]},
        "bad_words": {"type": ["array", "null"], "items": _TEXT},
        "session": {"anyOf": [_TEXT, _NULL]},
        "cache_salt": {"anyOf": [_TEXT, _NULL]},
        "logprobs_mode": {"enum": ["raw", "processed", None]},
        "echo": {"type": ["boolean", "null"]},
        "include_stop_str_in_output": {"type": ["boolean", "null"]},
        "early_stopping": {"enum": [True, False, "never", None]},
        "choice": {"anyOf": [_list_of(_STRING), _NULL]},
        "lark": {"anyOf": [_TEXT, _NULL]},
        "gbnf": {"anyOf": [_TEXT, _NULL]},
        "heal": {"type": ["boolean", "null"]},
        "states": {"anyOf": [_states(), _NULL]},
    }
    named = {name: schema | {"default": DEFAULTS[name]} for name, schema in fields.items()}
    return named | deepcopy(SPELLING_SCHEMAS)


def _number(allowed: Range, *others: str) -> Schema:
    """Return the schema of a number of the range, or of what has one of the `others` types."""
    kind = "integer" if allowed.is_integer else "number"
    return {"type": [kind, *others] if others else kind} | _bounds(allowed)


def _bounds(allowed: Range) -> Schema:
    lower = "exclusiveMinimum" if allowed.is_open else "minimum"
    return {lower: allowed.smallest, "maximum": allowed.largest}


def _states() -> Schema:
    """Return the schema of an object of states; ANY_STATE alone is none."""
    transition = {"$ref": "#/$defs/Transition"}
    return {
        "type": "object",
        "propertyNames": {"minLength": 1, "maxLength": MAX_NAME},
        "additionalProperties": {"type": "array", "items": transition},
        "not": {"propertyNames": {"const": ANY_STATE}},
    }


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}
