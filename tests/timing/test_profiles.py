"""Profiles: those that are shipped, those in a user's file, and what is wrong with a file."""

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.timing.catalog import CatalogError
from batcher.timing.profiles import (
    TERMS,
    KvRoom,
    load_profile,
    read_profiles,
    setup_of,
    shipped_profiles,
    split_overhead,
    step_time_of,
)
from batcher.timing.step_time import TICKS_PER_SECOND

GOOD = "t0: 1.0\nw: 2\nf: 0.1\ng: 0\nd: 1.0e-4\nh: 0\ne: 5e-6\n"
REST = "w: 0, f: 0, g: 0, d: 0, h: 0, e: 0}\n"
PAIRS = "by_tokens: expected pairs of a whole number of at least 1 and a number from 1e-9 .*, not "
NAMED = f"fast: {{t0: 1, {REST}slow: {{t0: 9, {REST}"


def written(folder, text):
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_shipped_profiles_have_source_and_error_and_one_form():
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
    # decoding a + g*n + d*kv and prompts p0 + b*P + q*P*P, with a 6.355, p0 3.363, b 0.01844,
    # q 6.824e-7: at least a where prompts are short
    step_time = step_time_of("h100_llama3.1-8b_tp1")
    g = 0.01088
    assert step_time.ticks(4, 4, 1000, 0) == round((6.355 + 4 * g + 4.287e-5 * 1000) * 10**12)
    for tokens in (8, 4096):
        expected = max(6.355, 3.363 + 0.01844 * tokens) + g + 6.824e-7 * tokens * tokens
        assert step_time.ticks(tokens, 1, 0, tokens * tokens) == round(expected * 10**12)


