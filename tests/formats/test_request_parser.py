"""Lines and rows of OpenAI Batch files in, requests or problems out."""

import json
import tracemalloc

import pytest
from examples import mostly_heavy

from batcher import SimulatedModel, decode
from batcher.errors import FieldProblem
from batcher.models.base import chat_template_of
from batcher.request import REQUEST_FIELDS, Request, Transition
from batcher.request import PromptSegment as Segment
from batcher.requests.lines import MAX_PARTS, BadLine, ParsedLine, RequestParser
from batcher.requests.openai import COMPLETION_OPTIONS, SPELLINGS, UNSUPPORTED
from batcher.requests.problems import place_problem
from batcher.requests.validation import MAX_PROBLEMS, ModelCapabilities

PARSER = RequestParser(ModelCapabilities(vocab_size=512))
LINE = 413


def parse(line):
    return PARSER.parse(line if isinstance(line, bytes) else line.encode(), LINE)


BOOK = Segment(length=5, seed="b", type="user", pin=True)
STATES = {"a": [Transition("x", "b")], "b": [Transition([5], None)]}
SCHEMA = {"id": {"id": 1}, "body": 2, "prompt": "x", "a-b": [{"id": 1}]}

GOOD = [
    ('{"prompt_tokens":[1,2],"custom_id":"a"}', {"prompt": [1, 2], "id": "a"}),
    ('{"prompt_tokens":[],"prompt":null,"id":"a","custom_id":null}', {"prompt": [], "id": "a"}),
    ('\t{ "prompt" : "a" ,\n"max_tokens" :0 } \r\n', {"prompt": "a", "max_tokens": 0}),
    ('{"prompt":"a","arrival_time":1.5e2}', {"prompt": "a", "arrival_time": 150.0}),
    # what the look for equal keys has to tell apart
    (r'{"prompt":"say \"prompt\": \"id\":"}', {"prompt": 'say "prompt": "id":'}),
    (r'{"prompt":"\\","id":"\\\\\" \":"}', {"prompt": "\\", "id": '\\\\" ":'}),
    (r'{"pr\u006fmpt":"a"}', {"prompt": "a"}),
    (r'{"pr\u006fmpt":"a","arrival_time":3}', {"prompt": "a", "arrival_time": 3.0}),
    (r'{"prompt":"a \"body\": 1"}', {"prompt": 'a "body": 1'}),
    ('{"prompt":"\\ud83d\\ude00\\u00e9"}', {"prompt": "\U0001f600é"}),
    # how a token is chosen, and what the output has to be
    (
        '{"prompt":"a","states":{"a":[{"on":"x","to":"b"}],"b":[{"on":[5],"to":null}]}}',
        {"prompt": "a", "states": STATES},
    ),
    # segments
    (
        '{"prompt":[{"text":"a"},{"tokens":[5]}]}',
        {"prompt": [Segment(text="a"), Segment(tokens=[5])]},
    ),
    (
        '{"prompt":[{"length":5,"seed":"b","type":"user","pin":true},{"length":9,"seed":-1}]}',
        {"prompt": [BOOK, Segment(length=9, seed=-1)]},
    ),
    (
        '{"prompt":[{"text":null,"length":3,"seed":null,"type":null,"pin":null}]}',
        {"prompt": [Segment(length=3)]},
    ),
    (
        '{"prompt":"a","session":"s","think_time":2,"deadline":5,"cache_salt":"x"}',
        {"prompt": "a", "session": "s", "think_time": 2.0, "deadline": 5.0, "cache_salt": "x"},
    ),
    # keys of other objects are not those of the line
    (
        '{"prompt":"a","json_schema":{"id":{"id":1},"body":2,"prompt":"x","a-b":[{"id":1}]}}',
        {"prompt": "a", "json_schema": SCHEMA},
    ),
]


@pytest.mark.parametrize(("line", "fields"), GOOD)
def test_a_good_line_is_its_request(line, fields):
    request = Request(**{"id": str(LINE)} | fields)
    parsed = parse(line)
    assert parsed == ParsedLine(request, form="result")
    assert type(parsed.request.arrival_time) is type(parsed.request.temperature) is float


