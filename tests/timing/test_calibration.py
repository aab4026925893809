"""Calibration: terms found again, errors stated truly, bad logs refused with their line."""

import json
import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from timing.smooth_profile import SMOOTH

from batcher.errors import BatchdecodeError
from batcher.timing.calibration import (
    StepLog,
    Terms,
    fit_nonnegative,
    fit_steps,
    fit_terms,
    predicted_seconds,
    read_step_log,
    relative_errors,
    weights_of,
)
from batcher.timing.profiles import TERMS, Profile, shipped_profiles
from batcher.timing.step_time import TICKS_PER_SECOND

STEP = {"num_tokens": 4, "num_sequences": 4, "kv_read": 40, "prefill_work": 0, "seconds": 0.02}
GOOD_LINE = json.dumps(STEP)


def log_of(*lines: str | dict[str, object]) -> StepLog:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return read_step_log(((i, text.encode()) for i, text in enumerate(texts, 1)), "log")


def made_log(profile: Profile, num_steps: int, noise: float, *, prompts: bool = True) -> StepLog:
    """A log of random steps that last as a profile says, give or take `noise`."""
    draw, step_time, lines = random.Random(3), profile.step_time("true"), []
    for _ in range(num_steps):
        decodes = draw.choice([0, 1, 4, 16, 64] if prompts else [1, 4, 16, 64])
        kv_read = sum(draw.randint(1, 2000) for _ in range(decodes))
        count = draw.choice([0, 1, 2]) if decodes else 1
        chunks = [(draw.choice([0, 512]), draw.randint(1, 900)) for _ in range(count * prompts)]
        num_tokens = decodes + sum(tokens for _, tokens in chunks)
        work = sum(tokens * (2 * context + tokens) for context, tokens in chunks)
        ticks = step_time.ticks(num_tokens, decodes + len(chunks), kv_read, work)
        lines.append(
            {
                "num_tokens": num_tokens,
                "num_sequences": decodes + len(chunks),
                "kv_read": kv_read,
                "chunks": chunks,
                "seconds": ticks / TICKS_PER_SECOND * (1 + draw.uniform(-noise, noise)),
            }
        )
    return log_of(*lines)


def test_the_terms_of_an_exact_log_are_found_again() -> None:
    profile = shipped_profiles()["h100_llama3.1-70b_tp8"]
    fit = fit_steps(made_log(profile, 400, 0), "log")
    assert fit.terms == pytest.approx(profile.terms, rel=1e-3, abs=1e-9)
    assert fit.errors.mape < 2e-4
    assert fit.errors.r2 > 0.999999
    assert fit.notes == []


def test_the_term_of_experts_is_found_again() -> None:
    experts = replace(SMOOTH, x=30.0, num_experts=128, num_experts_per_tok=8)
    log = made_log(experts, 200, 0)
    terms = fit_terms(log, experts.experts)
    assert terms == pytest.approx(experts.terms, rel=1e-3, abs=1e-9)
    assert relative_errors(terms, log, experts.experts).mean() < 2e-4


@pytest.mark.heavy
def test_errors_are_what_they_say() -> None:
    log = made_log(SMOOTH, 1000, 0.1)
    fit = fit_steps(log, "log")
    # noise is even from -10 % to 10 %: 5 % in the mean, 95 % of it within 9.5 %
    assert fit.errors.mape == pytest.approx(0.05, abs=0.005)
    assert fit.errors.p95 == pytest.approx(0.095, abs=0.007)
    assert fit.errors.held_out_mape == pytest.approx(0.05, abs=0.007)
    assert fit.errors.num_steps == 1000
    off = np.sort(relative_errors(fit.terms, log))
    assert fit.errors.mape == pytest.approx(off.mean())
    assert (off <= fit.errors.p95).mean() == pytest.approx(0.95, abs=0.002)
    assert "MAPE" in fit.errors.describe()
    assert "1,000 steps" in fit.errors.describe()


def test_held_out_steps_have_no_part_in_the_fit_they_judge() -> None:
    log = made_log(SMOOTH, 400, 0)
    seconds = log.seconds.copy()
    seconds[4::5] *= 2  # a fit to the others says half of these, whatever they are
    doubled = StepLog(log.num_tokens, log.num_sequences, log.kv_read, log.prefill_work, seconds)
    assert fit_steps(doubled, "log").errors.held_out_mape == pytest.approx(0.5, abs=1e-3)


@pytest.mark.heavy
def test_the_fit_is_the_best_there_is_nearby() -> None:
    log = made_log(SMOOTH, 300, 0.1)
    terms, weights = fit_steps(log, "log").terms, weights_of(log)

    def loss(tried: Terms) -> float:
        return float((weights * (predicted_seconds(tried, log) / log.seconds - 1) ** 2).sum())

    for term, factor in product(TERMS, (0.98, 1.02)):
        assert loss(terms | {term: terms[term] * factor}) >= loss(terms) * (1 - 1e-4)


def test_predictions_are_those_of_the_step_time() -> None:
    profile = SMOOTH
    log = made_log(profile, 50, 0)
    assert predicted_seconds(profile.terms, log) == pytest.approx(log.seconds)


@given(
    st.integers(1, 4),
    st.lists(st.lists(st.integers(-3, 3), min_size=5, max_size=5), min_size=1, max_size=8),
)
def test_least_squares_without_negative_coefficients(
    num_columns: int, rows: list[list[int]]
) -> None:
    table = np.array(rows, float)
    columns, target = table[:, :num_columns], table[:, -1]
    found, loss = fit_nonnegative(columns, target)
    assert (found >= 0).all()
    rest = columns @ found - target
    assert loss == pytest.approx(rest @ rest, abs=1e-7)
    # the optimum: no slope leads down, but into the negative
    slopes = columns.T @ rest
    assert (slopes >= -1e-6).all()
    assert np.abs(slopes * found).max() < 1e-6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "log:2: "),
        (STEP | {"seconds": -1}, "log:2: expected `float` > 0.0 at `seconds`"),
        (STEP | {"tokens": 3}, "log:2: object contains unknown field `tokens`; fields: num_tokens"),
        (STEP | {"time": 0.5}, "log:2: time goes back from 1 to 0.5"),
        (STEP | {"chunks": []}, "log:2: one of prefill_work and chunks is needed, and only one"),
        (STEP | {"num_tokens": 3}, "log:2: num_sequences 4 with num_tokens 3"),
        (STEP | {"num_tokens": 9}, "log:2: num_tokens 9 of 4 sequences, but no prompt"),
        (
            STEP | {"prefill_work": None, "chunks": [[0, 5]]},
            "log:2: chunks have more than the 4 of num_tokens",
        ),
        (GOOD_LINE.replace("0.02", "NaN"), "log:2: "),
    ],
)
def test_a_bad_line_is_named(line: str | dict[str, object], message: str) -> None:
    with pytest.raises(BatchdecodeError, match=message):
        log_of(STEP | {"time": 1.0}, line)


def test_chunks_are_counted_as_prefill_work() -> None:
    step = {"num_tokens": 30, "num_sequences": 3, "kv_read": 9, "seconds": 1}
    log = log_of(step | {"chunks": [[0, 8], [100, 21]]})
    assert log.prefill_work.tolist() == [8 * 8 + 21 * (200 + 21)]


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(BatchdecodeError, match="log: 19 steps are too few: 20 at least"):
        fit_steps(log_of(*[STEP] * 19), "log")
