"""`batchdecode workload`: what goes to stdout, stderr and files, and which options it takes."""

import gzip
import json
import subprocess
from pathlib import Path

import pytest
from command_server import command_line
from typer.testing import CliRunner

from batcher.errors import BatchdecodeError
from batcher.planning.workload_traces import LengthSegment, WorkloadEntry, WorkloadSummary
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
        ([(0.0, None, None)] * 3, "3 requests, which begin at once"),
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


def test_output_goes_to_a_file_and_is_packed_by_its_name(make, tmp_path):
    requests, _ = make("poisson", "-n", 500)
    for name, opened in {"w.jsonl": open, "w.jsonl.gz": gzip.open}.items():
        path = tmp_path / name
        assert make("poisson", "-n", 500, "-o", path)[0] == []
        with opened(path, "rt") as file:
            assert [json.loads(line) for line in file] == requests


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
        (["poisson", "--burstiness", "2"], "poisson takes no --burstiness (it takes: --rate, "),
        (["poisson", "x.csv"], "poisson takes no FILE"),
        (["vllm", "x", "--name", "a"], "vllm takes no --name (it takes: FILE, --rate, --scale)"),
        (["gamma"], "gamma needs --burstiness"),
        (["azure"], "azure needs FILE"),
        (["azure", "x", "--rate", "1", "--scale", "1"], "--rate and --scale both set the times"),
        (["poisson", "--think-time", "1"], "--think-time is a pause between turns: give --turns"),
        (["azure", "nowhere.csv"], "cannot read nowhere.csv: No such file"),
        (["poisson", "--prompt-tokens", "empirical:"], "--prompt-tokens empirical:: expected"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(make, arguments, said):
    with pytest.raises(BatchdecodeError) as caught:
        make(*arguments)
    assert said in str(caught.value)


def test_a_trace_is_never_overwritten_by_its_workload(make, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text((SAMPLES / "azure.csv").read_text())
    with pytest.raises(BatchdecodeError, match="is the input too"):
        make("azure", path, "-o", path)
    assert path.read_text() == (SAMPLES / "azure.csv").read_text()


def test_a_wrong_trace_leaves_an_old_output_alone(make, tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text("old")
    with pytest.raises(BatchdecodeError):
        make("azure", SAMPLES / "vllm.jsonl", "-o", path)
    assert path.read_text() == "old"


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
    assert b"error: --rate needs to read <stdin> twice, which is a pipe" in refused.stderr
