"""How a problem is shown: ruff's layout, whatever the line holds."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import FieldProblem
from batcher.requests.json_spans import TextSpan
from batcher.requests.problems import CONTEXT, make_problem, printable, render_problem


def show(text, start, end, *, width=80, line=413, hint=None, message="m", color=False):
    fault = FieldProblem("unknown-field", ("promt",), message, hint)
    problem = make_problem(fault, line, text, TextSpan(start, end))
    return render_problem(problem, filename="requests.jsonl", width=width, color=color)


def columns(text):
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.category(character) == "Mn" for character in text)


def character_at(text, column):
    return next(c for i, c in enumerate(text) if columns(text[: i + 1]) > column)


def test_the_layout_is_ruffs():
    text = '{"custom_id":"a","promt":"x"}'
    shown = show(text, 17, 24, message="unknown field `promt`", hint="did you mean `prompt`?")
    assert shown == (
        "error[unknown-field]: unknown field `promt`\n"
        "   --> requests.jsonl:413:18\n"
        "    |\n"
        '413 | {"custom_id":"a","promt":"x"}\n'
        "    |                  ^^^^^^^\n"
        "    = help: did you mean `prompt`?\n"
    )


# (the text, the marked characters, what is shown, the carets)
LINES = [
    ("abc", (3, 3), "abc", "   ^"),
    ("", (0, 0), "", "^"),
    ("漢字=x", (0, 2), "漢字=x", "^^^^"),
    ("\U0001f600x", (1, 2), "\U0001f600x", "  ^"),
    ("e\u0301x", (2, 3), "e\u0301x", " ^"),
    ("a\tb", (2, 3), "a␉b", "  ^"),
    ("\x1b[31mb", (5, 6), "␛[31mb", "     ^"),
    ("\x7fb\x9b", (1, 3), "<U+007F>b<U+009B>", "        ^^^^^^^^^"),
    ("a\u202eb", (2, 3), "a<U+202E>b", "         ^"),
    ("❤\ufe0fx", (2, 3), "❤x", " ^"),
]


@pytest.mark.parametrize(("text", "marked", "source", "carets"), LINES, ids=ascii)
def test_the_caret_stands_below_its_character(text, marked, source, carets):
    lines = show(text, *marked).split("\n")
    assert lines[3:5] == [f"413 | {source}", f"    | {carets}"]


def test_a_long_line_is_cut_before_the_fault_first():
    text = "x" * 200 + '"max_tokens":"12"}'
    lines = show(text, 213, 217, width=40).splitlines()
    assert lines[3] == "413 | " + "…" + ("x" * 200 + '"max_tokens":"12"}')[-31:]
    assert lines[4].strip(" |") == "^^^^"
    assert lines[3][lines[4].index("^") :] == '"12"}'


def test_a_fault_longer_than_the_terminal_is_marked_as_far_as_it_is_seen():
    lines = show("x" * 500, 100, 400, width=40).splitlines()
    assert lines[3].startswith("413 | …x")
    assert lines[3].endswith("x…")
    assert lines[4].count("^") == lines[3].count("x")


def test_little_of_a_huge_line_is_kept():
    problem = make_problem(
        FieldProblem("c", (), "m"), 1, "x" * 10**7, TextSpan(5 * 10**6, 9 * 10**6)
    )
    assert len(problem.source) <= 3 * CONTEXT + 2
    assert problem.column == 5 * 10**6 + 1
    assert problem.width == 4 * 10**6
    assert problem.source_start + len("…") == 5 * 10**6 + 1 - CONTEXT


def test_colour_adds_escapes_and_nothing_else():
    plain, coloured = (show("abc", 1, 2, hint="h", color=color) for color in (False, True))
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    assert coloured.startswith("\x1b[1;31merror")


def test_nothing_in_message_hint_or_name_reaches_the_terminal_raw():
    shown = show("a", 0, 1, message="\x1b]0;x\x07\nnext", hint="\x1b[2J")
    assert "\x1b" not in shown
    assert "␊next" in shown
    assert printable("\u202e") == "<U+202E>"


@given(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=300),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(10, 120),
)
def test_any_line_fits_and_its_carets_stand_below_the_fault(text, start, length, width):
    text = text.replace("\r", "").replace("\n", "")
    start = min(start, len(text))
    _, _, _, source, marks, *_ = show(text, start, start + length, width=width).split("\n")
    assert columns(source) <= max(width, 26)
    assert columns(marks) <= max(width, 26)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", source)
    assert set(marks[6:].lstrip()) == {"^"}
    if start < len(text) and columns(text[start]) > 0:
        first_caret = len(marks) - marks.count("^")
        assert character_at(source, first_caret) == printable(text[start])[0]