def test_step_times_are_named_alone_or_in_a_file(tmp_path):
    name, alone = load_profile(written(tmp_path, GOOD))
    assert (name, alone.e, alone.error) == ("mine", 5e-6, "not stated")
    path = written(tmp_path, NAMED)
    assert load_profile(f"{path}:slow")[1].t0 == 9
    assert list(read_profiles(path)) == ["fast", "slow"]
    with pytest.raises(CatalogError, match=r"has 2 profiles: .*mine.yaml:NAME; known: fast, slow"):
        load_profile(path)
    with pytest.raises(CatalogError, match=r"mine.yaml: slo \(did you mean slow\?\)"):
        load_profile(f"{path}:slo")
    assert step_time_of("constant").ticks(1, 1, 0, 0) == 10**15
    assert step_time_of("constant:0.02").settings == {"seconds": 0.02}
    assert step_time_of("rtx4090_llama3.1-8b").name == "rtx4090_llama3.1-8b"
    assert step_time_of("roofline:llama-3.1-8b:h200-sxm").name == "roofline:llama-3.1-8b:h200-sxm"
    mine = step_time_of(written(tmp_path, GOOD))
    assert mine.name == "mine"
    assert tuple(mine.settings) == TERMS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("e: 5e-6\n", ""), "profile mine: e missing; required: t0, w, f, g, d, h, e"),
        (GOOD.replace("w: 2", "w: -2"), "profile mine: w: expected a number from 0 to 1e9, not -2"),
        (GOOD.replace("w: 2", "w: .nan"), "w: expected a number from 0 to 1e9, not nan"),
        (
            GOOD + "hardwear: x\n",
            r"unknown field hardwear \(did you mean hardware\?\); allowed: t0",
        ),
        (GOOD + "num_experts: 8\nnum_experts_per_tok: 2\n", "need each other"),
        (GOOD + "x: 3\nnum_experts: 8\nnum_experts_per_tok: 9\n", "_per_tok: expected 1 to 8"),
        (GOOD + "w: 3\n", "mine.yaml:8:1: w is already set in line 2"),
        ("[" * 3000, "mine.yaml:1:9: nested too deeply"),
        (GOOD.replace("w: 2", 'w: "\\ud800"'), "mine.yaml:2:4: a lone surrogate stands"),
        (GOOD.replace("w: 2", "w: !!timestamp x"), "mine.yaml:2:4: no tags like timestamp, write"),
        ("{[1]: 2}", "mine.yaml:1:2: expected a name"),
        ("1: 2", "expected a mapping of names to values"),
        ("", "is empty"),
        ("{t0: 0, w: 0, f: 0, g: 0, d: 1, h: 0, e: 0}", "f and g are 0: a step needs a duration"),
        (GOOD + "by_tokens: 3", f"mine.yaml: profile mine: {PAIRS}3"),
        (GOOD + "by_tokens: null", f"{PAIRS}None"),
        (GOOD + "by_tokens: [[1, 2], [0, 3]]", rf"{PAIRS}\[0, 3\]"),
        (GOOD + "by_tokens: [[1, 2], [2, .inf]]", rf"{PAIRS}\[2, inf\]"),
        (GOOD + "by_tokens: [[1, 2, 3]]", rf"{PAIRS}\[1, 2, 3\]"),
        (GOOD + "by_tokens: [[8, 2], [4, 3]]", "4 comes after 8: expected ascending tokens"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, text, message):
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
        ("", "the name is empty; use constant, constant:SECONDS"),
        ("nowhere.yaml", "cannot read nowhere.yaml: No such file"),
        ("wall", "wall, the measured time, works only with run; use constant"),
        ("constant:", "constant:: expected the seconds of a step, above 0 and up to 1e6"),
        ("roofline:llama-3.1-8b", "expected roofline:MODEL:GPU"),
        ("roofline:llama:h100-sxm", r"unknown model llama \(did you mean llama-"),
        (
            "roofline:llama-3.1-8b:h100",
            r"unknown GPU h100 \(did you mean h100-sxm\?\); known: h100",
        ),
        ("roofline:llama-3.1-8b:h100-sxm:0", "expected 1 to 1024 GPUs, or 4x2 .* stages .* not 0"),
        ("roofline:llama-3.1-8b:h100-sxm:64x32", "expected 1 to 1024 GPUs, .*, not 64x32"),
        ("h100_llama3.1-8b_tp1@vllm-2026", r"unknown engine vllm-2026 \(did you mean vllm-2025"),
        ("h100_llama3.1-8b_tp1@none.yaml", "cannot read none.yaml"),
        ("samples/timing/profiles.yaml:our-gpu@vllm-2025", "the profile must name its model"),
    ],
)
def test_an_unknown_step_time_is_an_error(text, message):
    with pytest.raises(CatalogError, match=message):
        step_time_of(text)


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


# The overhead of an engine: the gaps between its kernels.


KERNELS = ("h100_llama3.1-8b_tp1", "h100_llama3.1-70b_tp4", "h100_mixtral-8x7b_tp2")
ROOFLINES = ("roofline:llama-3.1-8b:h100-sxm", "roofline:llama-3.1-70b:h100-sxm:4x2")
NUM_LAYERS = {name: 80 if "70b" in name else 32 for name in (*KERNELS, *ROOFLINES)}
TICKS_PER_US = 10**9
STEPS = st.tuples(*(st.integers(1, most) for most in (4000, 300, 10**6, 10**7)))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("engines") / "engine.yaml"
    path.write_text('{gap_us: 25, source: "made up"}')
    return path


@given(step=STEPS)
@pytest.mark.parametrize("kernels", NUM_LAYERS)
def test_a_step_takes_its_kernels_and_the_gaps_of_all_layers(kernels, engine, step):
    gaps = 25 * NUM_LAYERS[kernels] * TICKS_PER_US
    expected = step_time_of(kernels).ticks(*step) + gaps
    assert step_time_of(f"{kernels}@{engine}").ticks(*step) == expected


def test_the_name_and_the_source_tell_of_the_engine(engine):
    name, profile = load_profile(f"h100_llama3.1-8b_tp1@{engine}")
    assert name == f"h100_llama3.1-8b_tp1@{engine}"
    assert profile.source.endswith("the engine: made up")


