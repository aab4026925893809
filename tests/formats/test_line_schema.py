"""The JSON Schemas against what is read and written."""

import json
import re

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from batcher.request import REQUEST_FIELDS, Request
from batcher.requests.lines import ParsedLine, RequestParser
from batcher.requests.openai import COMPLETION_OPTIONS
from batcher.requests.schema import TYPES, encode_schema, make_schema
from batcher.requests.validation import ModelCapabilities

RANGES = {name: field.range for name, field in REQUEST_FIELDS.items() if field.range}
VALIDATORS = {kind: Draft202012Validator(make_schema(kind)) for kind in TYPES}


@pytest.mark.parametrize("kind", TYPES)
def test_each_schema_is_one_and_describes_each_record_and_fields_of_requests(kind):
    schema = json.loads(encode_schema(kind))
    Draft202012Validator.check_schema(schema)
    for definition in schema["$defs"].values():
        assert definition["description"]
        if kind == "request" and "max_tokens" in definition["properties"]:
            assert all(field["description"] for field in definition["properties"].values())


IDS = st.sampled_from([0, 5, 2**31 - 1, -1, 2**31, "a", None, True, 1.5, []])
TEXTS = st.sampled_from(["a", "", 5, None])
SHAPES = st.one_of(
    IDS,
    TEXTS,
    st.lists(st.one_of(IDS, TEXTS, st.lists(IDS, max_size=2)), max_size=2),
    st.lists(st.integers(0, 5), max_size=3),
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2), max_size=2),
)
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 1.5, -0.5, True, None, "1"])


def _are_too_long_together(segments):
    lengths = [s["length"] for s in segments if type(s.get("length")) is int]
    return max(lengths, default=0) <= 2**20 < sum(lengths)


SEGMENTS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "text": TEXTS,
            "tokens": SHAPES,
            "length": st.sampled_from([0, 1, 5, 2**20, 2**20 + 1, 1.5, "1", None]),
            "seed": st.sampled_from([0, 5, -(2**63), 2**63, "", "a", None, 1.5, True]),
            "type": st.sampled_from(["user", "system", "assistant", "bot", None, 5]),
            "pin": st.sampled_from([True, False, None, 1]),
            "x": TEXTS,
        },
    ),
    max_size=2,
).filter(lambda segments: not _are_too_long_together(segments))
VALUES = {
    "prompt": SHAPES | SEGMENTS,
    "prompt_tokens": SHAPES,
    "id": TEXTS,
    "custom_id": TEXTS,
    "stop_token": SHAPES,
    "stop_sequence": SHAPES,
    "stop": SHAPES,
    "max_tokens": NUMBERS,
    "arrival_time": NUMBERS,
    "priority": NUMBERS,
    "ignore_eos": NUMBERS,
    "x": NUMBERS,
}
STATES = st.dictionaries(
    st.sampled_from(["a", "b", "*", "", "x" * 41]),
    st.lists(
        st.fixed_dictionaries(
            {}, optional={"on": SHAPES, "to": st.sampled_from(["a", "b", None, 5]), "x": TEXTS}
        )
        | NUMBERS,
        max_size=2,
    )
    | NUMBERS,
    max_size=3,
)
EDGES = {
    name: [r.smallest, r.largest, r.smallest - 1, r.largest + 1, 0.5, None, True, "1"]
    for name, r in RANGES.items()
}
OBJECTS = st.dictionaries(
    st.sampled_from(["5", "0", "05", "-1", "a", "99999999999"]),
    st.sampled_from([0, -100, 100.5, "1", None]),
    max_size=2,
)
TEXT_LISTS = st.one_of(TEXTS, NUMBERS, st.lists(TEXTS, max_size=2))
FLAGS = st.sampled_from([True, False, None, 0, 1, "never", "raw", "processed"])
NEW_VALUES = {
    **{name: st.sampled_from(EDGES[name]) for name in RANGES if name not in VALUES},
    "logit_bias": OBJECTS | NUMBERS,
    "allowed_token_ids": SHAPES,
    "bad_words": TEXT_LISTS,
    "negative_prompt": SHAPES,
    "logprobs_mode": FLAGS,
    "echo": FLAGS,
    "include_stop_str_in_output": FLAGS,
    "early_stopping": FLAGS,
    "json_schema": OBJECTS | FLAGS,
    "regex": TEXTS,
    "choice": TEXT_LISTS,
    "lark": TEXTS,
    "gbnf": TEXTS,
    "heal": FLAGS,
    "states": STATES | NUMBERS,
    "initial_state": TEXTS,
    "speculate": FLAGS,
    "session": TEXTS,
    "cache_salt": TEXTS,
    "extra_body": st.sampled_from([{}, None, 5, [], "x"]),  # any other is for servers
}
SCHEMAS = OBJECTS | FLAGS | st.sampled_from(['{"type": "string"}', "5", "null"])
SPELLED = {
    "max_completion_tokens": st.sampled_from(EDGES["max_tokens"]),
    "stop_token_ids": SHAPES,
    "guided_json": SCHEMAS,
    "guided_regex": TEXTS,
    "guided_choice": TEXT_LISTS,
    "guided_grammar": st.sampled_from(["start: x", "root ::= x", "", 5, None]),
    "response_format": NUMBERS
    | st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["text", "json_object", "json_schema", "xml", None, 5]),
            "json_schema": NUMBERS
            | st.fixed_dictionaries(
                {}, optional={"schema": OBJECTS | FLAGS, "name": TEXTS, "strict": FLAGS, "x": TEXTS}
            ),
            "x": TEXTS,
        },
    ),
    "structured_outputs": NUMBERS
    | st.fixed_dictionaries(
        {},
        optional={
            "json": SCHEMAS,
            "regex": TEXTS,
            "choice": TEXT_LISTS,
            "grammar": TEXTS,
            "json_object": FLAGS,
            "x": TEXTS,
        },
    ),
}
PARTS = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["text", "image_url", 5]), "text": TEXTS, "x": TEXTS}
)
MESSAGES = NUMBERS | st.lists(
    NUMBERS
    | st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "system", "", 5, None]),
            "content": TEXTS | st.lists(PARTS, max_size=2),
            "name": TEXTS,
            "tool_calls": st.sampled_from([None, [], [{}]]),
            "x": TEXTS,
        },
    ),
    max_size=2,
)
# What no schema of single fields tells: contradictions, and names that have to be declared.
UNTOLD = re.compile(
    r"is not declared|never be reached|has this marker already|is text, (but not|not a) JSON"
)
OPTION_VALUES = st.sampled_from([None, 0, 1, 0.7, True, False, "", "m", {}, {"5": 1}])
LINES = st.fixed_dictionaries({}, optional=VALUES)
BODIES = st.fixed_dictionaries(
    {}, optional=VALUES | dict.fromkeys(COMPLETION_OPTIONS, OPTION_VALUES)
)
ROWS = st.fixed_dictionaries(
    {"body": BODIES | NUMBERS},
    optional={
        "custom_id": TEXTS,
        "method": st.sampled_from(["POST", "GET"]),
        "url": st.sampled_from(["/v1/completions", "/v1"]),
        "prompt": TEXTS,
    },
)
GOOD_HEAD = {"method": "POST", "url": "/v1/completions"}


