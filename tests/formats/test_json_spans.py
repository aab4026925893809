"""Places in lines of JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.requests.json_spans import (
    JsonError,
    TextSpan,
    find_doubles,
    find_value,
    parse,
    read_distinct,
)

# (the text, the code, the marked part of the text, a word of the message); "^" stands for the end
SYNTAX = [
    ("", "invalid-json", 0, "ends before"),
    ('{"a":1', "invalid-json", 6, "ends before"),
    ('{"a":1} x', "invalid-json", 8, "extra data"),
    ('{"a":1,}', "invalid-json", 6, "before the closing bracket"),
    ('{"a":1 , }', "invalid-json", 7, "before the closing bracket"),
    ('{"a":01}', "invalid-json", 6, "delimiter"),
    ('{"a":"x}', "invalid-json", 5, "unterminated string"),
    ('{"a":"\x01"}', "invalid-json", 6, "control character"),
    ('{"a":"\\x"}', "invalid-json", 6, "escape"),
    ("{'a':1}", "invalid-json", 1, "not single ones"),
    ('{"é":tru}', "invalid-json", 5, "value"),
    ('{"NaN":"NaN","a":[NaN]}', "invalid-json", 18, "NaN"),
    ('{"a":-Infinity}', "invalid-json", 5, "-Infinity"),
    ('{"a":' * 100_000, "invalid-json", 0, "deep"),
    (r'{"a":"\ud83d\ude00 \ud83d"}', "invalid-text", 19, "lone surrogate"),
    (r'{"a":"\\ud800 \ude00"}', "invalid-text", 14, "lone surrogate"),
    (r'{"\ud800":1}', "invalid-text", 2, "lone surrogate"),
]


@pytest.mark.parametrize(
    ("text", "code", "start", "word"), SYNTAX, ids=lambda value: str(value)[:24]
)
def test_a_syntax_error_has_its_place(text, code, start, word):
    with pytest.raises(JsonError) as caught:
        parse(text)
    assert caught.value.code == code
    assert word in caught.value.message
    if start is not None:
        assert caught.value.span.start == start


@pytest.mark.parametrize("sign", ["", "-"])
def test_an_integer_is_exact_or_refused_with_its_place(sign):
    for num_digits in (400, 401, 402, 4300):
        assert parse(f'{{"a":{sign}{"7" * num_digits}}}') == {"a": int(sign + "7" * num_digits)}
    with pytest.raises(JsonError, match="4,301 digits; at most 4,300") as caught:
        parse(f'{{"{"7" * 9000}":"{"7" * 9000}","b":{sign}{"7" * 4301}}}')
    assert caught.value.span == (18011, 18011 + len(sign) + 4301)


def test_a_path_that_ends_early_leads_to_the_last_value_on_the_way():
    text = '{"a":[1,[2]],"b":5}'
    assert find_value(text, ("c",)) == TextSpan(0, len(text))
    assert text[slice(*find_value(text, ("a", 7)))] == "[1,[2]]"
    assert text[slice(*find_value(text, ("b", 0)))] == "5"
    assert text[slice(*find_value(text, ("b", "x")))] == "5"


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.text(),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=12,
)


def paths_of(value, path=()):
    yield path, value
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from paths_of(inner, (*path, key))


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_the_text_at_a_path_is_the_value_there(value, ensure_ascii, indent):
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    assert parse(text) == value
    for path, inner in paths_of(value):
        assert json.loads(text[slice(*find_value(text, path))]) == inner


def test_names_given_twice_are_found_at_any_depth():
    text = '{"a": [1, {"b": 2, "c": {"d": 3, "d": [{"e": 1, "e": 2}]}}], "b": 4, "a": 5, "a": 6}'
    found = {(path, text[slice(*key)], first.start) for path, key, first in find_doubles(text)}
    assert found == {
        (("a",), '"a"', 1),
        (("a", 1, "c", "d"), '"d"', 25),
        (("a", 1, "c", "d", 0, "e"), '"e"', 40),
    }
    assert sum(1 for _ in find_doubles(text)) == 4


def test_an_array_as_deep_as_can_be_parsed_is_searched():
    depth = 300
    text = "[" * depth + '{"a":1,"a":2}' + "]" * depth
    ((path, _, _),) = find_doubles(text)
    assert path == (0,) * depth + ("a",)


MEMBERS = st.recursive(
    st.integers(0, 9).map(str),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=3).map(
            lambda pairs: "{" + ", ".join(f'"{key}": {value}' for key, value in pairs) + "}"
        ),
    ),
    max_leaves=8,
)


@given(MEMBERS)
def test_a_text_is_distinct_if_no_doubles_are_found(text):
    found = list(find_doubles(text))
    if found:
        with pytest.raises(ValueError, match=r"^$"):
            read_distinct(text)
    else:
        assert read_distinct(text) == json.loads(text, parse_int=len)
