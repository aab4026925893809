"""Runs that others have published, to none of which a profile was fitted, and how near they are.

The page on step times has the same numbers in a table, so that neither changes alone.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from batcher.timing.model_shape import load_model_shape
from batcher.timing.profiles import shipped_profiles
from batcher.timing.step_time import TICKS_PER_SECOND

PAGE = Path(__file__).parents[2] / "docs" / "timing.md"
MS_PER_LAYER = 0.041  # what the first run took beyond its profile


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


def errors_of(run: Run, more_per_step: float = 0.0) -> tuple[float | None, float | None, float]:
    """How far TTFT, TPOT and E2E are off, as shares, if each step takes so many ms more."""
    step_time = shipped_profiles()[run.profile].step_time("published")
    prompts = run.rows * run.prompt
    to_ms = 1000 / TICKS_PER_SECOND
    ttft = step_time.ticks(prompts, run.rows, 0, prompts * run.prompt) * to_ms + more_per_step
    steps = run.output - 1
    decoding = step_time.ticks_of_decodes(run.rows, prompts, steps) * to_ms + steps * more_per_step
    return (
        run.ttft and ttft / run.ttft - 1,
        run.tpot and decoding / steps / run.tpot - 1,
        (ttft + decoding) / run.e2e - 1,
    )


def shown(error: float | None) -> str:
    return "-" if error is None else f"{error * 100:+.1f} %"


@pytest.mark.parametrize("run", RUNS)
def test_the_page_says_how_near_a_run_profiles_come(run: Run) -> None:
    layers = load_model_shape(shipped_profiles()[run.profile].model or "").num_hidden_layers
    as_it_is, with_gaps = errors_of(run), errors_of(run, MS_PER_LAYER * layers)
    cells = [f"`{run.profile}`", f"{run.rows} x {run.prompt:,} + {run.output:,}"]
    cells += [*map(shown, as_it_is), *map(shown, with_gaps)]
    assert f"| {' | '.join(cells)} |" in PAGE.read_text()


def test_with_what_one_run_lost_between_kernels_the_others_are_within_a_tenth() -> None:
    for run in RUNS:
        layers = load_model_shape(shipped_profiles()[run.profile].model or "").num_hidden_layers
        _, tpot, e2e = errors_of(run, MS_PER_LAYER * layers)
        assert abs(e2e) < 0.1
        assert tpot is None or abs(tpot) < 0.1