@pytest.mark.parametrize("path", ["/srv/us@here/ours.yaml", "./us@here/ours.yaml:NAME", "plain"])
def test_an_at_within_a_path_names_no_engine(path):
    assert split_overhead(path) == (path, None)
    assert split_overhead(f"{path}.yaml:2@vllm-2025")[0] == f"{path}.yaml:2"


# Runs that others have published, and how near profiles come, alone and with what engines take.


PAGE = Path(__file__).parents[2] / "docs" / "guide/timing.md"
ENGINE = "vllm-2025"  # fitted to E2E of the first run
CLAIMED = 0.1


class Run(NamedTuple):
    """Rows that begin together and decode together; times in milliseconds, None if not told."""

    profile: str
    rows: int
    prompt: int
    output: int
    ttft: float | None
    tpot: float | None
    e2e: float


# The first four: vLLM's benchmarks of latency on buildkite.com (builds 9515 of vllm/performance-
# benchmark and 571 of elastic/enterprise-search-ruby).  The others: GPU benchmarks in issue 340 of
# tenstorrent/tt-inference-server.
RUNS = [
    Run("h100_llama3.1-8b_tp1", 8, 32, 128, None, None, 997.542),
    Run("h200_llama3.1-8b_tp1", 8, 32, 128, None, None, 833.421),
    Run("h100_llama3.1-70b_tp4", 8, 32, 128, None, None, 2444.47),
    Run("h100_mixtral-8x7b_tp2", 8, 32, 128, None, None, 2326.97),
    Run("a100_qwen3-30b-a3b", 1, 128, 128, 35.7, 9.6, 1257.8),
    Run("a100_qwen3-30b-a3b", 1, 128, 1024, 27.0, 9.7, 9923.5),
    Run("a100_qwen3-30b-a3b", 1, 1024, 128, 70.3, 9.8, 1312.3),
    Run("a100_qwen3-30b-a3b", 1, 2048, 128, 81.0, 9.9, 1343.7),
]


FITTED, *OTHERS = RUNS


def simulated(run, ending=""):
    """TTFT, TPOT and E2E in milliseconds by the profile of a run, with this ending of its name."""
    step_time = step_time_of(run.profile + ending)
    prompts = run.rows * run.prompt
    to_ms = 1000 / TICKS_PER_SECOND
    ttft = step_time.ticks(prompts, run.rows, 0, prompts * run.prompt) * to_ms
    decoding = step_time.ticks_of_decodes(run.rows, prompts, run.output - 1) * to_ms
    return ttft, decoding / (run.output - 1), ttft + decoding


def errors_of(run, ending=""):
    """How far TTFT, TPOT and E2E are off, as shares; None for what is not told."""
    measured = run.ttft, run.tpot, run.e2e
    ours = simulated(run, ending)
    return [real and one / real - 1 for one, real in zip(ours, measured, strict=True)]


def times_shown(times):
    return " / ".join("-" if ms is None else f"{ms:,.1f}" for ms in times)


def errors_shown(errors):
    return " / ".join("-" if error is None else f"{error * 100:+.1f}%" for error in errors)


@pytest.mark.parametrize("run", RUNS)
def test_the_page_says_how_near_a_run_profiles_come(run):
    cells = [
        f"`{run.profile}`",
        f"{run.rows} x {run.prompt:,} + {run.output:,}",
        times_shown((run.ttft, run.tpot, run.e2e)),
        errors_shown(errors_of(run)),
        times_shown(simulated(run, f"@{ENGINE}")),
        errors_shown(errors_of(run, f"@{ENGINE}")) + (", fitted" if run is FITTED else ""),
    ]
    assert f"| {' | '.join(cells)} |" in PAGE.read_text()


@pytest.mark.parametrize("run", OTHERS)
def test_with_the_engine_of_one_run_tpot_and_e2e_of_the_others_are_within_a_tenth(run):
    _, tpot, e2e = errors_of(run, f"@{ENGINE}")
    assert abs(e2e or 0) < CLAIMED
    assert abs(tpot or 0) < CLAIMED
