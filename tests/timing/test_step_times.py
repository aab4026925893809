"""Step times: whole ticks, closed forms that equal the sums, and the least number of steps."""

from fractions import Fraction
from itertools import pairwise
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.timing.profiles import MORE_TERMS, TERMS, load_profile, shipped_profiles
from batcher.timing.step_time import (
    ConstantStepTime,
    PipelineStepTime,
    ProfileStepTime,
    RooflineStepTime,
    least_steps,
    of_experts,
    sum_of_ramp,
    whole_ticks,
)

OF_TERMS_ALONE = sorted(
    name for name, one in shipped_profiles().items() if not (one.by_tokens or one.experts)
)
AMOUNTS = st.one_of(st.just(0.0), st.decimals(0, 50, places=6).map(float))


def profile(**terms):
    return ProfileStepTime("test", dict.fromkeys(TERMS, 0.0) | terms)


PROFILES = st.fixed_dictionaries(
    dict.fromkeys(TERMS, AMOUNTS), optional=dict.fromkeys(MORE_TERMS, AMOUNTS)
).map(lambda terms: profile(**terms | {"t0": terms["t0"] + 0.001}))
EXPERTS = st.integers(1, 300).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most)))
OF_EXPERTS = st.builds(
    ProfileStepTime,
    st.just("test"),
    st.fixed_dictionaries(dict.fromkeys((*TERMS, "x"), AMOUNTS)).map(
        lambda terms: terms | {"t0": terms["t0"] + 0.001}
    ),
    experts=EXPERTS,
)
POINTS = st.dictionaries(st.integers(1, 400), st.decimals("0.001", 50, places=4), max_size=8).map(
    lambda points: tuple((place, float(points[place])) for place in sorted(points))
)
BY_TOKENS = st.builds(
    ProfileStepTime,
    st.just("test"),
    st.just(dict(zip(TERMS, (2.0, 1.0, 0.5, 0.01, 0.001, 0.002, 0.0001), strict=True))),
    POINTS,
)
CONSTANTS = st.decimals(0, 100, places=15).map(float).map(ConstantStepTime)
SMALL = st.integers(0, 40)
ROOFLINES = st.builds(
    RooflineStepTime,
    st.just("test"),
    st.just({}),
    st.tuples(SMALL, SMALL, SMALL, SMALL),
    st.tuples(st.integers(1, 4000), SMALL, SMALL),
    st.tuples(st.integers(0, 900), SMALL),
    st.none() | st.builds(lambda of, ticks: of_experts(*of, ticks), EXPERTS, st.integers(0, 4000)),
)
PIPELINES = st.lists(ROOFLINES, min_size=1, max_size=4).map(
    lambda passes: PipelineStepTime("test", {}, passes)
)
STEP_TIMES = st.one_of(PROFILES, OF_EXPERTS, BY_TOKENS, CONSTANTS, ROOFLINES, PIPELINES)


def one_by_one(step_time, num_sequences, kv_read, num_steps):
    return [
        step_time.ticks(num_sequences, num_sequences, kv_read + step * num_sequences, 0)
        for step in range(num_steps)
    ]


@given(STEP_TIMES, st.integers(1, 300), st.integers(0, 3000), st.integers(0, 200))
def test_the_closed_form_is_the_sum_of_the_steps(step_time, num_sequences, kv_read, num_steps):
    ticks = one_by_one(step_time, num_sequences, kv_read, num_steps)
    assert step_time.ticks_of_decodes(num_sequences, kv_read, num_steps) == sum(ticks)
    assert all(type(each) is int and each >= 1 for each in ticks)


@given(STEP_TIMES, st.integers(1, 300), st.integers(0, 3000), st.integers(1, 200), st.data())
def test_num_decodes_until_is_the_least(step_time, num_sequences, kv_read, num_steps, data):
    around = sum(one_by_one(step_time, num_sequences, kv_read, num_steps))
    ticks = data.draw(
        st.one_of(
            st.sampled_from([1, max(around - 1, 1), around, around + 1]), st.integers(1, around)
        )
    )
    found = step_time.num_decodes_until(num_sequences, kv_read, ticks)
    assert step_time.ticks_of_decodes(num_sequences, kv_read, found) >= ticks
    assert step_time.ticks_of_decodes(num_sequences, kv_read, found - 1) < ticks


