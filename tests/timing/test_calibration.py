"""Calibration: terms found again, errors stated truly, bad logs refused with their line."""

import json
import random

import msgspec
import numpy as np
import pytest
from engine_runs import drained
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.testing import assert_allclose

from batcher import Engine, Request, SimulatedModel
from batcher.errors import BatchdecodeError
from batcher.scheduling.clock import WallClock
from batcher.settings import SchedulingSettings
from batcher.timing import calibration
from batcher.timing.calibration import (
    KINDS,
    StepLog,
    fit_nonnegative,
    fit_steps,
    fit_terms,
    predicted_seconds,
    read_step_log,
    read_traced_steps,
    relative_errors,
    weights_of,
)
from batcher.timing.profiles import Profile, shipped_profiles
from batcher.timing.step_time import TICKS_PER_SECOND

STEP = {"num_tokens": 4, "num_sequences": 4, "kv_read": 40, "prefill_work": 0, "seconds": 0.02}
GOOD_LINE = json.dumps(STEP)


def log_of(*lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return read_step_log(((i, text.encode()) for i, text in enumerate(texts, 1)), "log")


def made_log(profile, num_steps, noise, *, prompts=True):
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


def test_the_terms_of_an_exact_log_are_found_again():
    profile = shipped_profiles()["h100_llama3.1-70b_tp8"]
    fit = fit_steps(made_log(profile, 400, 0), "log")
    assert fit.terms == pytest.approx(profile.terms, rel=1e-3, abs=1e-9)
    assert fit.errors.mape < 2e-4
    assert fit.errors.r2 > 0.999999
    assert fit.notes == []
    experts = replace(SMOOTH, x=30.0, num_experts=128, num_experts_per_tok=8)
    log = made_log(experts, 200, 0)
    terms = fit_terms(log, experts.experts)
    assert terms == pytest.approx(experts.terms, rel=1e-3, abs=1e-9)
    assert relative_errors(terms, log, experts.experts).mean() < 2e-4
    profile = SMOOTH
    log = made_log(profile, 50, 0)
    assert predicted_seconds(profile.terms, log) == pytest.approx(log.seconds)


@pytest.mark.heavy
def test_errors_are_what_they_say():
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


@pytest.mark.parametrize("noise", [0.3, 0.6])
def test_slow_steps_of_a_noisy_log_count_in_full(noise):
    log = made_log(SMOOTH, 1000, 0)
    factors = np.random.default_rng(0).lognormal(0, noise, log.num_steps)
    noisy = StepLog(
        log.num_tokens, log.num_sequences, log.kv_read, log.prefill_work, log.seconds * factors
    )
    errors = fit_steps(noisy, "log").errors
    assert abs(errors.replayed) < 0.02
    assert all(abs(kind.replayed) < 0.05 for kind in errors.by_kind)


def test_held_out_steps_have_no_part_in_the_fit_they_judge():
    log = made_log(SMOOTH, 400, 0)
    seconds = log.seconds.copy()
    seconds[4::5] *= 2  # a fit to the others says half of these, whatever they are
    doubled = StepLog(log.num_tokens, log.num_sequences, log.kv_read, log.prefill_work, seconds)
    assert fit_steps(doubled, "log").errors.held_out_mape == pytest.approx(0.5, abs=1e-3)


@given(
    st.integers(1, 4),
    st.lists(st.lists(st.integers(-3, 3), min_size=5, max_size=5), min_size=1, max_size=8),
)
def test_least_squares_without_negative_coefficients(num_columns, rows):
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
        (STEP | {"chunks": []}, "log:2: expected either prefill_work or chunks"),
        (STEP | {"num_tokens": 3}, "log:2: num_sequences 4 with num_tokens 3"),
        (STEP | {"num_tokens": 9}, "log:2: num_tokens 9 of 4 sequences, but no prompt"),
        (
            STEP | {"prefill_work": None, "chunks": [[0, 5]]},
            "log:2: chunks have more than the 4 of num_tokens",
        ),
        (GOOD_LINE.replace("0.02", "NaN"), "log:2: "),
    ],
)
def test_a_bad_line_is_named(line, message):
    with pytest.raises(BatchdecodeError, match=message):
        log_of(STEP | {"time": 1.0}, line)


def test_chunks_are_counted_as_prefill_work_and_too_few_steps_refused():
    step = {"num_tokens": 30, "num_sequences": 3, "kv_read": 9, "seconds": 1}
    log = log_of(step | {"chunks": [[0, 8], [100, 21]]})
    assert log.prefill_work.tolist() == [8 * 8 + 21 * (200 + 21)]
    with pytest.raises(BatchdecodeError, match="log: 19 steps: at least 20 are needed"):
        fit_steps(log_of(*[STEP] * 19), "log")


# Kinds of steps: errors of each, few steps that are not ignored, kinds that are missing.


PER_PROMPT = 0.008  # seconds that each prompt costs, for which a profile has no term


def log_of_kinds(num_decode, num_prompt, num_mixed):
    """Steps of the three kinds, mixed up, with short prompts that cost more than a profile says."""
    draw, step_time = random.Random(3), SMOOTH.step_time("true")
    kinds = [*"d" * num_decode, *"p" * num_prompt, *"m" * num_mixed]
    draw.shuffle(kinds)
    rows = []
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
    columns = np.array(rows).T
    return StepLog(*columns)


