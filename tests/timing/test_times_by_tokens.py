"""The tokens of a step as they were measured, in place of two terms."""

from fractions import Fraction
from itertools import pairwise
from math import floor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing.test_step_times import POINTS

from batcher.timing.catalog import CatalogError
from batcher.timing.formulas import ProfileStepTime
from batcher.timing.profiles import TERMS, load_profile

TEXT = "{t0: 1, w: 2, f: 0.1, g: 0, d: 1.0e-4, h: 0, e: 0, by_tokens: %s}"

MILLISECONDS = st.decimals(0, 50, places=6).map(float)


@given(POINTS, MILLISECONDS, MILLISECONDS, st.integers(1, 500))
def test_it_is_its_definition_rounded_down_to_a_tick(points, w, f, num_tokens):
    step_time = ProfileStepTime("test", dict.fromkeys(TERMS, 0.0) | {"w": w, "f": f}, points)
    path = [(0, Fraction(repr(w))), *((place, Fraction(repr(ms))) for place, ms in points)]
    expected = path[-1][1] + Fraction(repr(f)) * (num_tokens - path[-1][0])
    for (left, low), (right, high) in pairwise(path):
        if left <= num_tokens < right:
            expected = low + (high - low) * (num_tokens - left) / (right - left)
    if not points:
        expected = max(path[0][1], Fraction(repr(f)) * num_tokens)
    assert step_time.ticks(num_tokens, 1, 0, 0) == floor(expected * 10**12)


def test_a_file_may_have_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT % "[[16, 3], [32, 5.0]]")
    profile = load_profile(str(path))[1]
    assert profile.by_tokens == ((16, 3.0), (32, 5.0))
    assert profile.step_time("mine").ticks(24, 24, 0, 0) == 5 * 10**12


EXPECTED = "by_tokens: expected pairs of a whole number of at least 1 and a number from 1e-9 to 1e9"


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("3", f"mine.yaml: profile mine: {EXPECTED}, like .*, not 3"),
        ("null", f"{EXPECTED}, like .*, not None"),
        ("[[1, 2], [0, 3]]", rf"{EXPECTED}, like .*, not \[0, 3\]"),
        ("[[1, 2], [2, .inf]]", rf"{EXPECTED}, like .*, not \[2, inf\]"),
        ("[[1, 2], [2.5, 3]]", rf"{EXPECTED}, like .*, not \[2.5, 3\]"),
        ("[[1, 2, 3]]", rf"{EXPECTED}, like .*, not \[1, 2, 3\]"),
        ("[[8, 2], [4, 3]]", "by_tokens: 4 comes after 8: expected tokens that ascend"),
    ],
)
def test_what_is_wrong_with_it_is_said(tmp_path: Path, points: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT % points)
    with pytest.raises(CatalogError, match=message):
        load_profile(str(path))
