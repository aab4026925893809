"""The parser against arbitrary bytes, and against plain rules on what the standard parser reads."""

import json
from zlib import crc32

from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from batcher.errors import ERROR_CODES
from batcher.request import MAX_INT, MAX_TIME, REQUEST_FIELDS, Request
from batcher.requests.lines import BadLine, ParsedLine, RequestParser
from batcher.requests.problems import read_line, render_problem
from batcher.requests.validation import MAX_STOP_LENGTH, ModelCapabilities, find_problems
from cli.run.input import LineParser

VOCAB_SIZE = 512
CAPABILITIES = ModelCapabilities(vocab_size=VOCAB_SIZE)
PARSER = RequestParser(CAPABILITIES)
AGAIN = LineParser(PARSER)
RANGES = {name: field.range for name, field in REQUEST_FIELDS.items() if field.range}

SEEDS = [
    b'{"id":"a","prompt":[1,2,3],"max_tokens":4,"stop_token":[5],"stop_sequence":[[1,2],[3]]}',
    '{"custom_id":"é","prompt_tokens":[1],"stop":["x","\U0001f600"],"arrival_time":1.5}'.encode(),
    b'{"prompt":"a \\"b\\": \\ud83d\\ude00 \\\\","ignore_eos":true,"priority":-1,"id":null}',
    b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x","n":1}}',
    b'{"prompt":"x","temperature":0.5,"logit_bias":{"5":1,"6":-1.5},"n":2,"top_k":null}',
    b'{"prompt":"x","states":{"a":[{"on":"x","to":"b"},{"on":[5],"to":null}],"b":[]}}',
    b'{"prompt":[{"text":"x","pin":true},{"length":5,"seed":"a"},{"tokens":[5],"type":"user"}]}',
    b'{"prompt":"x","session":"s","think_time":2,"deadline":5.5,"cache_salt":"y"}',
    b'{"prompt":"x","json_schema":{"type":"object","properties":{"id":{"type":"string"}}}}',
]
BITS = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-1", b"1e999", b"NaN"]
BITS += [b'"prompt":""', b'"id":"z"', b'"on":5', b'"text":"a",', b'"length":1', b"5,", b'"5":1,']
BITS += [b"\xff", b"\xc3", b"\x00", b"\n", b" ", b"\\ud800", b"9" * 400]


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
        assert find_problems(parsed.request, CAPABILITIES) == []
        assert isinstance(parsed.request.id, str)
        # The fast way accepts what the thorough way accepts, as the same request.
        assert read_line(line, 413, CAPABILITIES) == (parsed.request, parsed.form)
        # Read again, without any checks, it still is.
        assert AGAIN.parse_again(line, 413, crc32(line)) == parsed
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


@examples(500)
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
MEMBERS = st.tuples(st.sampled_from(FIELDS), NESTED)
# More often than by chance, numbers where numbers belong, and a prompt.
NUMBERS = st.tuples(
    st.sampled_from([*RANGES, "heal", "echo", "early_stopping"]),
    st.sampled_from([None, 0, 1, 2, 0.5, -1, False, True]),
)
PROMPTS = st.tuples(st.just("prompt"), st.sampled_from(["", "a", [1]]))
OBJECTS = st.one_of(
    st.lists(MEMBERS, max_size=5),
    st.tuples(PROMPTS, st.lists(st.one_of(MEMBERS, NUMBERS), max_size=3)).map(
        lambda pair: [pair[0], *pair[1]]
    ),
)


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
    "max_tokens": lambda v: v is None or is_int(v, 0),
    "stop_token": lambda v: v is None or v == [] or is_id(v) or is_list_of(v, is_id),
    "stop_sequence": lambda v: (
        v is None
        or v == []
        or is_text(v)
        or is_list_of(v, is_id)
        or is_list_of(v, is_text)
        or is_list_of(v, lambda item: is_list_of(item, is_id))
    ),
    "stop": lambda v: v is None or v == [] or is_text(v) or is_list_of(v, is_text),
    "ignore_eos": lambda v: v is None or type(v) is bool,
    "arrival_time": lambda v: v is None or (type(v) in (int, float) and 0 <= v <= MAX_TIME),
    "priority": lambda v: v is None or is_int(v, -MAX_INT),
}


