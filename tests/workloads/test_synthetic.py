"""Synthetic workloads: arrivals, distributions, and that a seed gives the same bytes."""

from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batcher.planning.synthetic import (
    LENGTHS,
    TIMES,
    SharedPrefix,
    SyntheticWorkload,
    bursty,
    closed_entries,
    constant,
    draw_lengths,
    gamma,
    make_generator,
    open_entries,
    parse_distribution,
    parse_shared_prefix,
    poisson,
    session_entries,
)
from batcher.planning.workload_traces import WorkloadError, encode_entries
from batcher.request import MAX_LENGTH
from batcher.requests.lines import ParsedLine, RequestParser
from batcher.requests.validation import ModelCapabilities


def lengths(text):
    return parse_distribution(text, "--tokens", LENGTHS)


def seconds(text):
    return parse_distribution(text, "--think-time", TIMES)


WORKLOAD = SyntheticWorkload(
    prompt_lengths=lengths("lognormal:512,0.8"), output_lengths=lengths("uniform:16,256")
)

WORKLOADS = st.builds(
    SyntheticWorkload,
    prompt_lengths=st.sampled_from(["9", "zipf:1.2,300", "normal:50,30"]).map(lengths),
    output_lengths=st.sampled_from(["1", "exponential:60"]).map(lengths),
    max_prompt_tokens=st.integers(1, 400),
    max_output_tokens=st.integers(1, 400),
    shared_prefix=st.none() | st.builds(SharedPrefix, st.integers(1, 64), st.integers(1, 4)),
    seed=st.integers(0, 2**40),
    name=st.sampled_from(["r", "", 'chat "ü" ']),
)
SOURCES = st.one_of(
    st.just(lambda workload: open_entries(workload, poisson(3.0))),
    st.just(lambda workload: open_entries(workload, bursty(2.0, 1.0, 3.0))),
    st.just(
        lambda workload: session_entries(
            workload, gamma(1.0, 0.3), lengths("uniform:1,4"), seconds("exponential:2")
        )
    ),
    st.just(lambda workload: closed_entries(workload, 5, seconds("lognormal:2,1"))),
)

GOLDEN = Path(__file__).parent / "golden"


def first(entries, count):
    return list(islice(entries, count))


def test_the_same_seed_gives_these_bytes():
    sessions = replace(WORKLOAD, shared_prefix=SharedPrefix(64, 2), name="chat-", seed=7)
    turns = session_entries(sessions, gamma(2.0, 0.5), lengths("uniform:1,3"), seconds("2.5"))
    for entries, name in (
        (first(open_entries(WORKLOAD, poisson(5.0)), 3), "open.jsonl"),
        (first(turns, 4), "sessions.jsonl"),
    ):
        assert b"".join(encode_entries(entries)) == (GOLDEN / name).read_bytes()


@given(WORKLOADS, SOURCES, st.integers(0, 150), st.integers(0, 150))
def test_rows_are_good_requests_in_order_and_a_longer_workload_begins_alike(
    workload, source, count, more
):
    entries = first(source(workload), count)
    assert entries == first(source(workload), count + more)[:count]
    parser = RequestParser(ModelCapabilities(vocab_size=512))
    lines = b"".join(encode_entries(entries)).splitlines()
    assert len(lines) == count
    for number, (line, entry) in enumerate(zip(lines, entries, strict=True), 1):
        parsed = parser.parse(line, number)
        assert isinstance(parsed, ParsedLine), parsed
        request = parsed.request
        assert (request.id, request.arrival_time) == (entry.id, entry.arrival_time)
        assert request.session == entry.session
        assert request.think_time == (entry.think_time or 0.0)
        assert [(s.length, s.seed, s.type) for s in request.prompt] == [
            (s.length, s.seed, s.type) for s in entry.prompt
        ]
        assert request.max_tokens == entry.max_tokens <= workload.max_output_tokens
        assert request.ignore_eos
        assert entry.prompt[-1].length <= workload.max_prompt_tokens
    assert all(a.arrival_time <= b.arrival_time for a, b in pairwise(entries))
    assert len({entry.id for entry in entries}) == count


