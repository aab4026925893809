"""Text in terminal cells."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.screen.terminal import cell_width, cut_middle, cut_path, pad, printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("req-1", "req-1"),
        ("日本語 é", "日本語 é"),
        ("a\x1b[31m\nb", r"a\x1b[31m\nb"),
        ("\u202eabc", r"\u202eabc"),  # would turn the line around
        ("\x9b2J", r"\x9b2J"),  # a control sequence in one character
        ("\ud800", r"\ud800"),
    ],
)
def test_what_could_move_the_cursor_is_escaped(text, expected):
    assert printable(text) == expected


def test_all_but_ascii_is_escaped_where_only_ascii_prints():
    assert printable("é-1", ascii_only=True) == r"\xe9-1"


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("request-17", 10, "request-17"),
        ("request-17", 7, "req~-17"),
        ("request-17", 1, "~"),
        ("日本語-17", 9, "日本語-17"),
        (r"\x1b-\u30c8-17", 11, r"\x1b-~-17"),
        (r"\u30c8-\u30c8\u30c8\u30c8", 14, r"\u30c8-~\u30c8"),
        (r"\U0001f600abc", 12, "~abc"),
        ("日本語-17", 7, "日~-17"),
    ],
)
def test_a_long_name_keeps_both_ends(text, width, expected):
    assert cut_middle(text, width, "~") == expected


@given(st.text(), st.integers(1, 12))
def test_a_padded_cell_is_as_wide_as_its_column(text, width):
    assert cell_width(pad(cut_middle(printable(text), width, "…"), width)) == width


@pytest.mark.parametrize(
    ("path", "width", "expected"),
    [
        ("a/fleet.yaml", 12, "a/fleet.yaml"),
        ("a/fleet.yaml", 11, "~fleet.yaml"),
        ("a/\u65e5\u672c.yaml", 9, "~\u672c.yaml"),
        ("a/fleet.yaml", 1, "~"),
    ],
)
def test_of_a_path_the_end_is_kept(path, width, expected):
    assert cut_path(path, width, "~") == expected
    assert cell_width(expected) <= width
