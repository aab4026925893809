"""Workloads: what each line of a trace becomes, and what `batchdecode workload` writes."""

import gzip
import json
import subprocess
from pathlib import Path

import pytest
from command_server import command_line
from typer.testing import CliRunner

from batcher.errors import BatchdecodeError
from batcher.planning.workload_traces import (
    LengthSegment,
    TraceEntryChecks,
    WorkloadEntry,
    WorkloadError,
    WorkloadSummary,
    factor_for_rate,
    read_lengths,
    trace_entries,
)
from batcher.requests.lines import ParsedLine, RequestParser
from batcher.requests.validation import ModelCapabilities
from cli.commands import app
from cli.commands.workload import OPTIONS_OF, render_summary

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "samples" / "workloads"
NEEDED = {
    "gamma": ["--burstiness", 0.5],
    "bursty": ["--on", 1, "--off", 2],
    "closed": ["--users", 2],
}


@pytest.fixture
def make(capfd):
    """Return a function that makes a workload; it returns the requests, and what stderr got."""

    def make(*arguments):
        done = CliRunner().invoke(app, ["workload", *map(str, arguments)])
        if done.exception is not None:
            raise done.exception
        return [json.loads(line) for line in capfd.readouterr().out.splitlines()], done.stderr

    return make


@pytest.mark.parametrize("source", OPTIONS_OF)
def test_every_source_makes_requests_that_a_run_takes(make, source):
    files = {"azure": "azure.csv", "mooncake": "mooncake.jsonl", "vllm": "vllm.jsonl"}
    if source in files:
        requests, _ = make(source, SAMPLES / files[source])
    else:
        requests, _ = make(source, "-n", 40, *NEEDED.get(source, []))
        assert len(requests) == 40
    parser = RequestParser(ModelCapabilities(vocab_size=512))
    assert requests
    for number, request in enumerate(requests, 1):
        assert isinstance(parser.parse(json.dumps(request).encode(), number), ParsedLine)


def test_the_summary_says_how_much_there_is(make):
    requests, said = make("constant", "--rate", 4, "-n", 9, "--output-tokens", 3)
    assert [request["arrival_time"] for request in requests][-1] == 2.0
    assert said == (
        "9 requests over 2.0 s, 4 a second\n"
        "  in   9,216 tokens, p50 1,024, p99 1,024\n"
        "  out  27 tokens, p50 3, p99 3\n"
    )
    assert make("constant", "-n", 9, "-q")[1] == ""


@pytest.mark.parametrize(
    ("turns", "headline"),
    [
        ([], "no requests"),
        ([(0.0, None, None)], "1 request"),
        ([(0.0, None, None)] * 3, "3 requests, all at once"),
        ([(0.0, None, None), (2.0, None, None)], "2 requests over 2.0 s, 0.5 a second"),
        (
            [(0.0, "a", None), (0.0, "a", 1.0), (0.5, "b", None), (1.0, "c", None)],
            "4 requests in 3 sessions over 1.0 s, 2 a second",
        ),
    ],
)
def test_the_headline_tells_requests_from_sessions(turns, headline):
    summary = WorkloadSummary()
    entries = [
        WorkloadEntry(
            id=str(number),
            session=session,
            arrival_time=time,
            think_time=pause,
            prompt=[LengthSegment(length=3, seed=0)],
            max_tokens=2,
            ignore_eos=True,
        )
        for number, (time, session, pause) in enumerate(turns)
    ]
    assert list(summary.observe(entries)) == entries
    assert render_summary(summary).splitlines()[0] == headline


def test_traces_may_be_packed_and_are_scaled_or_brought_to_a_rate(make, tmp_path):
    packed = tmp_path / "t.csv.gz"
    packed.write_bytes(gzip.compress((SAMPLES / "azure.csv").read_bytes()))

    def times(*arguments):
        return [r["arrival_time"] for r in make("azure", packed, *arguments)[0]]

    assert times() == [0.0, 4.31467, 4.31467, 5.9190031, 9.0]
    assert times("--scale", 2) == [0.0, 8.62934, 8.62934, 11.8380062, 18.0]
    assert times("--rate", 2) == [0.0, 0.958815556, 0.958815556, 1.315334022, 2.0]
    assert times("--rate", 2, "-n", 2) == [0.0, 0.5]
    assert "1 length of 0 written as 1\n" in make("azure", packed)[1]
    assert "of 0" not in make("azure", packed, "-n", 4)[1]


