import gzip
import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from examples import examples, mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from inner_workers import InnerWorkers
from killing_model import MODEL
from process import COMMAND, ENVIRONMENT, batchdecode, lines_of, start, workload
from processes import children_of

from batcher.errors import BatchdecodeError
from cli.options import SchedulingOptions
from cli.run.problems import InvalidInput
from cli.run.run import run
from cli.run.run_options import RunOptions
from cli.signals import StopSignals

ROW = {
    "custom_id": "row",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "x", "max_tokens": 5, "n": 2, "temperature": 1},
}
SAMPLED = {"prompt": "Once upo", "max_tokens": 9, "temperature": 1.0}
VARIED = [
    *workload(12),
    ROW,
    {**SAMPLED, "id": "samples", "n": 4},
    {**SAMPLED, "id": "best", "n": 2, "best_of": 3},
    {"id": "beams", "prompt": "Once", "n": 2, "num_beams": 3, "max_tokens": 8},
    {"id": "choice", "prompt": "Once", "choice": [" yes indeed", " no"]},
    {"id": "none", "prompt": "x", "max_tokens": 0},
    {"prompt": "without an id"},
]
BAD = ["not a request", "", {"id": "r3", "prompt": "again"}, {"id": "r4"}, {"prompt": 7}]


def written(path):
    return [without_schedule(json.loads(line)) for line in Path(path).read_text().splitlines()]


def without_schedule(value):
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in {"slot", "steps"}}
        return {name: without_schedule(each) for name, each in kept.items()}
    return [without_schedule(each) for each in value] if isinstance(value, list) else value


def as_set(results):
    return sorted(map(json.dumps, results))


def run_inner(options, num_workers=3, **how):
    options = replace(options, workers=num_workers)
    with StopSignals() as stop:
        workers = InnerWorkers(options, **how)
        return run(options, stop, lambda **_: ["batchdecode"], workers), workers


def options_of(folder, name="results.jsonl", **more):
    values = {"batch": 4, "keep_going": True, "quiet": True, "force": True, "workers": 3}
    values |= {"input": [str(folder / "requests.jsonl")], "output": str(folder / name)}
    return RunOptions(**(values | more))


def alone(folder, **more):
    options = options_of(folder, "alone.jsonl", **more, workers=None)
    with StopSignals() as stop:
        status = run(options, stop, lambda **_: ["batchdecode"])
    return written(options.output), status


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    (folder / "requests.jsonl").write_bytes(lines_of(*VARIED, *BAD, *workload(60)[12:]))
    return folder


REQUESTS = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"prompt_tokens": st.lists(st.integers(1, 99), min_size=1, max_size=9)},
            optional={
                "max_tokens": st.integers(0, 12),
                "n": st.integers(1, 3),
                "temperature": st.just(1.0),
                "stop_token": st.integers(0, 99),
                "id": st.sampled_from("abc"),
            },
        ),
        st.sampled_from(["", "  ", "no request", '{"prompt": 1}']),
    ),
    max_size=40,
)
SETTINGS = (
    {},
    {"policy": "sjf"},
    {"kv_blocks": 24, "block_size": 4},
    {"max_batch_tokens": 9, "long_prefill_threshold": 5},
    {"draft": "ngram"},
)


