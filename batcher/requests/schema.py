"""The JSON Schema of a line of each kind of file, made from the types that read and write it.

What types cannot state is added: null, and fields that exclude each other.
"""

import json
import re
from copy import deepcopy
from typing import Any, Literal, get_args

import msgspec

from batcher.events import Event, TokenEvent
from batcher.fields import fields_of
from batcher.request import PromptSegment, Request, Transition
from batcher.requests.openai import (
    BODY_FIELDS,
    CHAT_URL,
    COMPLETIONS_URL,
    OPTIONS,
    Spellings,
    StatedSchema,
    Supported,
)
from batcher.requests.result_rows import ResultRow
from batcher.requests.validation import ANY_STATE, MAX_NAME
from batcher.result import Result

Kind = Literal["request", "result", "trace"]
Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPES: dict[Kind, tuple[type, ...]] = {
    "request": (Request, Spellings, StatedSchema),
    "result": (Result, ResultRow, TokenEvent),
    "trace": get_args(Event),
}
TITLES: dict[Kind, str] = {
    "request": "One line of a requests file: a request, or an OpenAI Batch row",
    "result": "One line of the results: a result, an OpenAI Batch row, or a token event (--stream)",
    "trace": "One line of a trace; readers skip events they do not know",
}

_NULL: Schema = {"type": "null"}
_STRING: Schema = {"type": "string"}
_ENDS = {CHAT_URL: "/chat/completions$", COMPLETIONS_URL: "(^|[^t])/completions$"}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def make_schema(kind: Kind) -> Schema:
    whole, definitions = msgspec.json.schema_components(TYPES[kind], ref_template="#/$defs/{name}")
    tops = list(whole)
    if kind == "request":
        _describe(definitions)
        tops = _add_lines(definitions)
    for name, definition in definitions.items():
        if name == "Choice":
            del definition["properties"]["token_ids"]  # only in answers over HTTP
        definition["description"] = " ".join(definition["description"].split())
        for field, schema in definition["properties"].items() if kind == "request" else ():
            if field in _DESCRIPTIONS:
                schema.setdefault("description", _DESCRIPTIONS[field])
    return {"$schema": DIALECT, "title": TITLES[kind], "anyOf": tops, "$defs": definitions}


def encode_schema(kind: Kind) -> str:
    return json.dumps(make_schema(kind), indent=2, ensure_ascii=False) + "\n"


# -- requests --------------------------------------------------------------------------------------


def _describe(definitions: dict[str, Schema]) -> None:
    for record in (Request, PromptSegment, Transition):
        for name, field in fields_of(record).items():
            properties = definitions[record.__name__]["properties"]
            if name != "prompt" and record is not Transition:
                properties[name] = _nullable(properties[name])
            properties[name]["description"] = _LINK.sub(r"\1", field.words)
    on = definitions["Transition"]["properties"]["on"]
    properties = definitions["Request"]["properties"]
    text, ids = on["anyOf"]
    any_ids = {name: value for name, value in ids.items() if name != "minItems"}
    segments = _list_of({"$ref": "#/$defs/PromptSegment"})
    properties["prompt"]["anyOf"] = [_STRING, any_ids, segments]
    texts = _list_of(text) | {"minItems": 0}  # may be empty
    properties["stop_sequence"]["anyOf"] = [text, ids, _list_of(ids), texts, _NULL]
    biases, states = properties["logit_bias"]["anyOf"][0], properties["states"]["anyOf"][0]
    biases["propertyNames"] = {"pattern": "^(0|[1-9][0-9]{0,9})$"}
    states["propertyNames"] = {"minLength": 1, "maxLength": MAX_NAME}
    states["not"] = {"propertyNames": {"const": ANY_STATE}}
    segment = definitions["PromptSegment"]  # fields that exclude or need each other
    segment["oneOf"] = [_given(**{name: {"not": _NULL}}) for name in ("text", "tokens", "length")]
    segment["if"] = _given(seed={"enum": [0, None]})
    no_seed = {"not": {"required": ["seed"]}}
    segment["then"], segment["else"] = True, {"anyOf": [segment["oneOf"][2], no_seed]}