def test_a_change_of_one_thing_leaves_the_others_as_they_were():
    def rows(pattern, *parts, **changed):
        entries = first(open_entries(replace(WORKLOAD, **changed), pattern), 200)
        return [[part(entry) for part in parts] for entry in entries]

    own, limit, time = (lambda r: r.prompt[-1:]), (lambda r: r.max_tokens), lambda r: r.arrival_time
    same = poisson(5.0)
    assert rows(constant(1.0), own, limit) == rows(same, own, limit)
    assert rows(same, own, time, output_lengths=lengths("zipf:1,9")) == rows(same, own, time)
    prefix = SharedPrefix(8, 3)
    assert rows(same, own, time, limit, shared_prefix=prefix) == rows(same, own, time, limit)


def test_prompts_of_one_group_begin_with_the_same_segment():
    workload = replace(WORKLOAD, shared_prefix=SharedPrefix(100, 4))
    entries = first(open_entries(workload, poisson(1.0)), 2000)
    groups = [entry.prompt[0].seed for entry in entries]
    assert set(groups) == {f"prefix-r{group}" for group in range(4)}
    assert all(400 < groups.count(group) < 600 for group in set(groups))
    assert all(
        (entry.prompt[0].length, entry.prompt[0].type) == (100, "system") for entry in entries
    )
    assert len({entry.prompt[1].seed for entry in entries}) == 2000


def test_the_turns_of_a_session_follow_each_other_and_only_the_first_has_the_prefix():
    workload = replace(WORKLOAD, shared_prefix=SharedPrefix(100))
    entries = first(
        session_entries(workload, poisson(2.0), lengths("uniform:1,4"), seconds("3")), 900
    )
    sessions = [entry.session for entry in entries]
    assert [later for earlier, later in pairwise(sessions) if earlier != later] == [
        f"r{number}" for number in range(1, len(set(sessions)))
    ]
    assert {sessions.count(session) for session in set(sessions)} == {1, 2, 3, 4}
    for previous, entry in pairwise(entries):
        if entry.session == previous.session:
            assert entry.arrival_time == previous.arrival_time
            assert entry.think_time == 3.0
            assert len(entry.prompt) == 1
        else:
            assert entry.think_time is None
            assert len(entry.prompt) == 2


def test_each_user_of_a_closed_loop_has_one_turn_after_another():
    entries = first(closed_entries(WORKLOAD, 3, seconds("exponential:2")), 11)
    assert [entry.session for entry in entries] == (["r0", "r1", "r2"] * 4)[:11]
    assert [entry.id for entry in entries[:4]] == ["r0.0", "r1.0", "r2.0", "r0.1"]
    assert [entry.think_time is None for entry in entries] == [True] * 3 + [False] * 8
    assert all(entry.arrival_time == 0.0 for entry in entries)


@pytest.mark.parametrize("text", ["", "0", "x", "5:", "5:0", "5:x", "5:2:3", "9999999"])
def test_a_wrong_shared_prefix_is_named(text):
    with pytest.raises(WorkloadError) as caught:
        parse_shared_prefix(text, "--shared-prefix")
    assert f"--shared-prefix {text}: expected TOKENS or TOKENS:GROUPS" in str(caught.value)


RATES = st.floats(1e-3, 1e3)
PATTERNS = st.one_of(
    st.builds(constant, RATES),
    st.builds(poisson, RATES),
    st.builds(gamma, RATES, st.floats(0.05, 50)),
    st.builds(bursty, RATES, st.floats(0.01, 100), st.floats(0, 100)),
)


def times(pattern, count, seed=0):
    return list(islice(pattern(make_generator(seed, 0)), count))


def gaps(pattern, count=20_000):
    return np.diff(times(pattern, count))


@given(PATTERNS, st.integers(0, 2**32))
def test_the_first_comes_at_0_and_none_before_the_last(pattern, seed):
    found = times(pattern, 1100, seed)
    assert found[0] == 0.0
    assert all(earlier <= later for earlier, later in pairwise(found))
    assert found == [round(time, 6) for time in found]
    assert found == times(pattern, 1100, seed)


