"""`batchdecode replay`."""

import json

import pytest
from process import ROOT, batchdecode, lines_of

LOG = ROOT / "samples" / "timing" / "requests.jsonl"
RUN = ["--batch", "32", "--kv-blocks", "1200", "--max-batch-tokens", "1024"]


def test_replay_shows_the_real_run_the_simulated_one_and_the_error():
    done = batchdecode("replay", LOG, "--profile", "rtx4090_llama3.1-8b", *RUN)
    text = done.stdout.decode()
    assert done.returncode == 0
    assert "60 requests, 8,834 output tokens" in text
    for name in ("queue", "ttft", "tpot", "e2e"):
        assert all(f"{name} {which}" in text for which in ("mean", "p50", "p99"))
    assert "makespan" in text
    assert "binding: arrivals" in text


def test_replay_as_json_reads_stdin():
    done = batchdecode(
        "replay", "--profile", "rtx4090_llama3.1-8b", "--json", *RUN, stdin=LOG.read_bytes()
    )
    report = json.loads(done.stdout)
    assert report["requests"] == 60
    numbers = {number["name"]: number for number in report["numbers"]}
    ttft = numbers["ttft mean"]
    assert ttft["error"] == pytest.approx(ttft["simulated"] / ttft["real"] - 1)
    assert abs(ttft["error"]) < 0.05


def named(*names):
    rows = [json.loads(line) for line in LOG.read_text().splitlines()]
    return lines_of(*[{**row, "replica": names[i % len(names)]} for i, row in enumerate(rows)])


def replayed(*arguments, stdin):
    return batchdecode(
        "replay", "-", "--profile", "rtx4090_llama3.1-8b", *RUN, *arguments, stdin=stdin
    )


def test_replicas_are_those_of_the_log_or_behind_a_router_and_cost_what_they_do():
    prices = ROOT / "samples" / "timing" / "prices.yaml"
    text = replayed("--prices", prices, stdin=named("x", "y")).stdout.decode()
    assert "60 requests, 8,834 output tokens, on 2 replicas" in text
    assert "cost: 2 GPUs for $1 an hour, " in text
    found = [
        json.loads(replayed("--json", *more, stdin=log).stdout)
        for more, log in (
            ((), named(0, 1)),
            (("--replicas", "2"), LOG.read_bytes()),  # in turn, too
            ((), named("all")),
            ((), LOG.read_bytes()),
        )
    ]
    assert found[0] == found[1] != found[2] == found[3]


@pytest.mark.parametrize(
    ("arguments", "log", "message"),
    [
        (["--replicas", "2"], named("x", "y"), "the log names the replica of each"),
        (["--router", "random"], LOG.read_bytes(), "no effect without --replicas of at least 2"),
        (["--replicas", "2", "--router", "best"], LOG.read_bytes(), "unknown router 'best'"),
        ([], named("x", None), ":2: replica: all requests name one, or none does"),
        ([], named("x", 1.5), "expected"),
    ],
)
def test_replicas_that_make_no_sense(arguments, log, message):
    done = replayed(*arguments, stdin=log)
    assert done.returncode == 2
    assert message in done.stderr
