"""The JSON Schema of one line of each kind of file, made from the types that read and write it.

What the types do not say is added here: what fields mean, and which of them exclude each other.
"""

import json
from typing import Any, Literal, get_args

import msgspec

from batcher.errors import InvariantError
from batcher.events import Event, TokenEvent
from batcher.formats.decoders import RequestLine
from batcher.formats.line_problems import NOT_NULL
from batcher.formats.openai import SUPPORTED_VALUES, BatchRow
from batcher.formats.results import ResultRow
from batcher.request import MAX_INT, Result
from batcher.validation import ANY_STATE, DEFAULTS, LOGIT_BIAS, MAX_NAME, RANGES, Range

Kind = Literal["request", "result", "trace"]
Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPES: dict[Kind, tuple[type, ...]] = {
    "request": (RequestLine, BatchRow),
    "result": (Result, ResultRow, TokenEvent),
    "trace": get_args(Event),
}
TITLES: dict[Kind, str] = {
    "request": "One line of a requests file: a request, or an OpenAI Batch row",
    "result": "One line of the results: a result, an OpenAI Batch row, or a token event (--stream)",
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
    "temperature": "What the logits are divided by before a token is drawn; 0 takes the largest.",
    "top_k": "Draw from the k most likely tokens; 0 and -1 from all.",
    "top_p": "Draw from the fewest most likely tokens whose probabilities sum to p.",
    "min_p": "Draw from tokens at least this many times as likely as the most likely one.",
    "typical_p": "Draw from the fewest tokens nearest to the entropy whose mass is p.",
    "mirostat": "The version of Mirostat, which steers the mean surprise; 0 is off.",
    "mirostat_tau": "The surprise that Mirostat aims at, in bits.",
    "mirostat_eta": "How fast Mirostat learns.",
    "repetition_penalty": "Divides positive, multiplies negative logits of tokens there already.",
    "frequency_penalty": "What each earlier generation of a token takes from its logit.",
    "presence_penalty": "What an earlier generation of a token takes from its logit, once.",
    "logit_bias": "Token id to what is added to its logit.",
    "allowed_token_ids": "The only tokens that may be generated.",
    "bad_words": "Texts that are not generated.",
    "min_tokens": "Tokens to generate before EOS or a stop token may come.",
    "cfg_scale": "How far the logits move away from those of the negative prompt; 1 is not at all.",
    "negative_prompt": "Text, or token ids, to move away from; the default is empty.",
    "seed": "What, with id, sample and position, decides every draw.",
    "n": "How many outputs to give.",
    "best_of": "How many outputs to make, of which the n most likely are given.",
    **dict.fromkeys(
        ("RequestLine.logprobs", "CompletionBody.logprobs"),
        "How many of the most likely tokens to tell of beside the chosen one.",
    ),
    "logprobs_mode": "Of the model's logits, or of what is left of them to draw from.",
    "echo": "Whether the text begins with the prompt.",
    "num_beams": "Beams to search with; 1 is no beam search.",
    "length_penalty": "The power of the length that a beam's score is divided by.",
    "early_stopping": "Whether to stop at num_beams finished ones, or never before none can win.",
    "json_schema": "The JSON Schema that the output follows.",
    "regex": "The regular expression that all of the output matches.",
    "choice": "The texts of which the output is one.",
    "lark": "The Lark grammar that the output follows.",
    "gbnf": "The GBNF grammar that the output follows.",
    "heal": "Whether the end of the prompt is taken back and its bytes are generated again.",
    "states": "The states, each with its transitions; those of `*` leave every state.",
    "initial_state": "The state to begin in; the default is the first.",
    "on": "The text, or the token ids, that end the state.",
    "to": "The state that follows; null ends generation.",
    "method": "Always POST.",
    "url": "The only endpoint that is answered.",
    "body": "What the endpoint is asked or answers.",
    "index": "Which of the request's outputs, beams or samples, from 0.",
    "text": "The generated text, without the stop.",
    "tokens": "All generated token ids, those of the stop included.",
    "finish_reason": "Why it ended.",
    "stop_reason": "The stop that matched, as the request gave it; null for EOS or none.",
    "usage": "How many tokens went in and came out.",
    "slot": "The slot that decoded it; null if it never held one.",
    "steps": "The steps at which things happened to the request.",
    "error": "Why the request failed.",
    "cumulative_logprob": "The logprobs of all tokens, summed.",
    "logprobs": "The logprob of each token, and of the most likely ones where it stands.",
    "score": "The score of a beam.",
    "segments": "What was generated in each state, in order.",
    "constraint": "Whether the output that has to follow a constraint is a whole.",
    "logprob": "The natural logarithm of the probability.",
    "token": "A token id.",
    "top": "The most likely tokens, most likely first.",
    "state": "The state's name.",
    "Segment.text": "The text of the segment, without markers.",
    "Segment.tokens": "The tokens with a byte in the text.",
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
    "request_id": "Made of the request's id.",
    "ResultRow.id": "Made of the request's id.",
    "Completion.id": "Made of the request's id.",
    "object": "Always text_completion.",
    "created": "Always 0: the same input gives the same bytes.",
    "model": "The model's name.",
    "choices": "The results of the request.",
    "Choice.index": "The place in the row, from 0.",
    "ChoiceLogprobs.tokens": "The tokens, each as token_id:17.",
    "token_logprobs": "The logprob of each token.",
    "top_logprobs": "The most likely tokens at each place, with their logprobs.",
    "batchdecode": "What a result holds and OpenAI's choices have no place for.",
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
    "JumpEvent.tokens": "How many tokens the constraint added.",
    "role": "The row of a sample, of a beam, or the negative prompt's beside a sample.",
    "parent": "The beam that the slot's beam continues from the next step on.",
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
        markers = {"anyOf": [_TEXT, _list_of(_TOKEN_ID)]}
        definitions["Transition"]["properties"]["on"] = markers
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
    definition["properties"] |= _exact_fields()
    del definition["required"]
    definition["not"] = _given(id=_STRING, custom_id=_STRING)
    prompt, tokens = _given(prompt={"not": _NULL}), _given(prompt_tokens={"not": _NULL})
    definition["oneOf"] = [prompt, tokens]


def _refine_body(definition: Schema) -> None:
    """Add the exact values and the options."""
    properties = definition["properties"]
    del properties["id"]
    properties |= _exact_fields()
    for option, supported in SUPPORTED_VALUES.items():
        if isinstance(supported, type):
            properties[option] = {"type": ["string", "null"]}
        else:
            properties[option] = {"enum": [*supported, None]}


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
        "logprobs_mode": {"enum": ["raw", "processed", None]},
        "echo": {"type": ["boolean", "null"]},
        "early_stopping": {"enum": [True, False, "never", None]},
        "choice": {"anyOf": [_list_of(_STRING), _NULL]},
        "lark": {"anyOf": [_TEXT, _NULL]},
        "gbnf": {"anyOf": [_TEXT, _NULL]},
        "heal": {"type": ["boolean", "null"]},
        "states": {"anyOf": [_states(), _NULL]},
    }
    return {name: schema | {"default": DEFAULTS[name]} for name, schema in fields.items()}


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
