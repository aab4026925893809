"""Recorded traces: what each line becomes, and what is said of a line that is none."""

import json

import pytest

from batcher.planning.workload_traces import (
    TraceEntryChecks,
    WorkloadError,
    factor_for_rate,
    read_lengths,
    scale_times,
    trace_entries,
)

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def numbered(*lines):
    return [
        (number, (line if isinstance(line, str) else json.dumps(line)).encode())
        for number, line in enumerate(lines, 1)
    ]


def read(name, *lines):
    """Rows as (id, arrival time, [(length, seed)], max_tokens), and how many lengths were 0."""
    checks = TraceEntryChecks("trace")
    entries = [
        (entry.id, entry.arrival_time, [(s.length, s.seed) for s in entry.prompt], entry.max_tokens)
        for entry in trace_entries(name, numbered(*lines), checks)
    ]
    return entries, checks.num_raised


def mooncake(timestamp=0, length=600, output=5, hash_ids=(7, 8)):
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": output,
        "hash_ids": list(hash_ids),
    }


def vllm(request_id="a", prompt=5, output=6, queued=100.0):
    return {
        "request_id": request_id,
        "input_toks": prompt,
        "output_toks": output,
        "queued_ts": queued,
        "first_token_ts": 1,
    }


def test_azure_times_keep_all_seven_digits():
    entries, _ = read(
        "azure",
        HEADER,
        "2023-11-16 23:59:59.9999999,374,44\r",
        "2023-11-17 00:00:00.0000001,396,109",
        "2023-11-17 00:00:01,3,4",
    )
    assert entries == [
        ("r0", 0.0, [(374, "r0")], 44),
        ("r1", 2e-7, [(396, "r1")], 109),
        ("r2", 1.0000001, [(3, "r2")], 4),
    ]


def test_azure_columns_are_found_by_name_and_times_may_have_a_zone():
    entries, _ = read(
        "azure",
        "GeneratedTokens, ContextTokens, Model, TIMESTAMP",
        "4,3,x,2024-05-10 00:00:00.009930+00:00",
        "6,5,x,2024-05-10T02:00:01.009930+02:00",
    )
    assert entries == [("r0", 0.0, [(3, "r0")], 4), ("r1", 1.0, [(5, "r1")], 6)]


def test_mooncake_blocks_become_segments_with_the_hash_for_a_seed():
    entries, _ = read(
        "mooncake",
        mooncake(timestamp=500, length=1100, hash_ids=[7, 0, 9]),
        mooncake(timestamp=1500, length=1024, hash_ids=[7, 0]),
        mooncake(timestamp=1500, length=1, hash_ids=[4]),
    )
    assert entries == [
        ("r0", 0.0, [(512, 7), (512, 0), (76, 9)], 5),
        ("r1", 1.0, [(512, 7), (512, 0)], 5),
        ("r2", 1.0, [(1, 4)], 5),
    ]


def test_vllm_requests_keep_their_ids():
    entries, _ = read("vllm", vllm("b", queued=27536.660701067), vllm("a", queued=27537.047603549))
    assert entries == [("b", 0.0, [(5, "b")], 6), ("a", 0.386902482, [(5, "a")], 6)]


def test_lengths_of_0_become_1_and_are_counted():
    day = "2023-11-16 18:00:00"
    assert read("azure", HEADER, f"{day},0,0") == ([("r0", 0.0, [(1, "r0")], 1)], 2)
    zero = mooncake(length=0, output=0, hash_ids=[])
    assert read("mooncake", zero) == ([("r0", 0.0, [(1, "r0")], 1)], 2)
    assert read("vllm", vllm(prompt=0)) == ([("a", 0.0, [(1, "a")], 6)], 1)


