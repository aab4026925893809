"""The parser against arbitrary bytes, and against plain rules on what the standard parser reads."""

import json
import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from batcher.errors import ERROR_CODES
from batcher.formats.diagnostics import render_problem
from batcher.formats.line_problems import read_line
from batcher.formats.requests import BadLine, ParsedLine, RequestParser
from batcher.request import MAX_INT, Request
from batcher.validation import MAX_STOP_LENGTH, find_problems

VOCAB_SIZE = 512
PARSER = RequestParser(vocab_size=VOCAB_SIZE)

SEEDS = [
    b'{"id":"a","prompt":[1,2,3],"max_tokens":4,"stop_token":[5],"stop_sequence":[[1,2],[3]]}',
    '{"custom_id":"é","prompt_tokens":[1],"stop":["x","\U0001f600"],"arrival_time":1.5}'.encode(),
    b'{"prompt":"a \\"b\\": \\ud83d\\ude00 \\\\","ignore_eos":true,"priority":-1,"id":null}',
    b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x","n":1}}',
]
BITS = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-1", b"1e999", b"NaN"]
BITS += [
    b'"prompt":""',
    b'"id":"z"',
    b"\xff",
    b"\xc3",
    b"\x00",
    b"\n",
    b" ",
    b"\\ud800",
    b"9" * 400,
]


@st.composite
def mutated_lines(draw):
    line = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(line)))
        end = min(len(line), start + draw(st.integers(0, 8)))
        line = line[:start] + draw(st.sampled_from([b"", *BITS])) + line[end:]
    return line


def check(line):
    parsed = PARSER.parse(line, 413)
    if isinstance(parsed, ParsedLine):
        assert find_problems(parsed.request, VOCAB_SIZE) == []
        assert isinstance(parsed.request.id, str)
        # The fast way accepts what the thorough way accepts, as the same request.
        assert read_line(line, 413, VOCAB_SIZE) == (parsed.request, parsed.is_openai)
        return
    length = len(line.decode(errors="backslashreplace"))
    assert isinstance(parsed, BadLine)
    assert parsed.problems
    for problem in parsed.problems:
        assert problem.code in ERROR_CODES
        assert 1 <= problem.column <= length + 1
        assert problem.width >= 1
        assert render_problem(problem, filename="f", width=80, color=False)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_problems(line):
    check(line)


@settings(max_examples=500)
@given(mutated_lines())
@example(SEEDS[0])
def test_any_damaged_line_is_a_request_or_problems(line):
    check(line)


SMALL_INTS = st.sampled_from([0, 1, 511, 512, -1, MAX_INT, 2**31, 10**30])
SCALARS = st.one_of(
    SMALL_INTS, st.sampled_from([None, True, False, 0.0, 1.5, -1.5, "", "a", "é\n", {}])
)
NESTED = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
FIELDS = [*Request.__struct_fields__, "custom_id", "prompt_tokens", "promt"]
OBJECTS = st.lists(st.tuples(st.sampled_from(FIELDS), NESTED), max_size=5)


def is_id(value):
    return type(value) is int and 0 <= value < VOCAB_SIZE


def is_text(value):
    return type(value) is str and value != ""


def is_list_of(value, is_item):
    return type(value) is list and value != [] and all(map(is_item, value))


def is_int(value, smallest):
    return type(value) is int and smallest <= value <= MAX_INT


RULES = {
    "id": lambda v: v is None or type(v) is str,
    "prompt": lambda v: type(v) is str or v == [] or is_list_of(v, is_id),
    "max_tokens": lambda v: is_int(v, 0),
    "stop_token": lambda v: v is None or is_id(v) or is_list_of(v, is_id),
    "stop_sequence": lambda v: (
        v is None
        or is_text(v)
        or is_list_of(v, is_id)
        or is_list_of(v, is_text)
        or is_list_of(v, lambda item: is_list_of(item, is_id))
    ),
    "stop": lambda v: v is None or is_text(v) or is_list_of(v, is_text),
    "ignore_eos": lambda v: type(v) is bool,
    "arrival_time": lambda v: type(v) in (int, float) and 0 <= v < math.inf,
    "priority": lambda v: is_int(v, -MAX_INT),
}


def expected_request(members):
    """The request of an object without an OpenAI body, by plain rules; None if it is none."""
    fields = dict(members)
    if len(fields) < len(members) or not fields.keys() <= set(FIELDS) - {"promt"}:
        return None
    for synonym, name in (("custom_id", "id"), ("prompt_tokens", "prompt")):
        value = fields.pop(synonym, None)
        if value is None:
            continue
        if fields.get(name) is not None or (name == "prompt" and type(value) is not list):
            return None
        fields[name] = value
    if "prompt" not in fields or not all(RULES[name](value) for name, value in fields.items()):
        return None
    if fields.get("id") is None:
        fields["id"] = "1"
    return fields


@settings(max_examples=500)
@given(OBJECTS, st.booleans(), st.sampled_from([(",", ":"), (" ,\t", " :\r\n ")]))
def test_the_parser_accepts_what_plain_rules_accept(members, ensure_ascii, separators):
    comma, colon = separators
    body = comma.join(
        json.dumps(name) + colon + json.dumps(value, ensure_ascii=ensure_ascii)
        for name, value in members
    )
    parsed = PARSER.parse(f"{{{body}}}".encode(), 1)
    expected = expected_request(members)
    if expected is None:
        assert isinstance(parsed, BadLine)
    else:
        assert parsed == ParsedLine(Request(**expected), is_openai=False)
        assert type(parsed.request.arrival_time) is float


def test_the_plain_rules_leave_out_only_the_length_of_stops():
    line = json.dumps({"prompt": "", "stop": "x" * (MAX_STOP_LENGTH + 1)}).encode()
    assert isinstance(PARSER.parse(line, 1), BadLine)
