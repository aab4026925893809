"""`batchdecode replay`."""

import json
import shutil

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
        ([], named("x", None), ":2: replica: name it for all requests, or for none"),
        ([], named("x", 1.5), "expected"),
    ],
)
def test_replicas_that_make_no_sense(arguments, log, message):
    done = replayed(*arguments, stdin=log)
    assert done.returncode == 2
    assert message in done.stderr


SAMPLES = ROOT / "samples" / "timing"
PROFILE = ("--profile", "rtx4090_llama3.1-8b")
LIMITS = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "num_gpu_blocks": 1201}


@pytest.fixture
def folder(tmp_path):
    shutil.copy(SAMPLES / "requests.jsonl", tmp_path / "run1_requests.jsonl")
    return tmp_path


def replay(folder, *arguments, log="run1_requests.jsonl", **process):
    return batchdecode("replay", log, *PROFILE, *arguments, cwd=folder, **process)


def limits_of(done):
    assert done.returncode == 0, done.stderr
    limits = json.loads(done.stdout)["limits"]
    return {limit["name"]: (limit["value"], limit["origin"]) for limit in limits}


def test_limits_come_from_the_file_beside_the_log_or_are_guessed(folder):
    done = replay(folder, "--json")
    assert limits_of(done)["batch"] == (256, "guessed: the default of vLLM")
    assert limits_of(done)["max_batch_tokens"][0] == 2048
    assert limits_of(done)["kv_blocks"][0] == 2587
    assert "--batch 256, --max-batch-tokens 2048, --kv-blocks 2587 are guesses" in done.stderr
    some = replay(folder, "--kv-blocks", "1200", "--batch", "4000")
    assert "warning: the limits of the run are unknown: --max-batch-tokens 4000 " in some.stderr
    (folder / "run1_meta.json").write_text(json.dumps(LIMITS))
    (folder / "run10_meta.json").write_text('{"max_num_seqs": 1}')
    (folder / "meta.json").write_text('{"max_num_seqs": 2}')
    done = replay(folder)
    assert done.stderr == ""
    shown = [line.split(maxsplit=2) for line in done.stdout.decode().splitlines()[2:5]]
    assert shown == [
        ["--batch", "32", "max_num_seqs in run1_meta.json"],
        ["--max-batch-tokens", "1024", "max_num_batched_tokens in run1_meta.json"],
        ["--kv-blocks", "1200", "num_gpu_blocks, less the null block, in run1_meta.json"],
    ]
    given = ["--batch", "32", "--kv-blocks", "1200", "--max-batch-tokens", "1024"]
    numbers = [
        json.loads(replay(folder, *each, "--json").stdout)["numbers"] for each in ([], given)
    ]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    ("layout", "meta", "limit"),
    [
        ("ragged", {"max_num_seqs": 3}, (5, "the slots of the traced run")),
        ("remote", {}, (5, "guessed: the requests that the client had in flight")),
        ("remote", {"max_num_seqs": 3}, (3, "max_num_seqs in run_meta.json")),
    ],
)
def test_what_a_client_had_in_flight_is_a_guess_of_the_slots(folder, layout, meta, limit):
    requests = b'{"prompt": [5], "max_tokens": 3}\n'
    command = ["run", "-q", "-b", "5", "--profile", "constant:0.5", "--trace", "run.trace.jsonl"]
    batchdecode(*command, cwd=folder, stdin=requests)
    run, *events = (folder / "run.trace.jsonl").read_text().splitlines()
    lines = [json.dumps({**json.loads(run), "layout": layout}), *events]
    (folder / "run.trace.jsonl").write_text("\n".join(lines))
    (folder / "run_meta.json").write_text(json.dumps(meta))
    done = replay(folder, "--json", log="run.trace.jsonl")
    assert limits_of(done)["batch"] == limit
    assert ("unknown: --batch 5" in done.stderr) == ("guessed" in limit[1])
    given = replay(folder, "--json", "--batch", "7", log="run.trace.jsonl")
    assert limits_of(given)["batch"] == (7, "--batch")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{\n", "meta.json:2:1: not JSON: expecting property name enclosed in double quotes"),
        ('{"max_num_seqs": -1}', "meta.json: max_num_seqs: expected a whole number from 1 to"),
        ("{}", "meta.json has no limits; expected any of max_num_seqs,"),
    ],
)
def test_a_file_beside_the_log_that_is_malformed_is_an_error(folder, content, message):
    (folder / "meta.json").write_text(content)
    done = replay(folder, *(["--meta", "meta.json"] if content == "{}" else []))
    assert (done.returncode, done.stdout) == (2, b"")
    assert message in done.stderr