def test_constant_arrivals_do_not_drift():
    assert times(constant(3.0), 30_001)[-1] == 10_000.0
    assert times(constant(4.0), 3) == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    "pattern", [poisson(5.0), gamma(5.0, 0.25), gamma(5.0, 8.0), bursty(5.0, 2.0, 6.0)]
)
def test_the_mean_rate_is_the_one_asked_for(pattern):
    assert 1 / gaps(pattern).mean() == pytest.approx(5.0, rel=0.04)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_gaps_of_gamma_arrivals_vary_as_burstiness_says(burstiness):
    found = gaps(poisson(2.0) if burstiness == 1 else gamma(2.0, burstiness))
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_bursty_arrivals_come_only_while_it_is_on():
    found = np.array(times(bursty(5.0, 2.0, 6.0), 5000))
    assert (found % 8).max() <= 2.0
    assert len(set(found // 8)) > 100


SPECS = [
    "7",
    "constant:7",
    "uniform:16,256",
    "normal:100,200",
    "lognormal:512,0.8",
    "exponential:40",
    "pareto:10,1.2",
    "zipf:1.1,500",
]


def drawn_lengths(text, count=20_000, maximum=MAX_LENGTH, seed=0):
    drawn = draw_lengths(
        parse_distribution(text, "--prompt-tokens", LENGTHS), make_generator(seed, 1), maximum
    )
    return np.array(list(islice(drawn, count)))


@given(st.sampled_from(SPECS), st.integers(0, 2**32), st.integers(1, 300))
def test_lengths_are_whole_and_within_their_bounds(text, seed, maximum):
    found = drawn_lengths(text, 1500, maximum, seed)
    assert found.dtype == np.int64
    assert found.min() >= 1
    assert found.max() <= maximum
    assert (found == drawn_lengths(text, 1500, maximum, seed)).all()


def test_uniform_lengths_have_both_ends_as_often_as_the_rest():
    values, counts = np.unique(drawn_lengths("uniform:3,12"), return_counts=True)
    assert values.tolist() == list(range(3, 13))
    assert counts.min() > 1850
    assert counts.max() < 2150


@pytest.mark.parametrize(
    ("text", "statistic", "expected"),
    [
        ("normal:1000,50", np.mean, 1000),
        ("normal:1000,50", np.std, 50),
        ("lognormal:512,0.8", np.median, 512),
        ("lognormal:512,0.8", np.mean, 512 * np.exp(0.32)),
        ("exponential:400", np.mean, 400),
        ("pareto:100,3", np.mean, 150),
        ("pareto:100,3", np.min, 100),
    ],
)
def test_parameters_mean_what_their_names_say(text, statistic, expected):
    assert statistic(drawn_lengths(text)) == pytest.approx(expected, rel=0.04)


def test_zipf_falls_as_a_power():
    found = drawn_lengths("zipf:1,100", 100_000)
    assert found.max() <= 100
    for length, tolerance in ((2, 0.05), (10, 0.1)):
        share = (found == 1).mean() / (found == length).mean()
        assert share == pytest.approx(length, rel=tolerance)


def test_extreme_parameters_neither_overflow_nor_warn():
    for text in ("lognormal:1e9,10", "pareto:1e9,0.1", "normal:1e9,1e9", "exponential:1e9"):
        assert drawn_lengths(text).max() == MAX_LENGTH


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gauss:1,2", "unknown distribution 'gauss' (known: N; constant:N; uniform:LOW,HIGH; "),
        ("", "unknown distribution ''"),
        ("-3", "constant:N with N >= 0"),
        ("uniform:9,3", "uniform:LOW,HIGH with 0 <= LOW <= HIGH"),
        ("uniform:a,3", "'a' is not a number"),
        ("normal:inf,3", "'inf' is not a number up to 1e+09"),
        ("lognormal:512,11", "SIGMA from 0 to 10"),
        ("zipf:1,0", "MAX from 1 to 1,048,576"),
    ],
)
def test_a_wrong_distribution_is_named_with_what_is_allowed(text, said):
    with pytest.raises(WorkloadError) as caught:
        parse_distribution(text, "--prompt-tokens", LENGTHS)
    assert str(caught.value).startswith(f"--prompt-tokens {text}: ")
    assert said in str(caught.value)