@pytest.mark.parametrize(
    ("name", "lines", "said"),
    [
        ("azure", [], "trace:1: no column TIMESTAMP"),
        ("azure", [HEADER, "2023-11-16 18:15:46,3"], "trace:2: 2 columns: expected TIMESTAMP, "),
        ("azure", [HEADER, "noon,3,4"], "trace:2: TIMESTAMP 'noon': expected a time as in 2023-"),
        ("azure", [HEADER, "2023-11-16 18:15:46,x,4"], "trace:2: ContextTokens 'x': expected a"),
        (
            "azure",
            [HEADER, "2023-11-16 18:15:46,3,-4"],
            "trace:2: GeneratedTokens -4: expected 0 to 1,048,576 tokens",
        ),
        (
            "azure",
            [HEADER, "2023-11-16 18:15:46.5,3,4", "2023-11-16 18:15:46.4,3,4"],
            "trace:3: TIMESTAMP goes back by 0.1 s: sort the trace by TIMESTAMP",
        ),
        ("mooncake", ["{}"], "trace:1: Object missing required field `timestamp`"),
        (
            "mooncake",
            [{**mooncake(), "hash_ids": "x"}],
            "trace:1: Expected `array`, got `str` - at `$.hash_ids`",
        ),
        (
            "mooncake",
            ['{"more":' + "[" * 5000 + "]" * 5000 + "}"],
            "trace:1: maximum recursion depth exceeded",
        ),
        ("mooncake", [mooncake(output=-1)], "trace:1: output_length -1: expected 0 to"),
        (
            "mooncake",
            [mooncake(), mooncake(length=513, hash_ids=[1])],
            "trace:2: 1 hash_ids for input_length 513: expected 2, one for each 512 tokens",
        ),
        (
            "mooncake",
            [mooncake(512, hash_ids=[1, 2]), mooncake(500)],
            "trace:2: timestamp goes back by 0.012 s",
        ),
        ("mooncake", [mooncake(0), mooncake(1e300)], "trace:2: timestamp is 1e+297 s after the"),
        ("vllm", [vllm(queued=2), vllm(queued=1)], "trace:2: queued_ts goes back by 1 s"),
        ("vllm", [vllm(request_id=3)], "trace:1: Expected `str`, got `int` - at `$.request_id`"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(name, lines, said):
    with pytest.raises(WorkloadError) as caught:
        read(name, *lines)
    assert str(caught.value).startswith(said)


def test_a_rate_stretches_the_trace_and_keeps_its_order():
    def entries():
        lines = [vllm(str(n), queued=queued) for n, queued in enumerate([3, 4, 4, 13])]
        return trace_entries("vllm", numbered(*lines), TraceEntryChecks("t"))

    factor = factor_for_rate(entries(), 0.5, "t")
    times = [entry.arrival_time for entry in scale_times(entries(), factor)]
    assert times == [0.0, 0.6, 0.6, 6.0]
    assert (len(times) - 1) / times[-1] == 0.5


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_trace_without_a_span_has_no_rate(count):
    lines = numbered(*[vllm(str(n)) for n in range(count)])
    entries = trace_entries("vllm", lines, TraceEntryChecks("t"))
    with pytest.raises(WorkloadError, match=f"t: no rate to scale: all of its {count} requests"):
        factor_for_rate(entries, 2.0, "t")


def test_lengths_are_read_from_any_trace_or_from_plain_numbers():
    azure = numbered(HEADER, "2023-11-16 18:15:46,3,4", "2023-11-16 18:15:47,5,6")
    assert read_lengths(azure, "f", "prompt") == [3, 5]
    assert read_lengths(azure, "f", "output") == [4, 6]
    assert read_lengths(numbered(mooncake()), "f", "prompt") == [600]
    assert read_lengths(numbered(vllm()), "f", "output") == [6]
    assert read_lengths(numbered("12", " 40 ", "0"), "f", "output") == [12, 40, 1]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "f: there are no lengths in it"),
        (
            ["12", "x"],
            "f:2: 'x' is not a whole number, and the file no azure, mooncake, vllm trace",
        ),
        (["-1"], "f:1: length -1: expected 0 to"),
    ],
)
def test_a_file_without_lengths_is_an_error(lines, said):
    with pytest.raises(WorkloadError) as caught:
        read_lengths(numbered(*lines), "f", "prompt")
    assert str(caught.value).startswith(said)