def _nullable(schema: Schema) -> Schema:
    if "anyOf" in schema:
        return schema | {"anyOf": [*(s for s in schema["anyOf"] if s != _NULL), _NULL]}
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    return schema | {"type": [schema["type"], "null"]}


def _add_lines(definitions: dict[str, Schema]) -> list[Schema]:
    spellings = definitions.pop("Spellings")["properties"]
    spellings["response_format"] = _RESPONSE_FORMAT
    fields = definitions.pop("Request")["properties"] | spellings
    token_ids = fields["prompt"]["anyOf"][1]
    names = [_given(**{name: {"not": _NULL}}) for name in ("prompt", "prompt_tokens", "messages")]
    definitions["RequestLine"] = _record(
        "A request, by any names of its fields.",
        fields
        | {"prompt": _nullable(fields["prompt"])}
        | {"custom_id": _MAYBE_TEXT | {"default": None}}
        | {"prompt_tokens": {"anyOf": [token_ids, _NULL], "default": None}}
        | _options(OPTIONS[None]),
        **{"not": _given(id=_STRING, custom_id=_STRING), "oneOf": names},
    )
    tops = [{"$ref": "#/$defs/RequestLine"}]
    chat = {
        "logprobs": {
            "type": ["boolean", "null"],
            "default": None,
            "description": "Whether to report the logprob of each token.",
        },
        "top_logprobs": fields["logprobs"],
    }
    for url, kind in ((COMPLETIONS_URL, "Completion"), (CHAT_URL, "Chat")):
        own = chat if url == CHAT_URL else {}
        known = fields | own | _options(OPTIONS[url])
        definitions[f"{kind}Body"] = _record(
            f"The body of a row: the fields of a {kind.lower()}, and OpenAI's options.",
            {name: deepcopy(known[name]) for name in BODY_FIELDS[url]},
            required=["messages" if url == CHAT_URL else "prompt"],
        )
        row = "ChatRow" if url == CHAT_URL else "BatchRow"
        definitions[row] = _record(
            f"One line of an OpenAI Batch file of {kind.lower()}s.",
            {
                "custom_id": _MAYBE_TEXT | {"default": None},
                "method": {"enum": ["POST", None]},
                "url": {"anyOf": [{"type": "string", "pattern": _ENDS[url]}, _NULL]},
                "body": {"$ref": f"#/$defs/{kind}Body"},
            },
            required=["body"],
        )
        tops.append({"$ref": f"#/$defs/{row}"})
    return tops


def _record(description: str, properties: dict[str, Schema], **more: Any) -> Schema:
    shape = {"type": "object", "properties": deepcopy(properties), "additionalProperties": False}
    return {"description": description} | shape | more


def _options(supported_values: Supported) -> dict[str, Schema]:
    kinds: dict[type, str] = {str: "string", dict: "object"}
    return {
        option: {"type": [kinds[supported], "null"]}
        if isinstance(supported, type)
        else {"enum": [*supported, None]}
        for option, supported in supported_values.items()
    }


def _given(**fields: Schema) -> Schema:
    return {"properties": fields, "required": list(fields)}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


_RESPONSE_FORMAT: Schema = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}, "json_schema": _NULL},
            "required": ["type"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {"$ref": "#/$defs/StatedSchema"},
            },
            "required": ["type", "json_schema"],
            "additionalProperties": False,
        },
        _NULL,
    ]
}
_DESCRIPTIONS = {
    "id": "The request's id, unique in the file; the default is the 1-based line number.",
    **dict.fromkeys(
        (option for options in OPTIONS.values() for option in options),
        "An OpenAI option; it must not change the output.",
    ),
    **{name: field.words for name, field in fields_of(Spellings).items()},
    "custom_id": "The request's id, as OpenAI calls it.",
    "prompt_tokens": "The prompt as token ids; a synonym of prompt.",
    "top_logprobs": "Number of most likely tokens to report at each position.",
    "method": "Always POST.",
    "url": "The endpoint.",
    "body": "The request to the endpoint.",
}