def test_names_keep_two_workloads_apart(make):
    requests, _ = make("closed", "--users", 2, "-n", 3, "--name", "chat-", "--shared-prefix", "9:1")
    assert [request["id"] for request in requests] == ["chat-0.0", "chat-1.0", "chat-0.1"]
    assert requests[0]["session"] == "chat-0"
    assert [segment["seed"] for segment in requests[0]["prompt"]] == ["prefix-chat-0", "chat-0.0"]
    assert make("mooncake", SAMPLES / "mooncake.jsonl", "--name", "m")[0][3]["id"] == "m3"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["poison"], "unknown source 'poison'; did you mean poisson? (known: constant, poisson, "),
        (["poisson", "--burstiness", "2"], "poisson takes no --burstiness (known: --rate, "),
        (["poisson", "x.csv"], "poisson takes no FILE"),
        (["vllm", "x", "--name", "a"], "vllm takes no --name (known: FILE, --rate, --scale)"),
        (["gamma"], "gamma needs --burstiness"),
        (["azure"], "azure needs FILE"),
        (["azure", "x", "--rate", "1", "--scale", "1"], "--rate cannot be used with --scale"),
        (["poisson", "--think-time", "1"], "--think-time needs --turns"),
        (["azure", "nowhere.csv"], "cannot read nowhere.csv: No such file"),
        (["poisson", "--prompt-tokens", "empirical:"], "--prompt-tokens empirical:: expected"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(make, arguments, said):
    with pytest.raises(BatchdecodeError) as caught:
        make(*arguments)
    assert said in str(caught.value)


def test_a_wrong_trace_or_one_that_is_the_output_leaves_a_file_alone(make, tmp_path):
    path = tmp_path / "w.jsonl"
    for content, trace, why in (
        ((SAMPLES / "azure.csv").read_text(), path, "is the input too"),
        ("old", SAMPLES / "vllm.jsonl", "another kind"),
    ):
        path.write_text(content)
        with pytest.raises(BatchdecodeError, match=why):
            make("azure", trace, "-o", path)
        assert path.read_text() == content


def run_command(*arguments, stdin):
    return subprocess.run(
        [*command_line(), "workload", *arguments],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_a_pipe_is_read_once_so_it_can_be_scaled_but_brought_to_no_rate():
    trace = b"\xef\xbb\xbf" + (SAMPLES / "azure.csv").read_bytes()
    scaled = run_command("azure", "-", "--scale", "0.5", stdin=trace)
    assert scaled.returncode == 0
    assert json.loads(scaled.stdout.splitlines()[-1])["arrival_time"] == 4.5
    assert b"warning: <stdin> begins with a byte order mark" in scaled.stderr
    refused = run_command("azure", "-", "--rate", "2", stdin=trace)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert b"error: --rate reads <stdin> twice, but it is a pipe" in refused.stderr


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def numbered(*lines):
    return [
        (number, (line if isinstance(line, str) else json.dumps(line)).encode())
        for number, line in enumerate(lines, 1)
    ]


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


DAY = "2023-11-16 18:00:00"


@pytest.mark.parametrize(
    ("name", "lines", "entries", "num_zeros"),
    [
        (  # all seven digits of times
            "azure",
            [
                HEADER,
                "2023-11-16 23:59:59.9999999,374,44\r",
                "2023-11-17 00:00:00.0000001,396,109",
                "2023-11-17 00:00:01,3,4",
            ],
            [
                ("r0", 0.0, [(374, "r0")], 44),
                ("r1", 2e-7, [(396, "r1")], 109),
                ("r2", 1.0000001, [(3, "r2")], 4),
            ],
            0,
        ),
        (  # columns by name, and times with a zone
            "azure",
            [
                "GeneratedTokens, ContextTokens, Model, TIMESTAMP",
                "4,3,x,2024-05-10 00:00:00.009930+00:00",
                "6,5,x,2024-05-10T02:00:01.009930+02:00",
            ],
            [("r0", 0.0, [(3, "r0")], 4), ("r1", 1.0, [(5, "r1")], 6)],
            0,
        ),
        (  # blocks become segments with the hash for a seed
            "mooncake",
            [
                mooncake(timestamp=500, length=1100, hash_ids=[7, 0, 9]),
                mooncake(timestamp=1500, length=1024, hash_ids=[7, 0]),
                mooncake(timestamp=1500, length=1, hash_ids=[4]),
            ],
            [
                ("r0", 0.0, [(512, 7), (512, 0), (76, 9)], 5),
                ("r1", 1.0, [(512, 7), (512, 0)], 5),
                ("r2", 1.0, [(1, 4)], 5),
            ],
            0,
        ),
        (
            "vllm",
            [vllm("b", queued=27536.660701067), vllm("a", queued=27537.047603549)],
            [("b", 0.0, [(5, "b")], 6), ("a", 0.386902482, [(5, "a")], 6)],
            0,
        ),
        ("azure", [HEADER, f"{DAY},0,0"], [("r0", 0.0, [(1, "r0")], 1)], 2),
        ("mooncake", [mooncake(length=0, output=0, hash_ids=[])], [("r0", 0.0, [(1, "r0")], 1)], 2),
        ("vllm", [vllm(prompt=0)], [("a", 0.0, [(1, "a")], 6)], 1),
    ],
)
def test_each_line_of_a_trace_is_a_request(name, lines, entries, num_zeros):
    checks = TraceEntryChecks("trace")
    read = list(trace_entries(name, numbered(*lines), checks))
    assert [
        (one.id, one.arrival_time, [(s.length, s.seed) for s in one.prompt], one.max_tokens)
        for one in read
    ] == entries
    assert checks.num_raised == num_zeros


@pytest.mark.parametrize(
    ("name", "lines", "said"),
    [
        ("azure", [], "trace:1: no column TIMESTAMP"),
        ("azure", [HEADER, "2023-11-16 18:15:46,3"], "trace:2: 2 columns: expected TIMESTAMP, "),
        ("azure", [HEADER, "noon,3,4"], "trace:2: TIMESTAMP 'noon': expected a time such as 2023-"),
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
        list(trace_entries(name, numbered(*lines), TraceEntryChecks("trace")))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_trace_without_a_span_has_no_rate(count):
    lines = numbered(*[vllm(str(n)) for n in range(count)])
    with pytest.raises(WorkloadError, match=f"t: no rate to scale: all {count} requests"):
        factor_for_rate(trace_entries("vllm", lines, TraceEntryChecks("t")), 2.0, "t")


@pytest.mark.parametrize(
    ("lines", "side", "lengths"),
    [
        ([HEADER, f"{DAY},3,4", f"{DAY},5,6"], "prompt", [3, 5]),
        ([HEADER, f"{DAY},3,4", f"{DAY},5,6"], "output", [4, 6]),
        ([mooncake()], "prompt", [600]),
        ([vllm()], "output", [6]),
        (["12", " 40 ", "0"], "output", [12, 40, 1]),
    ],
)
def test_lengths_are_read_from_any_trace_or_from_plain_numbers(lines, side, lengths):
    assert read_lengths(numbered(*lines), "f", side) == lengths


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "f has no lengths"),
        (
            ["12", "x"],
            "f:2: 'x' is not a whole number, and the file is not a trace of azure, mooncake, vllm",
        ),
        (["-1"], "f:1: length -1: expected 0 to"),
    ],
)
def test_a_file_without_lengths_is_an_error(lines, said):
    with pytest.raises(WorkloadError) as caught:
        read_lengths(numbered(*lines), "f", "prompt")
    assert str(caught.value).startswith(said)
