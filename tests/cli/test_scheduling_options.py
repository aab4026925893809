"""How requests are scheduled, as flags, environment and file say it, in every command."""

import json

import pytest
from examples import mostly_heavy
from process import batchdecode, lines_of, pretend_to_have_stopped, refused, workload

from batcher.settings import SchedulingSettings
from batcher.speculation.settings import SpeculationSettings
from cli.config import OF_SCHEDULING

LIMITS = ["--kv-blocks", "12", "--block-size", "4", "--max-batch-tokens", "8", "--check"]
TURN = {"session": "s", "prompt": "And", "max_tokens": 9, "ignore_eos": True, "arrival_time": 4}
TURNS = [TURN | {"id": f"turn{i}", "think_time": i} for i in range(4)]
REQUESTS = lines_of(*workload(20, arrivals=lambda i: i * 7 % 11), *TURNS, *workload(30)[20:])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").write_bytes(REQUESTS)
    return tmp_path


def run(folder, *arguments, stdin=b"", **environment):
    done = batchdecode("run", *arguments, "-b", 3, "-q", cwd=folder, stdin=stdin, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_event(folder, *arguments, **environment):
    run(folder, "in", "--trace", "trace", *arguments, **environment)
    return json.loads((folder / "trace").read_text().splitlines()[0])


def test_what_is_given_is_in_the_trace_and_there_is_an_option_for_all(folder):
    settings = {*SchedulingSettings.__struct_fields__, *SpeculationSettings.__struct_fields__}
    assert settings | {"check", "profile", "kv_memory"} == OF_SCHEDULING
    event = run_event(
        folder,
        *[*LIMITS, "--policy", "sjf", "--aging", "7", "--batching", "static"],
        *["--long-prefill-threshold", "5", "--prefill-order", "prefill-first"],
        *["--prefix-cache", "off", "--watermark", "0.2"],
        *["--profile", "constant:0.25"],
    )
    assert event["policy"] == "sjf"
    assert event["scheduling"] == {
        "aging": 7.0,
        "batching": "static",
        "max_batch_tokens": 8,
        "long_prefill_threshold": 5,
        "prefill_order": "prefill-first",
        "kv_blocks": 12,
        "block_size": 4,
        "prefix_cache": False,
        "watermark": 0.2,
    }
    assert event["step_time"]["name"] == "constant"


def test_a_flag_goes_before_the_environment_and_that_before_the_file(folder):
    for written, value in (("'off'", False), ("auto", None), ("off", False)):  # off is a bool
        text = f"kv-blocks: 40\nblock-size: 4\nprefix-cache: {written}\n"
        (folder / "c.yaml").write_text(text)
        found = run_event(folder, "--config", "c.yaml")["scheduling"]
        assert (found["kv_blocks"], found["block_size"]) == (40, 4)
        assert found.get("prefix_cache") is value
    environment = {"BATCHDECODE_BLOCK_SIZE": "5", "BATCHDECODE_PREFIX_CACHE": "on"}
    found = run_event(folder, "--config", "c.yaml", "--kv-blocks", "50", **environment)
    assert found["scheduling"] == {"kv_blocks": 50, "block_size": 5, "prefix_cache": True}


def test_the_trace_command_runs_requests_as_run_does(folder):
    run(folder, "in", *LIMITS, "--policy", "ljf", "--trace", "trace")
    (folder / "c.yaml").write_text("kv-blocks: 12\npolicy: ljf\noutput: no-file\n")
    arguments = ["-b", 3, "--config", "c.yaml", *LIMITS[2:]]
    views = [
        batchdecode("trace", *source, "--format", "steps", cwd=folder).stdout
        for source in (["trace"], ["in", *arguments])
    ]
    assert views[0] == views[1]
    stories = [
        batchdecode("trace", "why", "r9", *source, cwd=folder).stdout
        for source in (["trace"], ["in", *arguments])
    ]
    assert stories[0] == stories[1] != b""


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (
            ["rtx4090_llama3.1-8b", "--prefix-cache", "on", "--block-size", "32"],
            "has room for 41,408 tokens: --kv-blocks 1293",
        ),
        (
            ["h100_llama3.1-8b_tp1"],
            "has room for about 426,788 tokens by its data sheet: --kv-blocks 26673",
        ),
        (["rtx4090_llama3.1-8b", "--kv-blocks", "99"], None),
        (["roofline:llama-3.1-70b:rtx-4090", "--kv-blocks", "99"], "the weights do not fit"),
    ],
)
def test_memory_that_is_unlimited_though_a_gpu_has_some_is_said(folder, arguments, note):
    done = batchdecode("run", "in", "-o", "out", "--profile", *arguments, cwd=folder)
    assert done.returncode == 0
    if note is None:
        assert "KV is unlimited" not in done.stderr
        assert "weights" not in done.stderr
    else:
        assert note in done.stderr