@given(st.integers(1, 10**17), st.integers(0, 10**14), st.integers(1, 10**24))
def test_ramps_stay_exact_however_long(first, slope, ticks):
    found = least_steps(first, slope, ticks)
    assert sum_of_ramp(first, slope, found) >= ticks > sum_of_ramp(first, slope, found - 1)


def by_definition(terms, decoding, chunks):
    """The milliseconds of a step, as the documentation has it.

    decoding: what each decoding row reads.  chunks: (context, tokens) of each prompt.
    """
    t0, w, f, g, d, h, e = (Fraction(repr(terms[term])) for term in TERMS)
    num_tokens = len(decoding) + sum(tokens for _, tokens in chunks)
    per_kv = d + h if chunks else d
    attention = sum(
        (tokens * (context + Fraction(tokens, 2)) for context, tokens in chunks), Fraction()
    )
    return (
        t0
        + max(w, f * num_tokens)
        + g * (len(decoding) + len(chunks))
        + per_kv * sum(decoding)
        + e * attention
    )


@given(
    st.sampled_from(OF_TERMS_ALONE),
    st.lists(st.integers(1, 4000), max_size=64),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 2048)), max_size=4),
)
def test_a_profile_is_its_definition_to_the_tick(name, decoding, chunks):
    chosen = shipped_profiles()[name]
    ticks = chosen.step_time(name).ticks(
        len(decoding) + sum(tokens for _, tokens in chunks),
        len(decoding) + len(chunks),
        sum(decoding),
        sum(tokens * (2 * context + tokens) for context, tokens in chunks),
    )
    assert ticks == by_definition(chosen.terms, decoding, chunks) * 10**12


@pytest.mark.parametrize(
    ("amount", "ticks"),
    [(1.0, 10**15), (0.02, 2 * 10**13), (0.1, 10**14), (8.03, 803 * 10**13), (1e-15, 1)],
)
def test_ticks_are_what_the_digits_say(amount, ticks):
    assert whole_ticks(amount, 10**15) == ticks


@given(PROFILES, st.integers(1, 300), st.integers(1, 300), st.integers(0, 9), st.integers(0, 9))
def test_communication_is_for_each_token(step_time, num_tokens, rows, kv_read, work):
    terms = step_time.settings | {"c": 0.0}
    alone = ProfileStepTime("test", terms).ticks(num_tokens, rows, kv_read, work)
    sent = whole_ticks(step_time.settings.get("c", 0.0), 10**12)
    assert step_time.ticks(num_tokens, rows, kv_read, work) == alone + sent * num_tokens


@given(EXPERTS, st.integers(0, 10**14), st.integers(0, 400))
def test_experts_are_read_as_tokens_hit_them_in_the_mean(experts, ticks, num_tokens):
    num_experts, per_token = experts
    hit = 1 - Fraction(num_experts - per_token, num_experts) ** num_tokens
    read = of_experts(*experts, ticks)
    assert 0 <= read(num_tokens) - ticks * hit < 1  # a tick at most, upwards
    assert read(num_tokens + 1) >= read(num_tokens)


def test_a_pipeline_takes_as_long_as_one_part_of_its_rows():
    # 4 tokens of 2 rows are 2 of 1 row at a time, while the other 2 are in the other stage
    terms = dict(zip(TERMS, (1.0, 3.0, 2.0, 0.5, 0.25, 0.5, 0.125), strict=True))
    alone, halves = (ProfileStepTime("test", terms, parts=parts) for parts in (1, 2))
    pipeline = PipelineStepTime("test", {}, [alone, halves])
    assert pipeline.ticks(4, 2, 8, 0) == alone.ticks(2, 1, 4, 0) == 6_500 * 10**9
    assert pipeline.ticks(10, 2, 8, 64) == alone.ticks(5, 1, 4, 32)
    assert pipeline.ticks(4, 1, 0, 16) == alone.ticks(4, 1, 0, 16)  # one row is in one stage
    assert pipeline.ticks(4, 3, 8, 0) == halves.ticks(4, 3, 8, 0)


# Measured times by tokens, which replace two terms.


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


def test_a_file_may_have_it(tmp_path):
    path = tmp_path / "mine.yaml"
    terms = "{t0: 1, w: 2, f: 0.1, g: 0, d: 1.0e-4, h: 0, e: 0, by_tokens: [[16, 3], [32, 5.0]]}"
    path.write_text(terms)
    profile = load_profile(str(path))[1]
    assert profile.by_tokens == ((16, 3.0), (32, 5.0))
    assert profile.step_time("mine").ticks(24, 24, 0, 0) == 5 * 10**12
