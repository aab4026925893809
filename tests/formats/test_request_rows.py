"""Rows of OpenAI Batch files in, requests or problems out."""

import json

import pytest

from batcher import SimulatedModel, decode
from batcher.errors import FieldProblem
from batcher.models.base import chat_template_of
from batcher.request import REQUEST_FIELDS, Request
from batcher.request import PromptSegment as Segment
from batcher.requests.lines import ParsedLine, RequestParser
from batcher.requests.openai import COMPLETION_OPTIONS, SPELLINGS, UNSUPPORTED
from batcher.requests.problems import place_problem
from batcher.requests.validation import ModelCapabilities

PARSER = RequestParser(ModelCapabilities(vocab_size=512))
LINE = 413


def parse(line):
    return PARSER.parse(line if isinstance(line, bytes) else line.encode(), LINE)


def row(body, **fields):
    head = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    return json.dumps(head | fields | {"body": body})


HARMLESS = {
    "model": "m",
    "user": "u",
    "suffix": "",
    "stream": False,
    "stream_options": None,
    "store": True,
    "metadata": {},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}


def test_a_row_is_a_request_with_the_fields_of_its_body():
    body = {"prompt": [1, 2], "max_tokens": 3, "stop": ["x"], "stop_token": 5, "arrival_time": 2}
    request = Request(
        id="a", prompt=[1, 2], max_tokens=3, stop=["x"], stop_token=5, arrival_time=2.0
    )
    assert parse(row(body)) == ParsedLine(request, form="completion")


def test_a_body_may_hold_segments_and_say_with_whom_it_shares():
    body = {"prompt": [{"text": "a", "pin": True}], "priority": -1, "cache_salt": "x"}
    prompt = [Segment(text="a", pin=True)]
    request = Request(id="a", prompt=prompt, priority=-1, cache_salt="x")
    assert parse(row(body)) == ParsedLine(request, form="completion")
    bad = row({"prompt": [{"text": ""}, {"txet": "b"}], "cache_salt": ""})
    assert [(problem.code, problem.field) for problem in parse(bad).problems] == [
        ("invalid-value", "body.prompt[0].text"),
        ("unknown-field", "body.prompt[1].txet"),
        ("invalid-value", "body.cache_salt"),
        ("missing-field", "body.prompt[1]"),
    ]


NOTHING = [
    HARMLESS,
    dict.fromkeys(HARMLESS),
    dict.fromkeys(UNSUPPORTED),
    dict.fromkeys({*REQUEST_FIELDS, *SPELLINGS} - {"id", "prompt", "messages"}),
]


@pytest.mark.parametrize("fields", NOTHING, ids=["harmless", "null", "unsupported", "fields"])
def test_harmless_options_are_accepted_and_null_means_not_given(fields):
    assert HARMLESS.keys() == COMPLETION_OPTIONS.keys()
    request = Request(id="a", prompt="")
    assert parse(row({"prompt": "", **fields})).request == request
    assert parse(json.dumps({"id": "a", "prompt": "", **fields})).request == request


@pytest.mark.parametrize("name", ["stop", "stop_token", "stop_sequence", "stop_token_ids"])
def test_an_empty_list_of_stops_is_none(name: str) -> None:
    for line in (row({"prompt": "x", name: []}), json.dumps({"prompt": "x", name: []})):
        [result] = decode([parse(line).request], model=SimulatedModel())
        [free] = decode([Request(id=result.id, prompt="x")], model=SimulatedModel())
        assert result == free


CHAT = [{"role": "user", "content": "Hi"}]
URLS_AS_WRITTEN = [
    ({"url": "/v1/chat/completions"}, {"messages": CHAT}, "chat"),
    (
        {"url": "https://HOST/openai/v1/chat/completions", "method": None},
        {"messages": CHAT},
        "chat",
    ),
    ({}, {"messages": CHAT}, "chat"),
    ({"url": "/completions"}, {"prompt": "Hi"}, "completion"),
]


@pytest.mark.parametrize(("head", "body", "form"), URLS_AS_WRITTEN, ids=str)
def test_a_row_says_by_its_url_or_its_body_what_it_is(head, body, form) -> None:
    model = SimulatedModel()
    parser = RequestParser(ModelCapabilities(chat_template=chat_template_of(model)))
    usual = "/v1/chat/completions" if form == "chat" else "/v1/completions"
    whole = {"custom_id": "a", "method": "POST", "url": usual, "body": body}
    line = json.dumps({"custom_id": "a", **head, "body": body}).encode()
    expected = parser.parse(json.dumps(whole).encode(), 1)
    assert expected.form == form
    assert parser.parse(line, 1) == parser._parse_good(line, 1) == expected


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [
        ("stream", True, "unsupported-option"),
        ("stream", 0, "unsupported-option"),
        ("echo", 0, "invalid-type"),
        ("suffix", "x", "unsupported-option"),
        ("model", 5, "invalid-type"),
    ],
)
def test_an_option_that_is_wrong_or_would_change_the_output_is_refused(option, value, code):
    line = row({"prompt": "", option: value})
    bad = parse(line)
    assert bad.form == "completion"
    assert bad.id == "a"
    assert [(p.code, p.field) for p in bad.problems] == [(code, f"body.{option}")]
    assert line[bad.problems[0].column - 1 :].startswith(json.dumps(value))


ROWS = [
    ('{"url":5,"body":{"promt":""}}', ["unsupported-option url"]),
    ('{"method":"POST","url":"/v1/completions"}', ["missing-field body"]),
    (row({"prompt": "", "id": "b"}), ["unknown-field body.id"]),
    (row({"prompt": ""}, method="GET"), ["unsupported-option method"]),
    (row({"messages": [], "prompt": "x"}, url="/v1/chat"), ["unsupported-option url"]),
    (
        row({"n": 2, "stop": "", "x": 1, "temprature": 1}),
        [
            *("invalid-value body.stop", "unknown-field body.x", "unknown-field body.temprature"),
            *("conflicting-fields body.n", "missing-field body.prompt"),
        ],
    ),
    (row({"prompt": "x"})[:-1] + ',"body":{"prompt":""}}', ["duplicate-field body"]),
    (row({"prompt": "x"})[:-2] + ',"prompt":""}}', ["duplicate-field body.prompt"]),
]


@pytest.mark.parametrize(("line", "problems"), ROWS)
def test_a_bad_row_has_all_its_problems(line, problems):
    bad = parse(line)
    assert bad.form == "completion"
    assert [f"{p.code} {p.field}" for p in bad.problems] == problems


@pytest.mark.parametrize(
    ("line", "path", "column", "field"),
    [
        ('{"custom_id":"a","prompt":""}', ("id",), 14, "custom_id"),
        ('{"prompt":""}', ("id",), 1, "id"),
        (row({"prompt": ""}), ("id",), 15, "custom_id"),
        ('{"prompt_tokens":[1,2]}', ("prompt", 1), 21, "prompt_tokens[1]"),
        ('{"prompt":""}', (), 1, None),
    ],
)
def test_a_problem_found_later_is_placed_in_its_line(line, path, column, field):
    problem = place_problem(FieldProblem("duplicate-id", path, "m"), line.encode(), 7)
    assert (problem.line, problem.column, problem.field) == (7, column, field)
