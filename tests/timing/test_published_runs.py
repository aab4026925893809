"""Runs that others have published, and how near profiles come, alone and with what engines take.

The page on step times has the same numbers in a table, so that neither changes alone.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from batcher.timing.profiles import step_time_of
from batcher.timing.step_time import TICKS_PER_SECOND

PAGE = Path(__file__).parents[2] / "docs" / "timing.md"
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


def simulated(run: Run, ending: str = "") -> tuple[float, float, float]:
    """TTFT, TPOT and E2E in milliseconds by the profile of a run, with this ending of its name."""
    step_time = step_time_of(run.profile + ending)
    prompts = run.rows * run.prompt
    to_ms = 1000 / TICKS_PER_SECOND
    ttft = step_time.ticks(prompts, run.rows, 0, prompts * run.prompt) * to_ms
    decoding = step_time.ticks_of_decodes(run.rows, prompts, run.output - 1) * to_ms
    return ttft, decoding / (run.output - 1), ttft + decoding


def errors_of(run: Run, ending: str = "") -> list[float | None]:
    """How far TTFT, TPOT and E2E are off, as shares; None for what is not told."""
    measured = run.ttft, run.tpot, run.e2e
    ours = simulated(run, ending)
    return [real and one / real - 1 for one, real in zip(ours, measured, strict=True)]


def times_shown(times: tuple[float | None, ...]) -> str:
    return " / ".join("-" if ms is None else f"{ms:,.1f}" for ms in times)


def errors_shown(errors: list[float | None]) -> str:
    return " / ".join("-" if error is None else f"{error * 100:+.1f} %" for error in errors)


@pytest.mark.parametrize("run", RUNS)
def test_the_page_says_how_near_a_run_profiles_come(run: Run) -> None:
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
def test_with_the_engine_of_one_run_tpot_and_e2e_of_the_others_are_within_a_tenth(run: Run) -> None:
    _, tpot, e2e = errors_of(run, f"@{ENGINE}")
    assert abs(e2e or 0) < CLAIMED
    assert abs(tpot or 0) < CLAIMED