@examples(25)
@given(
    requests=REQUESTS,
    number=st.integers(1, 5),
    batch=st.integers(3, 6),
    scheduling=st.sampled_from(SETTINGS),
    keep_order=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_whoever_dies_no_result_is_lost_or_there_twice(
    tmp_path_factory, requests, number, batch, scheduling, keep_order, seed
):
    folder = tmp_path_factory.mktemp("random")
    (folder / "requests.jsonl").write_bytes(lines_of(*requests))
    more = {"batch": batch, "keep_order": keep_order, "scheduling": SchedulingOptions(**scheduling)}
    expected, expected_status = alone(folder, **more)
    options = options_of(folder, **more)
    status, _ = run_inner(options, number, seed=seed, kill_share=0.1, max_kills=2)
    found = written(folder / "results.jsonl")
    assert status == expected_status
    assert as_set(found) == as_set(expected)
    assert found == expected or not keep_order


@pytest.mark.parametrize("seed", mostly_heavy(range(5), 0))
def test_a_request_that_kills_workers_fails_alone(folder, seed):
    poisonous = {**SAMPLED, "id": "poison", "n": 2}
    (folder / "poison.jsonl").write_bytes(lines_of(*workload(30), poisonous, *workload(60)[30:]))
    options = options_of(folder, input=[str(folder / "poison.jsonl")])
    poison = lines_of(poisonous)
    status, workers = run_inner(options, poison=poison.splitlines(keepends=True), seed=seed)
    expected, _ = alone(folder, input=[str(folder / "poison.jsonl")])
    found = written(folder / "results.jsonl")
    failed = [result for result in found if result["id"] == "poison"]
    assert status == 1
    assert workers.num_kills == 5
    assert [result["index"] for result in failed] == [0, 1]
    assert {result["error"]["code"] for result in failed} == {"worker-died"}
    assert "3 workers died that decoded nothing else" in failed[0]["error"]["message"]
    others = [result for result in expected if result["id"] != "poison"]
    assert as_set(result for result in found if result["id"] != "poison") == as_set(others)


def test_bad_lines_are_refused_before_anything_is_decoded(folder, capfd):
    options = options_of(folder, keep_going=False)
    (folder / "results.jsonl").unlink(missing_ok=True)
    with pytest.raises(InvalidInput, match="4 invalid of 71 lines; nothing decoded"):
        run_inner(options)
    told = capfd.readouterr().err
    with pytest.raises(InvalidInput, match="4 invalid of 71 lines; nothing decoded"):
        alone(folder, keep_going=False)
    assert capfd.readouterr().err == told
    assert not (folder / "results.jsonl").exists()


def test_a_run_that_gives_up_goes_on_where_it_stopped(folder, capfd, monkeypatch):
    monkeypatch.setattr("cli.run.workers.AHEAD_SECONDS", 0)
    status, _ = run_inner(options_of(folder, max_errors=1))
    some = written(folder / "results.jsonl")
    assert status == 1
    assert "stopped after" in capfd.readouterr().err
    assert len(some) < len(alone(folder)[0])
    again = options_of(folder, force=False, resume=True)
    run_inner(again, num_workers=2)
    found = written(folder / "results.jsonl")
    assert found[: len(some)] == some
    assert as_set(found) == as_set(alone(folder)[0])


def test_a_best_sample_of_an_earlier_run_is_not_decoded_again(tmp_path):
    best = [{**SAMPLED, "id": f"b{i}", "best_of": 3, "seed": i} for i in range(9)]
    (tmp_path / "requests.jsonl").write_bytes(lines_of(*best))
    run_inner(options_of(tmp_path))
    results = tmp_path / "results.jsonl"
    whole = results.read_bytes()
    assert any(result["index"] for result in written(results))
    results.write_bytes(whole[:-1])
    run_inner(options_of(tmp_path, force=False, resume=True))
    assert sorted(results.read_bytes().splitlines()[:8]) == sorted(whole.splitlines()[:8])
    assert as_set(written(results)) == as_set(alone(tmp_path)[0])


def test_a_run_of_one_engine_is_not_continued_by_workers(folder):
    options = options_of(folder, max_errors=1)
    run_inner(options)
    again = options_of(folder, force=False, resume=True, workers=None)
    with (
        StopSignals() as stop,
        pytest.raises(BatchdecodeError, match="--workers was on, now it is off"),
    ):
        run(again, stop, lambda **_: ["batchdecode"])


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([{"prompt": "a", "session": "s"}], "line 1 is a turn of session 's'"),
        (workload(3, arrivals=lambda i: 3 - i), "line 2: arrival_time goes back from 3 to 2"),
    ],
)
def test_what_needs_one_engine_is_refused(tmp_path, requests, message):
    (tmp_path / "requests.jsonl").write_bytes(lines_of(*requests))
    with pytest.raises(BatchdecodeError, match=message):
        run_inner(options_of(tmp_path))