def is_number(name):
    """The rule of a number: null, or in its range."""
    allowed = RANGES[name]
    types = (int,) if allowed.is_integer else (int, float)
    return lambda v: (
        v is None
        or (
            type(v) in types
            and allowed.smallest <= v <= allowed.largest
            and not (allowed.is_open and v == allowed.smallest)
        )
    )


RULES |= {name: is_number(name) for name in RANGES if name not in RULES}
RULES |= {
    "logit_bias": lambda v: v is None or v == {},
    "allowed_token_ids": lambda v: v is None or is_list_of(v, is_id),
    "bad_words": lambda v: v is None or v == [] or is_list_of(v, is_text),
    "negative_prompt": lambda v: v is None or RULES["prompt"](v),
    "logprobs_mode": lambda v: v is None,
    "echo": lambda v: v is None or type(v) is bool,
    "include_stop_str_in_output": lambda v: v is None or type(v) is bool,
    "early_stopping": lambda v: v is None or type(v) is bool,
    "json_schema": lambda v: v is None or type(v) is bool or v == {},
    "regex": lambda v: v is None or type(v) is str,
    "choice": lambda v: v is None or is_list_of(v, lambda item: type(item) is str),
    "lark": lambda v: v is None or is_text(v),
    "gbnf": lambda v: v is None or is_text(v),
    "heal": lambda v: v is None or type(v) is bool,
    "states": lambda v: v is None,
    "initial_state": lambda v: v is None,
    "speculate": lambda v: v is None or type(v) is bool,
    "session": lambda v: v is None or is_text(v),
    "cache_salt": lambda v: v is None or is_text(v),
    "extra_body": lambda v: v is None or v == {},  # any other object is for servers
}
CONSTRAINTS = ("json_schema", "regex", "choice", "lark", "gbnf")
CUTS = ("top_p", "min_p", "typical_p")


def is_contradiction(r):
    """Whether a request, each of whose fields is right by itself, contradicts itself."""
    constraints = [name for name in CONSTRAINTS if getattr(r, name) is not None]
    many = max(r.n, r.best_of or 1) > 1
    is_changed = {name: getattr(r, name) != f.default for name, f in REQUEST_FIELDS.items()}
    return (
        (r.num_beams > 1 and (r.temperature != 0 or r.mirostat or r.best_of is not None))
        or (r.num_beams > 1 and (is_changed["cfg_scale"] or r.n > r.num_beams))
        or (r.num_beams == 1 and (is_changed["length_penalty"] or is_changed["early_stopping"]))
        or (r.num_beams == 1 and r.temperature == 0 and (many or r.mirostat))
        or (r.best_of is not None and r.best_of < r.n)
        or (r.mirostat and (r.top_k > 0 or any(is_changed[name] for name in CUTS)))
        or (not r.mirostat and (is_changed["mirostat_tau"] or is_changed["mirostat_eta"]))
        or r.min_tokens > r.output_limit
        or (r.negative_prompt is not None and not is_changed["cfg_scale"])
        or len(constraints) > 1
        or (constraints and (r.ignore_eos or r.heal))
        or (r.heal and not r.prompt)
        or (r.prompt_logprobs is not None and (r.heal or r.session is not None))
        or (r.session is None and r.think_time != 0)
        or (r.session is not None and (r.n > 1 or r.best_of is not None or r.num_beams > 1))
        or (r.session is not None and (is_changed["cfg_scale"] or r.heal))
        or (r.deadline is not None and r.deadline < r.arrival_time)
    )


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
    request = Request(**{name: value for name, value in fields.items() if value is not None})
    return None if is_contradiction(request) else request


@examples(500)
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
        assert parsed == ParsedLine(expected, form="result")
        assert type(parsed.request.arrival_time) is float
        assert type(parsed.request.temperature) is float


def test_the_plain_rules_leave_out_only_the_length_of_stops():
    line = json.dumps({"prompt": "", "stop": "x" * (MAX_STOP_LENGTH + 1)}).encode()
    assert isinstance(PARSER.parse(line, 1), BadLine)