# (the line, then the code, the column, the field and the marked text of each problem)
BAD = [
    ("5", "invalid-json 1 None 5"),
    ("", "invalid-json 1 None "),
    ('{"prompt":"a"', "invalid-json 14 None "),
    ('{"prompt":"é"} x', "invalid-json 16 None x"),
    ('{"prompt":"","arrival_time":Infinity}', "invalid-json 29 None Infinity"),
    (r'{"prompt":"\ud800"}', r"invalid-text 12 None \ud800"),
    ("{}", "missing-field 1 prompt {"),
    ('{"prompt":null}', "invalid-type 11 prompt null"),
    ('{"prompt":[1, 2 ,"3"]}', 'invalid-type 18 prompt[2] "3"'),
    ('{"prompt":"","prompt":""}', 'duplicate-field 14 prompt "prompt"'),
    (r'{"prompt":"","pr\u006fmpt":""}', r'duplicate-field 14 prompt "pr\u006fmpt"'),
    ('{"prompt":"","id":"a","custom_id":"b"}', 'conflicting-fields 35 custom_id "b"'),
    ('{"prompt":"","x":{"x":1,"x":2}}', 'unknown-field 14 x "x"'),
    ('{"prompt":"","arrival_time":1e999}', "invalid-value 29 arrival_time 1e999"),
    (
        '{"id":7,"promt":"x","max_tokens":-1,"stop":[],"stop":""}',
        "invalid-type 7 id 7",
        'unknown-field 9 promt "promt"',
        "invalid-value 34 max_tokens -1",
        'duplicate-field 47 stop "stop"',
        'invalid-value 54 stop ""',
    ),
    ('{"prompt":"","seed":9223372036854775808}', "invalid-value 21 seed 9223372036854775808"),
    (
        '{"prompt":"","num_beams":2,"temperature":1,"best_of":2}',
        "conflicting-fields 42 temperature 1",
        "conflicting-fields 54 best_of 2",
    ),
    ('{"prompt":"","logit_bias":{"5":1, "70000": 2}}', 'unknown-token 35 logit_bias.70000 "70000"'),
    ('{"prompt":"","logit_bias":{"5":1,"5":2}}', 'duplicate-field 34 logit_bias.5 "5"'),
    (
        '{"prompt":"","states":{"a":[5,{"on":"x","too":"a"}]}}',
        "invalid-type 29 states.a[0] 5",
        "missing-field 31 states.a[1].to {",
        'unknown-field 41 states.a[1].too "too"',
    ),
    (
        '{"prompt":"","states":{"a":[{"on":"x","to":null,"on":"y"}]}}',
        'duplicate-field 49 states.a[0].on "on"',
    ),
    ('{"prompt":[{"pin":true}]}', 'missing-field 12 prompt[0] {"pin":true}'),
    (
        '{"prompt":[{"text":"a","tokens":[5],"length":2}]}',
        "conflicting-fields 33 prompt[0].tokens [5]",
        "conflicting-fields 46 prompt[0].length 2",
    ),
    ('{"prompt":[{"tokens":""}]}', 'invalid-type 22 prompt[0].tokens ""'),
    (
        '{"prompt":[{"text":"a","type":"bot","pin":1}]}',
        'invalid-value 31 prompt[0].type "bot"',
        "invalid-type 43 prompt[0].pin 1",
    ),
    (
        '{"prompt":[{"length":1048576},{"length":1}]}',
        'invalid-value 11 prompt [{"length":1048576},{"length":1}]',
    ),
    ('{"prompt_tokens":[{"text":"a"}]}', 'invalid-type 19 prompt_tokens[0] {"text":"a"}'),
    (
        '{"prompt":"","cfg_scale":2,"negative_prompt":[{"text":"a"}]}',
        'invalid-type 47 negative_prompt[0] {"text":"a"}',
    ),
]


def summary(bad, line):
    assert isinstance(bad, BadLine)
    assert all(problem.line == LINE for problem in bad.problems)
    return [
        f"{p.code} {p.column} {p.field} {line[p.column - 1 : p.column - 1 + p.width]}"
        for p in sorted(bad.problems, key=lambda problem: problem.column)
    ]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[0][:40])
def test_a_bad_line_has_all_its_problems_at_their_places(case):
    line, *problems = case
    assert summary(parse(line), line) == problems


@pytest.mark.parametrize("depth", [100, 2000, 20_000])
def test_nesting_bombs_are_problems(depth):
    for line in ("[", "[[", '{"a":', '{"prompt":[', '{"body":[', '{"prompt":{"a":['):
        assert isinstance(parse(line * depth), BadLine)
        assert isinstance(parse(line + "[" * depth + "]" * depth + "}"), BadLine)
    option = '{"body":{"prompt":"","logit_bias":'
    assert isinstance(parse(option + "[" * depth + "]" * depth + "}}"), BadLine)
    assert isinstance(parse(option + '{"a":' * depth + "1" + "}" * depth + "}}"), BadLine)


