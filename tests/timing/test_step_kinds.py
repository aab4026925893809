"""Kinds of steps: errors of each, few steps that are not ignored, kinds that are missing."""

import random
from typing import Any

import numpy as np
import pytest
from timing.smooth_profile import SMOOTH as TRUE

from batcher.timing import calibration
from batcher.timing.calibration import (
    KINDS,
    StepLog,
    fit_steps,
    fit_terms,
    predicted_seconds,
    weights_of,
)
from batcher.timing.step_time import TICKS_PER_SECOND

PER_PROMPT = 0.008  # seconds that each prompt costs, for which a profile has no term


def made_log(num_decode: int, num_prompt: int, num_mixed: int) -> StepLog:
    """Steps of the three kinds, mixed up, with short prompts that cost more than a profile says."""
    draw, step_time = random.Random(3), TRUE.step_time("true")
    kinds = [*"d" * num_decode, *"p" * num_prompt, *"m" * num_mixed]
    draw.shuffle(kinds)
    rows: list[list[float]] = []
    for kind in kinds:
        num_decodes = 0 if kind == "p" else draw.randint(1, 64)
        level = draw.choice([100, 400, 1000, 3000])
        kv_read = sum(draw.randint(1, level) for _ in range(num_decodes))
        count = 0 if kind == "d" else draw.randint(1, 2)
        prompts = [draw.randint(16, 80) for _ in range(count)]
        load = (
            num_decodes + sum(prompts),
            num_decodes + count,
            kv_read,
            sum(length * length for length in prompts),
        )
        seconds = step_time.ticks(*load) / TICKS_PER_SECOND + PER_PROMPT * count
        rows.append([*load, seconds * draw.uniform(0.98, 1.02)])
    columns: Any = np.array(rows).T
    return StepLog(*columns)


def test_few_steps_that_only_decode_are_not_ignored() -> None:
    log = made_log(20, 200, 800)
    terms = fit_terms(log)
    assert terms["d"] == pytest.approx(TRUE.d, rel=0.15), "the cost of a cached token"
    decoding = log.part(log.prefill_work == 0)
    replayed = predicted_seconds(terms, decoding).sum() / decoding.seconds.sum() - 1
    assert abs(replayed) < 0.02, "decoding takes as long as it did"


def test_each_kind_has_errors_of_its_own() -> None:
    log = made_log(30, 60, 90)
    errors = fit_steps(log, "log").errors
    assert tuple(one.kind for one in errors.by_kind) == KINDS
    assert [one.num_steps for one in errors.by_kind] == [30, 60, 90]
    mape = sum(one.mape * one.num_steps for one in errors.by_kind) / 180
    assert mape == pytest.approx(errors.mape)
    assert min(one.mape for one in errors.by_kind) < errors.mape / 2, "they differ"
    text = errors.by_kind[0].describe()
    assert text.startswith("decode only MAPE ")
    assert text.endswith(" % (30)")


def test_a_kind_counts_by_its_share_and_not_by_its_number() -> None:
    log = made_log(20, 100, 400)
    weights = weights_of(log)
    decodes, mixed = log.prefill_work == 0, (log.prefill_work > 0) & (log.kv_read > 0)
    assert weights.mean() == pytest.approx(1)
    assert weights[decodes].sum() == pytest.approx(10 * weights[mixed].sum())
    one = weights_of(made_log(1, 100, 400))
    assert one.max() == pytest.approx(400 * one.min()), "a single step may be an odd one"


@pytest.mark.parametrize(
    ("counts", "warning"),
    [
        ((0, 30, 30), "no step only decodes: w and d are guesses"),
        ((3, 30, 30), "steps that only decode: 3, so w and d are uncertain"),
        ((30, 0, 0), "no step computes a prompt: t0 + w, g and d are known, f, h and e guesses"),
        ((30, 30, 0), "no step computes prompts while others decode: h is a guess"),
        ((30, 0, 30), "no step computes prompts alone: f and e are told by mixed ones only"),
        ((30, 4, 30), "steps with prompts: 4 alone, 30 mixed, so f, h and e are uncertain"),
    ],
)
def test_a_kind_that_is_missing_or_rare_is_warned_of(
    counts: tuple[int, int, int], warning: str
) -> None:
    assert warning in calibration._open_questions(made_log(*counts))
