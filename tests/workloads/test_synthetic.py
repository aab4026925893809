"""Synthetic workloads: a seed gives the same bytes, and each kind of number its own stream."""

from itertools import islice, pairwise
from pathlib import Path

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
    gamma,
    open_entries,
    parse_distribution,
    parse_shared_prefix,
    poisson,
    session_entries,
)
from batcher.planning.workload_traces import WorkloadError, encode_entries
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
    entries = first(open_entries(WORKLOAD, poisson(5.0)), 3)
    assert b"".join(encode_entries(entries)) == (GOLDEN / "open.jsonl").read_bytes()


def test_the_same_seed_gives_these_sessions():
    workload = replace(WORKLOAD, shared_prefix=SharedPrefix(64, 2), name="chat-", seed=7)
    entries = session_entries(workload, gamma(2.0, 0.5), lengths("uniform:1,3"), seconds("2.5"))
    assert b"".join(encode_entries(first(entries, 4))) == (GOLDEN / "sessions.jsonl").read_bytes()


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
    base = first(open_entries(WORKLOAD, poisson(5.0)), 200)
    other_times = first(open_entries(WORKLOAD, constant(1.0)), 200)
    other_outputs = first(
        open_entries(replace(WORKLOAD, output_lengths=lengths("zipf:1,9")), poisson(5.0)), 200
    )
    with_prefix = first(
        open_entries(replace(WORKLOAD, shared_prefix=SharedPrefix(8, 3)), poisson(5.0)), 200
    )
    assert [(r.prompt, r.max_tokens) for r in other_times] == [
        (r.prompt, r.max_tokens) for r in base
    ]
    assert [(r.prompt, r.arrival_time) for r in other_outputs] == [
        (r.prompt, r.arrival_time) for r in base
    ]
    assert [(r.prompt[1:], r.arrival_time, r.max_tokens) for r in with_prefix] == [
        (r.prompt, r.arrival_time, r.max_tokens) for r in base
    ]


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