HALF_FAILING = """
def logits(prefixes):
    fails = [not row and len(prefix) == 3 for row, prefix in enumerate(prefixes)]
    return [None if failing else [1.0] * 8 for failing in fails]
logits.gives, logits.vocab_size = "logits", 8
"""


class DiesInTheMiddle(InnerWorkers):
    """A worker that dies when one of two samples has failed, and the other one goes on."""

    num_turns = 0

    def turn(self, number):
        self.num_turns += 1
        return [self.die(number)] if self.num_turns == 7 else super().turn(number)


def test_a_request_that_has_failed_in_part_counts_once(tmp_path, monkeypatch, capfd):
    (tmp_path / "half_failing.py").write_text(HALF_FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    half = {"id": "half", "prompt": [7], "max_tokens": 9, "n": 2, "temperature": 1}
    short = {"id": "short", "prompt": [7], "max_tokens": 4}  # with which the numbers are told
    (tmp_path / "requests.jsonl").write_bytes(lines_of(half, short))
    numbers = tmp_path / "numbers.json"
    options = options_of(
        tmp_path, model="half_failing:logits", max_errors=2, summary_json=str(numbers), workers=1
    )
    with StopSignals() as stop:
        workers = DiesInTheMiddle(options)
        assert run(options, stop, lambda **_: ["batchdecode"], workers) == 1
    assert workers.num_kills == 1
    results = written(tmp_path / "results.jsonl")
    assert [result["finish_reason"] for result in results] == ["length", "error", "length"]
    assert "stopped after" not in capfd.readouterr().err
    summary = json.loads(numbers.read_bytes())
    assert (summary["outputs"], summary["ok"], summary["failed"]) == (3, 2, 1)
    assert summary["generated_tokens"] == sum(len(result["tokens"]) for result in results)


def test_workers_that_cannot_start_end_the_run(folder):
    with pytest.raises(BatchdecodeError, match="3 workers in a row died while they started"):
        run_inner(options_of(folder), num_workers=1, kill_share=1, seed=3)


# -- as processes ---------------------------------------------------------------------------------


def test_a_pipe_and_gzip_are_read(folder):
    packed = gzip.compress((folder / "requests.jsonl").read_bytes())
    command = ("run", "--keep-going", "--workers", 2, "-b", 4, "--keep-order")
    done = batchdecode(*command, stdin=packed)
    (folder / "out.jsonl").write_bytes(done.stdout)
    assert written(folder / "out.jsonl") == alone(folder, keep_order=True)[0]
    assert "2 workers · 8 slots" in done.stderr


def test_what_is_answered_is_in_the_file_while_the_run_waits(tmp_path):
    deadline, out = time.monotonic() + 20, tmp_path / "out.jsonl"
    command = ("run", "-", "--workers", 2, "-q", "-o", out)
    with start(*command, cwd=tmp_path, command=COMMAND, stdin=subprocess.PIPE) as running:
        for num_sent, line in enumerate(workload(10), 1):
            running.stdin.write(lines_of(line))
            running.stdin.flush()
            while not out.exists() or out.read_bytes().count(b"\n") < num_sent:
                assert time.monotonic() < deadline, f"request {num_sent} has no answer"
                time.sleep(0.001)
    assert running.returncode == 0


def test_a_pipe_ends_at_a_bad_line(folder):
    done = batchdecode("run", "--workers", 2, "-q", stdin=lines_of(*workload(3), "bad", *VARIED))
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 3
    assert "reading stopped there" in done.stderr


def test_a_model_that_is_not_there_is_told_once(folder, capfd):
    with pytest.raises(BatchdecodeError) as told:
        run_inner(options_of(folder, model="no.such:model"))
    assert f"{told.value}{capfd.readouterr().err}".count("no.such") == 1


def put_models(folder):
    (folder / "killing.py").write_text(MODEL)
    (folder / "requests.jsonl").write_bytes(lines_of(*workload(14)))
    return folder


@pytest.fixture
def models(tmp_path):
    return put_models(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = put_models(tmp_path_factory.mktemp("undisturbed"))
    command = ("run", "requests.jsonl", "--model", "killing:sleepy", "-b", 40, "-q")
    assert batchdecode(*command, "-o", "out.jsonl", cwd=folder).returncode == 0
    return as_set(written(folder / "out.jsonl"))


def workers_of(process):
    return [worker for child in children_of(process.pid) for worker in children_of(child)]


def test_a_run_of_which_every_request_kills_workers_ends(tmp_path, capfd):
    requests = lines_of(*workload(40))
    (tmp_path / "requests.jsonl").write_bytes(requests)
    options = options_of(tmp_path)
    status, workers = run_inner(options, poison=requests.splitlines(keepends=True))
    assert (status, workers.num_kills) == (1, 30)
    assert "30 workers in a row died without an answer" in capfd.readouterr().err


def test_a_model_that_interrupts_stops_the_run(models):
    command = ("run", "requests.jsonl", "--model", "killing:interrupting", "-b", 2, "--workers", 2)
    done = batchdecode(*command, "-o", "out.jsonl", cwd=models)
    assert done.returncode == 130
    assert "stopped by a KeyboardInterrupt that the model raised" in done.stderr
    assert "replaced" not in done.stderr
    assert "continue with: " in done.stderr


@pytest.fixture
def temporary():
    with TemporaryDirectory() as name:  # short: the path of a socket has at most 108 bytes
        yield Path(name)


@pytest.mark.parametrize("number", mostly_heavy([signal.SIGINT, signal.SIGKILL], signal.SIGINT))
def test_no_worker_or_file_remains_and_the_run_goes_on_whoever_is_killed(
    models, undisturbed, temporary, number
):
    command = ("run", "requests.jsonl", "--model", "killing:sleepy", "-b", 2, "-o", "out.jsonl")
    environment = ENVIRONMENT | {"TMPDIR": str(temporary)}
    running = start(*command, "--workers", 2, cwd=models, command=COMMAND, env=environment)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (models / "out.jsonl").exists():
        time.sleep(0.02)
    while time.monotonic() < deadline and not written(models / "out.jsonl"):
        time.sleep(0.02)
    workers = workers_of(running)
    assert list(temporary.iterdir())
    running.send_signal(number)
    _, told = running.communicate(timeout=60)
    assert running.returncode in {130, -9}
    assert number is signal.SIGKILL or b"continue with: " in told
    assert len(workers) == 2
    processes = [Path(f"/proc/{pid}") for pid in workers]
    while left := [path for path in (*processes, *temporary.iterdir()) if path.exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    running = start(*command, "--workers", 2, "--resume", cwd=models, command=COMMAND)
    while not (workers := workers_of(running)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(workers[0], signal.SIGKILL)
    _, told = running.communicate(timeout=60)
    assert running.returncode == 0, told
    assert b"1 worker replaced" in told
    assert as_set(written(models / "out.jsonl")) == undisturbed


def test_a_finished_run_of_workers_leaves_nothing_to_do(tmp_path, capfd):
    (tmp_path / "requests.jsonl").write_bytes(lines_of(*workload(6), "no request"))
    assert run_inner(options_of(tmp_path))[0] == 1
    before = (tmp_path / "results.jsonl").read_bytes()
    again = options_of(tmp_path, force=False, resume=True, quiet=False)
    capfd.readouterr()
    assert run_inner(again)[0] == 1
    told = f"{again.output} is complete with 7 results; 1 failed (see --retry-failed)"
    assert capfd.readouterr().err == f"nothing to do: {told}\n"
    assert (tmp_path / "results.jsonl").read_bytes() == before
