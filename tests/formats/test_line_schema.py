"""The JSON Schemas against what is read and written."""

import json
import re

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from msgspec.structs import replace

from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    DraftEvent,
    EndEvent,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    RejectEvent,
    RollbackEvent,
    RunEvent,
    SpeculateEvent,
    StepsEvent,
)
from batcher.request import REQUEST_FIELDS, Request
from batcher.requests.lines import ParsedLine, RequestParser
from batcher.requests.openai import COMPLETION_OPTIONS
from batcher.requests.result_rows import encode_openai_row
from batcher.requests.results import encode_result
from batcher.requests.schema import TYPES, encode_schema, make_schema
from batcher.requests.validation import ModelCapabilities
from batcher.result import (
    ErrorInfo,
    PromptLogprob,
    Result,
    Segment,
    StepTimes,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from batcher.trace.files import encode_events

RANGES = {name: field.range for name, field in REQUEST_FIELDS.items() if field.range}
VALIDATORS = {kind: Draft202012Validator(make_schema(kind)) for kind in TYPES}


@pytest.mark.parametrize("kind", TYPES)
def test_each_schema_is_one_and_describes_every_field(kind):
    schema = json.loads(encode_schema(kind))
    Draft202012Validator.check_schema(schema)
    for definition in schema["$defs"].values():
        assert definition["description"]
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
    """Whether a limit is broken that no schema of single segments tells."""
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
            {},
            optional={"on": SHAPES, "to": st.sampled_from(["a", "b", None, 5]), "x": TEXTS},
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
    {},
    optional={"type": st.sampled_from(["text", "image_url", 5]), "text": TEXTS, "x": TEXTS},
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
UNTOLD = re.compile(r"is not declared|never be reached|has this marker already|is text, and no")
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


@example({"prompt": "", "id": "a", "custom_id": "b"})
@example({"prompt": "", "id": "a", "custom_id": None})
@example({"prompt": None, "prompt_tokens": [1]})
@example(GOOD_HEAD | {"body": {"prompt": "", "id": None}})
@given(st.one_of(LINES, ROWS, ROWS.map(lambda row: row | GOOD_HEAD)))
def test_the_schema_and_the_parser_agree(fields):
    parsed = RequestParser(ModelCapabilities()).parse(json.dumps(fields).encode(), 1)
    errors = [error.message for error in VALIDATORS["request"].iter_errors(fields)]
    assert isinstance(parsed, ParsedLine) == (not errors), (parsed, errors)


@given(
    st.fixed_dictionaries(
        {"prompt": st.just("a")},
        optional={k: v for k, v in VALUES.items() if k not in ("prompt", "x")},
    )
)
def test_they_agree_on_lines_that_have_little_wrong_with_them(fields):
    parsed = RequestParser(ModelCapabilities()).parse(json.dumps(fields).encode(), 1)
    assert isinstance(parsed, ParsedLine) == VALIDATORS["request"].is_valid(fields)


@examples(300)
@given(
    st.sampled_from([*sorted(NEW_VALUES), *["states"] * 20]),
    st.sampled_from(["line", "row"]),
    st.data(),
)
def test_they_agree_on_each_way_to_choose_and_to_constrain_tokens(name, form, data):
    fields = {"prompt": "a", name: data.draw(NEW_VALUES[name])}
    line = fields if form == "line" else GOOD_HEAD | {"body": fields}
    parsed = RequestParser(ModelCapabilities()).parse(json.dumps(line).encode(), 1)
    problems = [] if isinstance(parsed, ParsedLine) else parsed.problems
    told = [
        problem.message
        for problem in problems
        if problem.code != "conflicting-fields" and not UNTOLD.search(problem.message)
    ]
    errors = [error.message for error in VALIDATORS["request"].iter_errors(line)]
    assert bool(told) == bool(errors), (told, errors)


def parse_with_a_template(line):
    capabilities = ModelCapabilities(chat_template=lambda messages: "x" * len(messages))
    return RequestParser(capabilities).parse(json.dumps(line).encode(), 1)


@examples(300)
@given(st.sampled_from(sorted(SPELLED)), st.sampled_from(["line", "row"]), st.data())
def test_they_agree_on_names_of_others(name, form, data):
    fields = {"prompt": "a", name: data.draw(SPELLED[name])}
    line = fields if form == "line" else GOOD_HEAD | {"body": fields}
    parsed = parse_with_a_template(line)
    problems = [] if isinstance(parsed, ParsedLine) else parsed.problems
    has_untold = any(
        problem.code == "conflicting-fields" or UNTOLD.search(problem.message)
        for problem in problems
    )
    errors = [error.message for error in VALIDATORS["request"].iter_errors(line)]
    assert has_untold or bool(problems) == bool(errors), (problems, errors)


@examples(300)
@given(MESSAGES, st.sampled_from(["line", "chat"]))
def test_they_agree_on_messages(messages, form):
    line = {"messages": messages}
    if form == "chat":
        line = {"method": "POST", "url": "/v1/chat/completions", "body": line}
    assert isinstance(parse_with_a_template(line), ParsedLine) == VALIDATORS["request"].is_valid(
        line
    )


@examples(500)
@given(SEGMENTS | st.lists(st.sampled_from([{"text": "a"}, {"length": 2, "seed": "b"}, 5, "a"])))
def test_they_agree_on_segments(prompt):
    fields = {"prompt": prompt}
    parsed = RequestParser(ModelCapabilities()).parse(json.dumps(fields).encode(), 1)
    assert isinstance(parsed, ParsedLine) == VALIDATORS["request"].is_valid(fields), parsed


def test_the_new_values_are_those_of_all_fields():
    assert VALUES.keys() - {"x"} | NEW_VALUES.keys() >= set(Request.__struct_fields__)


FULL = Result(
    id="c",
    index=1,
    text="t",
    tokens=[1],
    finish_reason="length",
    stop_reason=None,
    usage=Usage(1, 1),
    slot=0,
    steps=StepTimes(0, 0, 0, 0),
    cumulative_logprob=-1.5,
    logprobs=[TokenLogprob(1, -1.5, [TopLogprob(2, -0.5), TopLogprob(1, -1.5)])],
    prompt_logprobs=[PromptLogprob(5, None, [])],
    score=-0.5,
    segments=[Segment("a", "t", [1])],
    constraint="complete",
    constraint_check="none",
    constraint_verified=("not",),
)
NONE = StepTimes(None, None, None, None)


def encode_row(result):
    return encode_openai_row([result], "m", "completion", bytes_of)


def encode_echo(result):
    return encode_openai_row([result], "m", "echoed completion", bytes_of)


def encode_chat(result):
    return encode_openai_row([result], "m", "chat", bytes_of)


def bytes_of(token):
    return b"x" * (token % 3)


OPTIONAL = {
    "error",
    "cumulative_logprob",
    "logprobs",
    "prompt_logprobs",
    "score",
    "segments",
    "constraint",
    "constraint_check",
    "constraint_verified",
}


RESULTS = [
    FULL,
    replace(FULL, finish_reason="stop", stop_reason=[1], **dict.fromkeys(OPTIONAL)),
    replace(FULL, finish_reason="error", slot=None, steps=NONE, error=ErrorInfo("c", "m", line=2)),
]


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("encode", [encode_result, encode_row, encode_echo, encode_chat])
def test_results_of_both_forms_are_valid(result, encode):
    line = json.loads(encode(result))
    VALIDATORS["result"].validate(line)
    for field in line.keys() - OPTIONAL:
        assert not VALIDATORS["result"].is_valid({k: v for k, v in line.items() if k != field})


EVENTS = [
    RunEvent(batch=2, model="simulated", settings={"seed": 0}),
    ArriveEvent(0, 0.0, "a", 0, "input", 5, 16),
    AdmitEvent(0, 0.0, "a", 0, 1, "empty"),
    AdmitEvent(0, 0.0, "a", 0, 1, "empty", "negative"),
    JumpEvent(1, 1.0, "a", 0, 1, 3),
    DraftEvent(1, 1.0, "a", 0, 1, 9, 4),
    AcceptEvent(1, 1.0, "a", 0, 1, 9, 1),
    RollbackEvent(1, 1.0, "a", 0, 1, 10, 3, 1),
    SpeculateEvent(1, 1.0, "a", 0, 1, 0, "failure"),
    StepsEvent(1, [2.0], [1], [4], [1], [2], [0], [0], drafts=[4]),
    ForkEvent(1, 1.0, "a", 0, 1, 2),
    FinishEvent(3, 3.0, "a", 0, 1, "stop", [1, 2], 4),
    FinishEvent(3, 3.0, "a", 1, 1, "unused", None, 4, "beam"),
    RejectEvent(0, 0.0, "7", 6, "invalid-json"),
    EndEvent(4, 4.0, 4, 1),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_are_valid(event):
    line = json.loads(encode_events([event]))
    VALIDATORS["trace"].validate(line)
    assert not VALIDATORS["trace"].is_valid(line | {"event": "other"})