def test_invalid_utf_8_is_shown_as_escapes():
    (problem,) = parse('{"prompt":"é'.encode() + b'\xff\xfe"}').problems
    assert (problem.code, problem.column, problem.width) == ("invalid-text", 13, 4)
    assert problem.source == r'{"prompt":"é\xff\xfe"}'


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("promt", "`prompt`"),
        ("max_new_tokens", "`max_tokens`"),
        ("temprature", "`temperature`"),
        ("json-schema", "`json_schema`"),
        ("stop_strings", "`stop`"),
        ("guidance_scale", "`cfg_scale`"),
        ("zzz", None),
    ],
)
def test_an_unknown_field_gets_the_name_it_is_like(name, hint):
    line = {"prompt": "", name: 1}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": line}
    for given in (line, row):
        problems = parse(json.dumps(given)).problems
        assert [problem.hint for problem in problems] == [hint and f"did you mean {hint}?"]


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"prompt": ["Hi", "Ho"]}, "each prompt is a request of its own"),
        ({"prompt": ["7", 8]}, "remove the quotes"),
        ({"prompt": [1, "x"]}, None),
        ({"prompt": [1, {"text": "x"}]}, "a list holds token ids or segments; do not mix them"),
        ({"prompt": [{"text": ""}]}, "leave the segment out"),
        (
            {"prompt": "", "states": {"a": [{"on": ["<think>", " x"], "to": None}]}},
            "give one transition for each text",
        ),
    ],
)
def test_several_texts_where_there_is_one_get_a_hint(fields, hint):
    assert [problem.hint for problem in parse(json.dumps(fields)).problems] == [hint]


def test_a_bad_line_keeps_its_id_if_that_can_be_read():
    assert parse('{"id":"a","prompt":5}').id == "a"
    assert parse('{"custom_id":"a","prompt":5}').id == "a"
    assert parse('{"id":5,"prompt":5}').id == str(LINE)
    assert parse('{"id":"a","prompt":5').id == str(LINE)


def test_a_huge_line_leaves_only_what_is_near_its_problem():
    bad = parse('{"prompt":"' + "x" * 10**6 + '","max_tokens":-1}')
    assert [p.column for p in bad.problems] == [10**6 + 27]
    assert len(bad.problems[0].source) < 2000


def test_problems_of_one_line_are_not_without_end():
    line = json.dumps({"prompt": "", **dict.fromkeys(map(str, range(300)))})
    assert len(parse(line).problems) == MAX_PROBLEMS
    for fields in ({"stop": [""] * 200}, {"states": {str(n): [] for n in range(200)}}):
        assert len(parse(json.dumps({"prompt": "", **fields})).problems) == MAX_PROBLEMS


HUGE = 5_000  # more than is looked at


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", [""] * HUGE),
        ("stop_token", [5] * HUGE),
        ("stop_sequence", [[99999]] * HUGE),
        ("bad_words", [""] * HUGE),
        ("states", {"a": [{"on": "", "to": None}] * HUGE}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_huge_stop_is_refused_as_a_whole(field, value):
    (problem,) = parse(json.dumps({"prompt": "", field: value})).problems
    assert problem.field == field
    assert problem.message.endswith("at most 1024 are allowed")


# Rows


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
def test_an_empty_list_of_stops_is_none(name):
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
def test_a_row_says_by_its_url_or_its_body_what_it_is(head, body, form):
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


# Lines of many small parts, which take many times their size

MANY = 2 * MAX_PARTS

MANY_PARTS = {
    "segments": lambda: b'{"prompt":[' + b",".join([b'{"text":"a"}'] * MANY) + b"]}",
    "messages": lambda: (
        b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * MANY) + b"]}"
    ),
    "logit_bias": lambda: (
        b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(MANY)) + b"}}"
    ),
    "unknown": lambda: b'{"prompt":"a",' + b",".join(b'"x%d":1' % i for i in range(MANY)) + b"}",
    "choice": lambda: b'{"prompt":"a","choice":[' + b",".join([b'"\\"'] * MANY) + b"]}",
    "lists": lambda: b'{"prompt":"a","x":[' + b",".join([b"[]"] * MANY) + b"]}",
    "no JSON": lambda: b'{"prompt":"a' + b'"' * MANY + b'","x":' + b"[" * MANY,
}


@pytest.mark.parametrize("kind", mostly_heavy(MANY_PARTS, "segments", "unknown", "no JSON"))
def test_a_line_of_too_many_parts_is_refused_before_it_is_read(kind):
    line = MANY_PARTS[kind]()
    PARSER.parse(b"", 7)  # imports what only bad lines need
    tracemalloc.start()
    try:
        parsed = RequestParser(ModelCapabilities()).parse(line, 7)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(parsed, BadLine)
    [problem] = parsed.problems
    assert (parsed.id, problem.code, problem.line) == ("7", "too-many-parts", 7)
    assert peak < 100_000


def test_a_text_may_hold_any_quotes_and_brackets():
    text = '"[{\\' * MANY
    parsed = PARSER.parse(json.dumps({"prompt": text}).encode(), 7)
    assert isinstance(parsed, ParsedLine)
    assert parsed.request.prompt == text
