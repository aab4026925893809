"""`batchdecode replay`, and `calibrate` with a log of requests."""

import json

import pytest
import yaml
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
        "replay",
        "--profile",
        "rtx4090_llama3.1-8b",
        "--json",
        *RUN,
        stdin=LOG.read_bytes(),
    )
    report = json.loads(done.stdout)
    assert report["requests"] == 60
    numbers = {number["name"]: number for number in report["numbers"]}
    ttft = numbers["ttft mean"]
    assert ttft["error"] == pytest.approx(ttft["simulated"] / ttft["real"] - 1)
    assert abs(ttft["error"]) < 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--profile is needed"),
        (["--profile", "wall"], "wall, the time that steps really take, is for run"),
        (
            ["--profile", "constant:1", "--check"],
            "replay has no option --check; run, trace and others have it",
        ),
        (["--profile", "nobody"], "unknown profile nobody"),
        (["--profile", "constant:1", "--kv-blocks", "3"], "can never run with --kv-blocks 3"),
        (
            ["--profile", "constant:1", "--policy", "lpm", "--prefix-cache", "off"],
            "the policy lpm needs a prefix cache",
        ),
    ],
)
def test_what_replay_cannot_do_is_a_user_error(arguments, message):
    done = batchdecode("replay", LOG, *arguments)
    assert done.returncode == 2
    assert done.stdout == b""
    assert message in done.stderr


def test_calibrate_fits_the_times_of_requests_and_states_the_error():
    done = batchdecode(
        "calibrate",
        LOG,
        *("--start", "rtx4090_llama3.1-8b", "--tries", "20", "--holdout", "0.25"),
        *RUN,
    )
    (profile,) = yaml.safe_load(done.stdout).values()
    assert done.returncode == 0
    assert profile["error"].startswith("of the replay it was fitted to: ttft mean ")
    assert "; of the requests after these: ttft mean " in profile["error"]
    assert profile["source"] == "fitted to the times of 45 requests of requests.jsonl"
    assert "  held out  of the requests after these: ttft mean " in done.stderr
    assert "  left out  by_tokens of rtx4090_llama3.1-8b: terms are fitted" in done.stderr
    assert "by_tokens" not in profile
    assert "60 requests, 20 simulations" in done.stderr


def test_calibrate_simulates_the_run_as_the_options_of_scheduling_say():
    once = ["calibrate", LOG, "--start", "l40s_llama3.1-8b_tp1", "--tries", "1", *RUN]
    more = [
        [],
        ["--capacity", "no-evict"],
        ["--prefix-cache", "off"],
        ["--long-prefill-threshold", "64"],
    ]
    errors = [yaml.safe_load(batchdecode(*once, *given).stdout)["requests"] for given in more]
    assert len({profile["error"] for profile in errors}) == len(more)


def test_calibrate_keeps_the_hardware_of_its_start_and_checks_against_it():
    once = ["calibrate", LOG, "--tries", "1", *RUN]
    done = batchdecode(*once, "--start", "h100_llama3.1-70b_tp4")
    (profile,) = yaml.safe_load(done.stdout).values()
    assert [profile[name] for name in ("hardware", "model", "tensor_parallel")] == [
        "h100-sxm",
        "llama-3.1-70b",
        4,
    ]
    assert "physics   possible" in done.stderr
    done = batchdecode(*once, "--start", "h100_llama3.1-8b_tp1", "--hardware", "rtx-4090")
    (profile,) = yaml.safe_load(done.stdout).values()
    assert profile["hardware"] == "rtx-4090", "what is given goes before"
    assert "physics   too fast" in done.stderr


def test_calibrate_of_requests_needs_something_to_start_from():
    done = batchdecode("calibrate", LOG)
    assert done.returncode == 2
    assert "name the profile it begins with (--start PROFILE)" in done.stderr


def test_a_roofline_to_start_from_needs_hardware_and_model():
    for given, missing in (
        (("--hardware", "rtx-4090"), "--model"),
        (
            ("--model", "llama-3.1-8b"),
            "--hardware",
        ),
    ):
        done = batchdecode("calibrate", LOG, *given)
        assert done.returncode == 2
        assert f"{given[0]} alone makes no roofline to begin with: add {missing}" in done.stderr


def test_what_is_for_requests_is_refused_with_a_log_of_steps():
    for option, value in (("--kv-blocks", "5"), ("--holdout", "0.2")):
        done = batchdecode("calibrate", LOG.with_name("steps.jsonl"), option, value)
        assert done.returncode == 2
        assert f"is a log of steps; for a log of requests only: {option}" in done.stderr


def test_calibrate_takes_the_limits_from_the_file_beside_the_log():
    once = ["calibrate", LOG, "--start", "rtx4090_llama3.1-8b", "--tries", "1"]
    beside, given = batchdecode(*once), batchdecode(*once, *RUN)
    assert beside.stdout == given.stdout
    assert "--batch                    32  max_num_seqs in requests_meta.json" in beside.stderr
    assert "--batch                    32  --batch\n" in given.stderr
    assert "guesses" not in beside.stderr


def test_calibrate_warns_of_limits_that_are_guesses_and_reads_the_file_of_meta(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(LOG.read_bytes())
    once = ["calibrate", "log.jsonl", "--start", "rtx4090_llama3.1-8b", "--tries", "1"]
    guessed = batchdecode(*once, cwd=tmp_path)
    assert "warning: nobody says how the run was limited by --batch 256, " in guessed.stderr
    meta = batchdecode(*once, "--meta", LOG.with_name("requests_meta.json"), cwd=tmp_path)
    assert "guesses" not in meta.stderr
    assert "1200  kv_cache.num_gpu_blocks, less the null block" in meta.stderr
    steps = batchdecode("calibrate", LOG.with_name("steps.jsonl"), "--meta", "m.json")
    assert "for a log of requests only: --meta" in steps.stderr


def test_calibrate_says_when_nothing_fits():
    once = ["calibrate", LOG, *RUN, "--start", "rtx4090_llama3.1-8b"]
    far = batchdecode(*once, "--tries", "1")
    assert "warning   no fit within 10 %: the limits above may not be those" in far.stderr
    near = batchdecode(*once, "--tries", "30")
    assert "no fit within" not in near.stderr


def test_a_roofline_is_no_profile_to_start_from():
    for start, options in (
        ("roofline:llama-3.1-8b:h100-sxm", "--hardware h100-sxm --model llama-3.1-8b\n"),
        ("roofline:m:g:2", "--hardware g --model m --tensor-parallel 2\n"),
        ("roofline:", "--hardware GPU --model MODEL\n"),
    ):
        done = batchdecode("calibrate", LOG, "--start", start)
        assert done.returncode == 2
        assert f"to begin with a roofline leave out --start: {options}" in done.stderr


def named(*names):
    """The log of the sample, whose requests were had by replicas of these names in turn."""
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
    assert "busy: idlest replica" in text
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
    assert (found[0]["replicas"]["most_served"], found[3]["replicas"]) == (30, None)


@pytest.mark.parametrize(
    ("arguments", "log", "message"),
    [
        (["--replicas", "2"], named("x", "y"), "the log says which of 2 replicas had a request"),
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
