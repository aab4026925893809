"""The check of whole outputs refutes wrong ones, and no others, without llguidance."""

import itertools
import json
import re
import sys
import time

import pytest
from constrained import language, source

from batcher.decoding.verification import UNDECIDED, JsonCheck, Look, Verifier, regex_test

REGEXES = ["(ab|a)*c?", "a{2,3}b|", "[^a]b+|a", "a.*c", "(a|b(c|a)?){1,2}", "é+a?", r"^a\w|\Sb$"]
PATTERN = r"^(?:\S+\s+){0,29}\S+$"  # more states than llguidance has for single bytes


def strings(alphabet, max_length):
    """Every string over an alphabet up to a length."""
    for length in range(max_length + 1):
        yield from map("".join, itertools.product(alphabet, repeat=length))


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regex_has_to_match_the_whole_output(regex):
    verifier = Verifier(source("regex", regex))
    for text in strings("abcé", 5):
        keeps = verifier.look(text.encode()) == Look(problem=None)
        assert keeps == bool(re.fullmatch(regex, text, re.ASCII)), text


@pytest.mark.parametrize(
    ("kind", "constraint", "output", "problem"),
    [
        ("choice", ["yes", "no"], b"yes", None),
        ("choice", ["yes", "no"], b"ye", "'ye' is not one of the choices"),
        ("choice", ["yes"], b"yes, indeed, and that is so", "'yes, indeed, and tha…' is not one"),
        ("regex", "a+", b"", "'' does not match"),
        ("regex", "a+", b"aab", "'aab' does not match"),
        ("regex", "é", b"\xc3", "'\ufffd' does not match"),
        ("json_schema", {"type": "string", "pattern": PATTERN}, '"one two é"'.encode(), None),
        ("json_schema", {"type": "string", "pattern": PATTERN}, b'" one"', "`$` violates `pa"),
        ("json_schema", {"type": "string", "pattern": "b"}, b'"abc"', None),  # found anywhere
        ("json_schema", {"type": "integer"}, b"12", None),
        ("json_schema", {"type": "integer"}, b"1" * 5000, None),
        ("json_schema", {"type": "integer"}, b"012", "not valid JSON: Extra data"),
        ("json_schema", {"type": "integer", "maximum": 5}, b"6", "`$` violates `maximum`"),
        ("json_schema", True, b'{"a":[1', "not valid JSON: Expecting ',' delimiter"),
        ("json_schema", True, b"NaN", "not valid JSON: NaN is not JSON"),
        ("json_schema", True, b"\xff", "not valid JSON: 'utf-8' codec"),
        ("json_schema", {"minProperties": 2}, b'{"a":1,"a":2}', "`$` violates `minProp"),
        ("json_schema", {"const": {"a": 0.1}}, b'{"a":0.1}', None),
        ("json_schema", {"const": {"a": 1}}, b'{"a":true}', "`$` violates `const`"),
        ("json_schema", {"items": {"maxLength": 1}}, b'["a","bc"]', "`$[1]` violates `maxL"),
        ("json_schema", {"items": [{"type": "null"}], "additionalItems": False}, b"[null]", None),
        ("json_schema", {"items": [{"type": "null"}]}, b"[3]", "`$[0]` violates `type`"),
        ("json_schema", {"items": [True], "additionalItems": False}, b"[3,4]", "`$` violates `add"),
        ("json_schema", {"dependencies": {"a": ["b"]}}, b'{"a":1}', "`$` violates `dependenc"),
        (
            "json_schema",
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "properties": {"n": {"type": "integer", "pattern": "(x+x+)+y"}, "a": {"$ref": "#"}},
            },
            b'{"a":{"n":2,"a":{"n":3.5}}}',
            "`$.a.a.n` violates `type` of",  # that is, the first `n` is an integer
        ),
        ("json_schema", {"multipleOf": 0.1}, b"0.3", None),  # in floats it is none
        ("json_schema", {"multipleOf": 0.1}, b"0.35", "`$` violates `multipleOf`"),
        ("json_schema", {"patternProperties": {"^a": {"type": "null"}}}, b'{"ab":1}', "`$.ab` vio"),
        (
            "json_schema",
            {"patternProperties": {"^a": True}, "additionalProperties": False},
            b'{"a":1,"b":2}',
            "`$` has a value that the schema does not allow",
        ),
    ],
    ids=str,
)
def test_what_breaks_a_finished_output_is_told(kind, constraint, output, problem):
    look = Verifier(source(kind, constraint)).look(output)
    assert look.is_decided
    assert look.problem == problem or (problem and look.problem.startswith(problem))


