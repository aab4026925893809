"""The second look at an output agrees with definitions that know nothing of llguidance."""

import itertools
import json
import re

import pytest
from constrained import compiler, source

from batcher.decoding.constraints import Verifier

REGEXES = ["(ab|a)*c?", "a{2,3}b|", "[^a]b+|a", "a.*c", "(a|b(c|a)?){1,2}", "é+a?"]


def strings(alphabet, max_length):
    """Every string over an alphabet up to a length."""
    for length in range(max_length + 1):
        yield from map("".join, itertools.product(alphabet, repeat=length))


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regex_has_to_match_the_whole_output(regex):
    verifier = Verifier(source("regex", regex))
    for text in strings("abcé", 5):
        keeps = verifier.broken_by(text.encode()) is None
        assert keeps == bool(re.fullmatch(regex, text)), text


@pytest.mark.parametrize("regex", REGEXES[:5])
def test_an_output_that_was_cut_off_has_to_begin_a_match(regex):
    verifier = Verifier(source("regex", regex))
    whole = [text for text in strings("abc", 7) if re.fullmatch(regex, text)]
    begun = {text[:length] for text in whole for length in range(len(text) + 1)}
    for text in strings("abc", 4):
        assert (verifier.broken_by_prefix(text.encode()) is None) == (text in begun), text


@pytest.mark.parametrize(
    ("kind", "constraint", "output", "problem"),
    [
        ("choice", ["yes", "no"], b"yes", None),
        ("choice", ["yes", "no"], b"ye", "'ye' is none of the choices"),
        ("choice", ["yes"], b"yes, indeed, and that is so", "'yes, indeed, and tha…' is none of"),
        ("regex", "a+", b"", "byte 0: the output ends too early"),
        ("regex", "a+", b"aab", "byte 2: 'b' cannot stand there"),
        ("regex", "é", b"\xc3", "byte 1: the output ends too early"),
        ("regex", "é", b"\xc3\xa8", "byte 1: '\ufffd' cannot stand there"),
        ("json_schema", {"type": "integer"}, b"12", None),
        ("json_schema", {"type": "integer"}, b"1" * 5000, None),
        ("json_schema", {"type": "integer"}, b"012", "byte 1: '12' cannot stand there"),
        ("json_schema", {"type": "integer", "maximum": 5}, b"6", "byte 0: '6' cannot stand there"),
        ("json_schema", True, b'{"a":[1', "byte 7: the output ends too early"),
        ("json_schema", {"const": {"a": 1}}, b'{"a": 1}', "byte 5: ' 1}' cannot stand there"),
        ("lark", 'start: "(" start ")" | "x"', b"((x))", None),
        ("lark", 'start: "(" start ")" | "x"', b"((x)", "byte 4: the output ends too early"),
        ("gbnf", 'root ::= "(" root ")" | "x"', b"((y))", "byte 2: 'y))' cannot stand there"),
    ],
)
def test_what_breaks_a_finished_output_is_told(kind, constraint, output, problem):
    told = Verifier(source(kind, constraint)).broken_by(output)
    assert told == problem or (problem and told.startswith(problem))


@pytest.mark.parametrize(
    ("kind", "constraint", "output", "keeps"),
    [
        ("choice", ["yes", "no"], b"", True),
        ("choice", ["yes", "no"], b"ye", True),
        ("choice", ["yes", "no"], b"yes", True),
        ("choice", ["yes", "no"], b"yo", False),
        ("choice", ["é"], b"\xc3", True),
        ("json_schema", True, b'{"a":[1', True),
        ("json_schema", True, b'{"a":]', False),
        ("json_schema", {"type": "string"}, b'"\xe2\x82', True),  # cut inside a character
        ("json_schema", {"type": "string"}, b'"\xff', False),
    ],
)
def test_an_output_that_was_cut_off_has_to_be_a_beginning(kind, constraint, output, keeps):
    assert (Verifier(source(kind, constraint)).broken_by_prefix(output) is None) == keeps


def test_json_is_read_again_by_the_json_module():
    schema = {"type": "array", "items": {"const": 1}, "x-guidance": {"item_separator": ";"}}
    verifier = Verifier(source("json_schema", schema))
    assert verifier.broken_by(b"[1]") is None
    assert verifier.broken_by(b"[1;1]").startswith("not JSON that can be read: Expecting ','")


def test_a_compiled_constraint_brings_its_verifier():
    constraint = compiler().compile(source("choice", ["a"]))
    assert constraint.verifier.broken_by(b"a") is None
    assert constraint.verifier.broken_by(b"b") is not None
    assert json.loads(constraint.source.text) == ["a"]