def test_each_kind_has_errors_of_its_own_and_few_steps_count():
    log = log_of_kinds(20, 200, 800)
    terms = fit_terms(log)
    assert terms["d"] == pytest.approx(SMOOTH.d, rel=0.15), "the cost of a cached token"
    decoding = log.part(log.prefill_work == 0)
    replayed = predicted_seconds(terms, decoding).sum() / decoding.seconds.sum() - 1
    assert abs(replayed) < 0.02, "decoding takes as long as it did"
    log = log_of_kinds(30, 60, 90)
    errors = fit_steps(log, "log").errors
    assert tuple(one.kind for one in errors.by_kind) == KINDS
    assert [one.num_steps for one in errors.by_kind] == [30, 60, 90]
    mape = sum(one.mape * one.num_steps for one in errors.by_kind) / 180
    assert mape == pytest.approx(errors.mape)
    assert min(one.mape for one in errors.by_kind) < errors.mape / 2, "they differ"
    text = errors.by_kind[0].describe()
    assert text.startswith("decode only MAPE ")
    assert text.endswith(" % (30)")


def test_a_kind_counts_by_its_share_and_not_by_its_number():
    log = log_of_kinds(20, 100, 400)
    weights = weights_of(log)
    decodes, mixed = log.prefill_work == 0, (log.prefill_work > 0) & (log.kv_read > 0)
    assert weights.mean() == pytest.approx(1)
    assert weights[decodes].sum() == pytest.approx(10 * weights[mixed].sum())
    one = weights_of(log_of_kinds(1, 100, 400))
    assert one.max() == pytest.approx(400 * one.min()), "a single step may be an odd one"


@pytest.mark.parametrize(
    ("counts", "warning"),
    [
        ((0, 30, 30), "no step only decodes: w and d are guesses"),
        ((3, 30, 30), "steps that only decode: 3, so w and d are uncertain"),
        ((30, 0, 0), "no step computes a prompt: t0 + w, g and d are known, f, h and e guesses"),
        ((30, 30, 0), "no step computes prompts while others decode: h is a guess"),
        ((30, 0, 30), "no step computes prompts alone: f and e depend on mixed steps only"),
        ((30, 4, 30), "steps with prompts: 4 alone, 30 mixed, so f, h and e are uncertain"),
    ],
)
def test_a_kind_that_is_missing_or_rare_is_warned_of(counts, warning):
    assert warning in calibration._open_questions(log_of_kinds(*counts))


# The trace of a run with times on the wall is a log of its steps.


def traced(clock):
    """Return the numbered lines of a trace of four requests, two of which arrive late."""
    settings = SchedulingSettings(max_batch_tokens=6)
    engine = Engine(SimulatedModel(), 3, settings=settings, clock=clock)
    for number, size in enumerate([9, 2, 4, 5]):
        arrival = 40.0 if number > 1 else 0.0
        engine.add(Request(prompt=[5] * size, max_tokens=4, ignore_eos=True, arrival_time=arrival))
    events = [engine.run_event(), *drained(engine).events]
    return [*enumerate(map(msgspec.json.encode, events), 1)]


class Timer:
    """A clock that goes on by another bit each time that it is looked at."""

    now, num_looks = 0.0, 0

    def measure(self):
        self.num_looks += 1
        self.now += 0.25 * self.num_looks
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_the_steps_are_those_of_a_log_of_the_same_run():
    timer = Timer()
    lines = traced(WallClock(timer.measure, timer.sleep))
    log = read_traced_steps(lines, "t")
    told = [json.loads(text) for _, text in lines if b'"event":"steps"' in text]
    ends = [end for steps in told for end in steps["ends"]]
    gap = max(range(1, len(ends)), key=lambda step: ends[step] - ends[step - 1] - log.seconds[step])
    starts = [0.0, *ends[:-1]]
    starts[gap] = ends[gap] - log.seconds[gap]  # nothing was there to compute before
    assert starts[gap] >= 40
    assert_allclose(log.seconds, np.subtract(ends, starts))
    # Prompts of 9 and 2 tokens, 6 tokens a step, then those of 4 and 5; 4 tokens are generated.
    assert log.num_tokens.tolist() == [6, 5, 2, 2, 2, 6, 4, 2, 2, 1]
    assert log.prefill_work.tolist()[:2] == [36, 81 - 36 + 4]
    assert log.kv_read.tolist()[2:5] == [9 + 2, 10 + 3, 11 + 4]
    rows = zip(*(getattr(log, name).tolist() for name in log.__struct_fields__), strict=True)
    written = [
        (
            number,
            msgspec.json.encode(dict(zip(log.__struct_fields__, map(whole, row), strict=True))),
        )
        for number, row in enumerate(rows, 1)
    ]
    again = read_step_log(written, "again")
    for name in log.__struct_fields__:
        assert (getattr(again, name) == getattr(log, name)).all()


def whole(number):
    return int(number) if number == int(number) else number


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(b'"seconds"', b'"other"'), "its steps have no times"),
        (
            lambda text: text.replace(b'"rows"', b'"x":' + b"[" * 5000 + b"]" * 5000 + b',"rows"'),
            "not a line of a trace: maximum recursion depth exceeded",
        ),
        (lambda text: text.replace(b'"rows":[', b'"rows":[1,'), "lists of steps differ in length"),
        (lambda text: text[:-9], "not a line of a trace"),
        (lambda text: text.replace(b'"steps"', b'"step"'), "no steps; run with --profile wall"),
    ],
)
def test_a_trace_that_tells_no_times_is_an_error_of_one_line(change, message):
    timer = Timer()
    lines = [(n, change(text)) for n, text in traced(WallClock(timer.measure, timer.sleep))]
    with pytest.raises(BatchdecodeError, match=message) as caught:
        read_traced_steps(lines, "t")
    assert "\n" not in str(caught.value)


# A profile of terms alone, none of them 0, as a fit to steps yields it.


SMOOTH = Profile(
    t0=9.159, w=7.703, f=0.08291, g=0.04227, d=1.509e-4, h=2.022e-4, e=5.789e-6, hardware="rtx-4090"
)