DEADLINE = ["--profile", "h100_llama3.1-8b_tp1", "--policy", "deadline"]


@pytest.mark.parametrize(
    "options", mostly_heavy([LIMITS, ["--policy", "sjf"], DEADLINE], LIMITS, DEADLINE)
)
def test_a_pipe_and_a_file_in_any_order_give_the_same_schedule(folder, options):
    lines = REQUESTS.splitlines(keepends=True)
    ordered = b"".join(sorted(lines, key=lambda line: json.loads(line).get("arrival_time", 0)))
    (folder / "ordered").write_bytes(ordered)
    from_file = run(folder, "ordered", *options)
    assert run(folder, *options, stdin=ordered) == from_file
    assert sorted(run(folder, "in", *options).splitlines()) == sorted(from_file.splitlines())


LEVIATHAN = ["--draft", "simulated:0.5", "--acceptance", "leviathan"]
SEVERAL = {"temperature": 1, "ignore_eos": True, "n": 2}
DRAFTED = lines_of(*({**each, **SEVERAL} for each in workload(12)))
BULK = [{"prompt": "Some work", "max_tokens": 40, "ignore_eos": True, "priority": 5}] * 3
VIP = {"id": "vip", "prompt": "Now", "max_tokens": 5, "ignore_eos": True, "arrival_time": 3}
DISPLACED = lines_of(*BULK, VIP | {"deadline": 10})
CONTINUED = {
    "limits": (REQUESTS, LIMITS),
    "a profile": (REQUESTS, ["--profile", "h100_llama3.1-8b_tp1"]),
    "turns": (lines_of(*TURNS, *workload(9)), []),
    "drafts": (DRAFTED, LEVIATHAN),
    "drafts and limits": (DRAFTED, [*LEVIATHAN, *LIMITS]),
    "who may not wait": (DISPLACED, ["--preempt-for", "priority"]),
}


@pytest.mark.parametrize("case", mostly_heavy(CONTINUED, "limits", "turns", "who may not wait"))
def test_a_run_is_continued_as_if_it_had_never_stopped(folder, case):
    requests, options = CONTINUED[case]
    (folder / "in").write_bytes(requests)
    run(folder, "in", *options, "-o", "out", "--trace", "whole")
    whole = (folder / "out").read_bytes()
    for size in (0, 900, len(whole) - 5):
        pretend_to_have_stopped(folder / "out", whole[:size])
        run(folder, "in", *options, "-o", "out", "--trace", "again", "--resume")
        assert sorted((folder / "out").read_bytes().splitlines()) == sorted(whole.splitlines())
        assert (folder / "again").read_bytes() == (folder / "whole").read_bytes()
        (folder / "out").write_bytes(whole)


@pytest.mark.parametrize(
    ("then", "now", "reason"),
    [
        (LEVIATHAN, LEVIATHAN[:2], "--acceptance was leviathan, now it is not set"),
        (
            ["--kv-blocks", "30"],
            ["--kv-blocks", "30", "--prefix-cache", "off"],
            "--prefix-cache was auto, now it is off",
        ),
        (
            ["--profile", "constant:2"],
            ["--profile", "constant:3"],
            "--profile: seconds was 2.0, now it is 3.0",
        ),
        (["--profile", "wall"], ["--profile", "wall"], "--profile wall"),
        (["--profile", "wall"], [], "--profile wall"),
    ],
)
def test_another_schedule_is_not_resumed(folder, then, now, reason):
    run(folder, "in", *then, "-o", "out")
    pretend_to_have_stopped(folder / "out")
    assert reason in refused("run", "in", "-b", 3, *now, "-o", "out", "--resume", cwd=folder)


def test_who_may_not_wait_is_in_the_trace_with_whom_it_displaced_and_why(folder):
    (folder / "in").write_bytes(DISPLACED)
    for measure, told in [
        ("priority", "for vip, whose priority is a smaller number"),
        ("deadline", "for vip, which would have missed its deadline"),
    ]:
        event = run_event(folder, "--preempt-for", measure)
        assert event["scheduling"] == {"preempt_for": measure}
        story = batchdecode("trace", "why", "3", "trace", cwd=folder).stdout.decode()
        assert told in " ".join(story.split())
        assert batchdecode("trace", "trace", "--format", "steps", cwd=folder).returncode == 0