@pytest.mark.parametrize(
    ("kind", "constraint", "output"),
    [
        ("lark", 'start: "x"', b"y"),
        ("gbnf", 'root ::= "x"', b"y"),
        ("regex", "a++", b"y"),
        ("json_schema", {"pattern": "a++"}, b'"y"'),
        ("json_schema", {"maxProperties": 1}, b'{"a":1,"a":2}'),
        ("json_schema", {"$schema": "https://example.org/my-own"}, b"1"),
        ("json_schema", {"$ref": "https://example.org/elsewhere"}, b"1"),
        ("json_schema", {"multipleOf": 7}, b"1e9999999"),
        ("json_schema", {"minLength": "x"}, b'"y"'),  # a schema that is none
        ("json_schema", True, b"[" * 100_000 + b"]" * 100_000),
        ("json_schema", True, b"1e99999999999999999999"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_where_nothing_independent_can_tell_the_look_says_so(kind, constraint, output):
    assert Verifier(source(kind, constraint)).look(output) == UNDECIDED


@pytest.mark.heavy
def test_a_check_that_leads_nowhere_is_given_up():
    """Each level of the output is looked at twice for each look at the one around it."""
    branch = {"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["b"]}
    schema = {"$defs": {"n": {"anyOf": [branch, branch]}}, "$ref": "#/$defs/n"}
    output = b'{"a":' * 40 + b"{}" + b"}" * 40
    assert Verifier(source("json_schema", schema)).look(output) == UNDECIDED


def test_nothing_of_the_look_comes_from_what_made_the_output(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for kind, constraint in (("regex", "a"), ("choice", ["a"]), ("json_schema", {"const": "a"})):
        output = b'"a"' if kind == "json_schema" else b"a"
        assert Verifier(source(kind, constraint)).look(output) == Look(problem=None)
        assert Verifier(source(kind, constraint)).look(b"b").problem is not None


@pytest.mark.parametrize("dialect", ["", "http://json-schema.org/draft-07/schema#"])
def test_every_dialect_is_read_as_its_own(dialect):
    schema = '{"$ref": "#/x", "type": "string", "x": {"type": "integer"}}'
    if dialect:  # in which what stands beside a reference does not count
        schema = schema.replace("{", f'{{"$schema": "{dialect}", ', 1)
    assert (JsonCheck(schema).look(b"1").problem is None) == bool(dialect)


CHARACTERS = "37\u0663aé\u017f\u212a_- \t\n\v\f\r\x1c\x85\xa0\u180e\u2028\ufeff中"


@pytest.mark.parametrize(
    "regex",
    [
        r"\d",
        r"\D",
        r"\w",
        r"\W",
        r"\s",
        r"\S",
        r"[\d-]",
        r"[^\w]",
        r"[^\s\d]",
        r"[\D\S]",
        r"[^\S]",
        r"[a\-c-e\]]",
        r"\x41|\/|\t",
        ".",
        r"(?i:\S)",
        r"\p{Lu}|\S\d",
        r"[\d\n/\/]",
    ],
)
def test_a_regex_means_the_same_to_masks_and_to_the_check(regex):
    is_whole = language("regex", regex)
    for character in CHARACTERS:
        look = Verifier(source("regex", regex)).look(character.encode())
        assert look.is_decided
        assert (look.problem is None) == is_whole(character.encode())


@pytest.mark.parametrize("kind", ["regex", "json_schema"])
@pytest.mark.parametrize(
    ("inside", "kept", "others"),
    [
        (r"+-\d", "+-07", ",.[]A:"),
        (r".-\w", ".-a_9", "/[]:"),
        (r"\d-z", "7-z", "a[]:"),
        (r"\w-\s", "a- ", ".[]"),
        (r"\[-\d", "[-3", "]Za"),
    ],
)
def test_a_dash_beside_a_class_is_a_dash(kind, inside, kept, others):
    regex = f"^[{inside}]$"
    stated = {"type": "string", "pattern": regex} if kind == "json_schema" else regex[1:-1]
    is_whole = language(kind, stated)
    for character in kept + others:
        output = json.dumps(character).encode() if kind == "json_schema" else character.encode()
        assert is_whole(output) == (character in kept)
        look = Verifier(source(kind, stated)).look(output)
        assert look.is_decided
        assert (look.problem is None) == (character in kept)


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        (r"^\s$", " \n\v\x85\xa0\u2028", "aé\ufeff"),
        (r"^\S$", "aé\ufeff", " \n\t\x85\xa0"),
        (r"^[^\s-]$", "a", "\xa0-"),
        (r"^a$", ["a"], ["a\n"]),
        (r"^\d$", "7", "a \u0663"),
        (r"^\w$", "a_", " -é"),
        (r"^[^\s\d]$", "aé", " 7"),
        (r"^(\x41|\u0042|\/|\t)$", "AB/\t", "D"),
    ],
)
def test_a_pattern_has_the_spaces_of_unicode_and_the_digits_of_ascii(pattern, texts, others):
    test = regex_test(pattern)
    assert all(map(test, texts))
    assert not any(map(test, others))
    is_whole = language("json_schema", {"type": "string", "pattern": pattern})
    assert not any(is_whole(json.dumps(text).encode()) for text in others)


DOUBTFUL = ["a++", "a{2}+", "[^]", "(a", "a)", "\\"]


@pytest.mark.parametrize("regex", DOUBTFUL)
def test_an_expression_of_doubtful_meaning_is_not_read(regex):
    assert regex_test(regex, is_whole=True) is regex_test(regex) is None


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("^(?!con$)[a-z]+$", ["a", "cons"], ["con", "A", ""]),
        (r"\bfoo\b", ["a foo", "foo"], ["food"]),
        ("^(?=.{1,255}$)(a{1,63}[.]){0,127}$", ["a.aa."], ["a", "a.b"]),
        (r"^(a|b)\1$", ["aa", "bb"], ["ab"]),
        ("(?<=a)b", ["ab"], ["b"]),
    ],
)
def test_a_pattern_that_no_mask_keeps_is_read_for_a_second(pattern, texts, others):
    assert all(map(regex_test(pattern), texts))
    assert not any(map(regex_test(pattern), others))


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a{1000000000})",
        "((a{1000}){1000,})(?=b)",
        "(?=b)" + "a?" * 5000,
        "(?=b)" + "(" * 2000 + ")" * 2000,
    ],
)
def test_a_pattern_that_would_take_too_much_to_compile_is_not_read(pattern):
    began = time.perf_counter()
    assert regex_test(pattern) is None
    assert time.perf_counter() - began < 1


@pytest.mark.heavy
def test_a_pattern_that_takes_longer_is_not_decided():
    schema = {"pattern": r"^(.+)(.+)(.+)(.+)\4\3\2\1x$"}
    output = b'"%bx"' % (b"abcdefgh" * 60)
    assert Verifier(source("json_schema", schema)).look(output) == UNDECIDED


@pytest.mark.parametrize(
    ("output", "can_begin"), [(b"", True), (b"ye", True), (b"\xc3", True), (b"yo", False)]
)
def test_a_choice_that_was_cut_off_has_to_be_a_beginning(output, can_begin):
    assert Verifier(source("choice", ["yes", "é"])).can_begin(output) == can_begin
