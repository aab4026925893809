"""Profiles: those that are shipped, those in a user's file, and what is wrong with a file."""

from pathlib import Path

import pytest

from batcher.timing.catalog import CatalogError
from batcher.timing.profiles import (
    TERMS,
    KvRoom,
    load_profile,
    read_profiles,
    setup_of,
    shipped_profiles,
    step_time_of,
)

GOOD = "t0: 1.0\nw: 2\nf: 0.1\ng: 0\nd: 1.0e-4\nh: 0\ne: 5e-6\n"
REST = "w: 0, f: 0, g: 0, d: 0, h: 0, e: 0}\n"
NAMED = f"fast: {{t0: 1, {REST}slow: {{t0: 9, {REST}"


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_sixteen_are_shipped_with_source_and_error() -> None:
    profiles = shipped_profiles()
    assert len(profiles) == 16
    for profile in profiles.values():
        assert profile.hardware
        assert profile.model
        assert "not stated" not in (profile.error, profile.source)
    assert profiles["rtx4090_llama3.1-8b"].kv_tokens == 41408
    assert profiles["rtx4090_llama3.1-8b"].terms == {
        "t0": 1.686, "w": 15.22, "f": 0.08812, "g": 0.008456,
        "d": 1.43e-4, "h": 2.587e-4, "e": 4.781e-6,
    }  # fmt: skip
    assert profiles["h100_llama3.1-70b_tp8"].tensor_parallel == 8


def test_two_published_forms_of_a_profile_are_one() -> None:
    # decoding a + g*n + d*kv and prompts p0 + b*P + q*P*P, with a 6.355, p0 3.363, b 0.01844,
    # q 6.824e-7: at least a where prompts are short
    step_time = step_time_of("h100_llama3.1-8b_tp1")
    g = 0.01088
    assert step_time.ticks(4, 4, 1000, 0) == round((6.355 + 4 * g + 4.287e-5 * 1000) * 10**12)
    for tokens in (8, 4096):
        expected = max(6.355, 3.363 + 0.01844 * tokens) + g + 6.824e-7 * tokens * tokens
        assert step_time.ticks(tokens, 1, 0, tokens * tokens) == round(expected * 10**12)


def test_a_file_holds_one_profile_or_named_ones(tmp_path: Path) -> None:
    name, alone = load_profile(written(tmp_path, GOOD))
    assert (name, alone.e, alone.error) == ("mine", 5e-6, "not stated")
    path = written(tmp_path, NAMED)
    assert load_profile(f"{path}:slow")[1].t0 == 9
    assert list(read_profiles(path)) == ["fast", "slow"]
    with pytest.raises(CatalogError, match=r"has 2 profiles: .*mine.yaml:NAME; known: fast, slow"):
        load_profile(path)
    with pytest.raises(CatalogError, match=r"mine.yaml: slo \(did you mean slow\?\)"):
        load_profile(f"{path}:slo")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("e: 5e-6\n", ""), "profile mine: e missing; needed are t0, w, f, g, d, h, e"),
        (GOOD.replace("w: 2", "w: -2"), "profile mine: w: expected a number from 0 to 1e9, not -2"),
        (GOOD.replace("w: 2", "w: .nan"), "w: expected a number from 0 to 1e9, not nan"),
        (
            GOOD + "hardwear: x\n",
            r"unknown field hardwear \(did you mean hardware\?\); allowed: t0",
        ),
        (GOOD + "num_experts: 8\nnum_experts_per_tok: 2\n", "and they need it"),
        (
            GOOD + "x: 3\nnum_experts: 8\nnum_experts_per_tok: 9\n",
            "num_experts_per_tok: expected 1 to 8",
        ),
        (GOOD + "w: 3\n", "mine.yaml:8:1: w is there in line 2 already"),
        ("[" * 3000, "mine.yaml:1:9: nested too deeply"),
        (GOOD.replace("w: 2", 'w: "\\ud800"'), "mine.yaml:2:4: a lone surrogate stands"),
        (GOOD.replace("w: 2", "w: !!timestamp x"), "mine.yaml:2:4: no tags like timestamp, write"),
        ("{[1]: 2}", "mine.yaml:1:2: expected a name"),
        ("1: 2", "expected names, each with what belongs to it"),
        ("", "is empty"),
        ("{t0: 0, w: 0, f: 0, g: 0, d: 1, h: 0, e: 0}", "t0, w, f and g are 0: a step takes time"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        load_profile(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "h100_llama3.1-8b",
            r"unknown profile h100_llama3.1-8b \(did you mean h100_llama3.1-8b_tp",
        ),
        ("H100", r"unknown profile H100 \(did you mean h100_llama3.1-8b_tp1 or h100_llama3.1-70b"),
        ("", "no step time is named; give constant, constant:SECONDS"),
        ("nowhere.yaml", "cannot read nowhere.yaml: No such file"),
        ("wall", "wall, the time that steps really take, is for run; give constant"),
        ("constant:", "constant:: expected the seconds of a step, above 0 and up to 1e6"),
    ],
)
def test_an_unknown_step_time_is_an_error(text: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        step_time_of(text)


def test_step_times_by_name(tmp_path: Path) -> None:
    assert step_time_of("constant").ticks(1, 1, 0, 0) == 10**15
    assert step_time_of("constant:0.02").settings == {"seconds": 0.02}
    assert step_time_of("rtx4090_llama3.1-8b").name == "rtx4090_llama3.1-8b"
    assert step_time_of("roofline:llama-3.1-8b:h200-sxm").name == "roofline:llama-3.1-8b:h200-sxm"
    mine = step_time_of(written(tmp_path, GOOD))
    assert mine.name == "mine"
    assert tuple(mine.settings) == TERMS


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("constant:2", None),
        ("rtx4090_llama3.1-8b", KvRoom(41_408, is_reported=True)),
        ("h100_llama3.1-8b_tp1", KvRoom(426_788, is_reported=False)),
        ("rtxpro6000_llama3.1-8b", KvRoom(536_651, is_reported=False)),
        ("roofline:llama-3.1-70b:rtx-4090", KvRoom(0, is_reported=False)),
    ],
)
def test_what_is_known_of_memory_and_who_says_so(name, room):
    assert setup_of(name).kv_room == room