LITTLE_WRONG = st.fixed_dictionaries(
    {"prompt": st.just("a")}, optional={k: v for k, v in VALUES.items() if k not in ("prompt", "x")}
)
MIXED = st.lists(st.sampled_from([{"text": "a"}, {"length": 2, "seed": "b"}, 5, "a"]))
CHATS = MESSAGES.map(lambda messages: {"messages": messages})


def parse(line):
    capabilities = ModelCapabilities(chat_template=lambda messages: "x" * len(messages))
    parsed = RequestParser(capabilities).parse(json.dumps(line).encode(), 1)
    return [] if isinstance(parsed, ParsedLine) else parsed.problems


@example({"prompt": "", "id": "a", "custom_id": "b"})
@example({"prompt": "", "id": "a", "custom_id": None})
@example({"prompt": None, "prompt_tokens": [1]})
@example(GOOD_HEAD | {"body": {"prompt": "", "id": None}})
@examples(1500)
@given(
    st.one_of(
        LINES,
        ROWS,
        ROWS.map(lambda row: row | GOOD_HEAD),
        LITTLE_WRONG,
        (SEGMENTS | MIXED).map(lambda prompt: {"prompt": prompt}),
        CHATS,
        CHATS.map(lambda body: {"method": "POST", "url": "/v1/chat/completions", "body": body}),
    )
)
def test_the_schema_and_the_parser_agree(fields):
    problems = parse(fields)
    errors = [error.message for error in VALIDATORS["request"].iter_errors(fields)]
    assert bool(problems) == bool(errors), (problems, errors)


@examples(600)
@given(
    st.sampled_from([*sorted(NEW_VALUES), *sorted(SPELLED), *["states"] * 20]),
    st.sampled_from(["line", "row"]),
    st.data(),
)
def test_they_agree_on_each_way_to_choose_and_to_constrain_tokens(name, form, data):
    fields = {"prompt": "a", name: data.draw((NEW_VALUES | SPELLED)[name])}
    line = fields if form == "line" else GOOD_HEAD | {"body": fields}
    problems = parse(line)
    told = [
        problem.message
        for problem in problems
        if problem.code != "conflicting-fields" and not UNTOLD.search(problem.message)
    ]
    has_untold = name in SPELLED and len(told) < len(problems)
    errors = [error.message for error in VALIDATORS["request"].iter_errors(line)]
    assert has_untold or bool(told) == bool(errors), (told, errors)


def test_the_new_values_are_those_of_all_fields():
    assert VALUES.keys() - {"x"} | NEW_VALUES.keys() >= set(Request.__struct_fields__)
