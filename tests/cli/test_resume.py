import dataclasses
import gzip
import json
import random
import signal
import time

import pytest
from examples import rest_heavy
from process import batchdecode, lines_of, pretend_to_have_stopped, refused, start, workload

from batcher.errors import BatchdecodeError
from batcher.models.simulated import SimulatedModel
from cli.options import SchedulingOptions
from cli.run.files import ResumeError
from cli.run.resume import AGAIN
from cli.run.run import run
from cli.run.run_options import RunOptions
from cli.signals import StopSignals

ROW = {
    "custom_id": "row",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "x", "max_tokens": 5},
}
REQUESTS = lines_of(
    *workload(30, arrivals=lambda i: i * 7 % 11),
    "not a request",
    {"id": "none", "prompt": "x", "max_tokens": 0},
    ROW,
    *[request | {"id": f"s{i}"} for i, request in enumerate(workload(30))],
)
ONE = lines_of({"prompt": "a", "max_tokens": 2})
KV_BLOCKS = SchedulingOptions(kv_blocks=90)

SAMPLED = {"prompt": "Once upo", "max_tokens": 9, "temperature": 1.0}
VARIED = lines_of(
    *workload(5, arrivals=lambda i: 3 - i),
    {**SAMPLED, "id": "samples", "n": 4},
    {**SAMPLED, "id": "guided", "n": 2, "cfg_scale": 1.5, "negative_prompt": "The"},
    {**SAMPLED, "id": "best", "n": 2, "best_of": 3},
    {"id": "beams", "prompt": "Once", "n": 2, "num_beams": 3, "max_tokens": 8},
    {"id": "choice", "prompt": "Once", "choice": [" yes indeed", " no"]},
    {**SAMPLED, "id": "schema", "n": 2, "json_schema": {"type": "array", "maxItems": 2}},
    {**SAMPLED, "id": "healed", "heal": True, "logprobs": 2, "n": 2},
    ROW | {"body": {**SAMPLED, "n": 3}},
    ROW | {"custom_id": "best row", "body": {**SAMPLED, "n": 2, "best_of": 3}},
    {**SAMPLED, "id": "scored", "prompt_logprobs": 1, "n": 3},
    {"id": "scored alone", "prompt": "Once", "prompt_logprobs": 0, "max_tokens": 0},
    ROW | {"custom_id": "echo", "body": {"prompt": "Once", "echo": True, "logprobs": 1}},
    {
        "custom_id": "chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_completion_tokens": 5,
            "logprobs": True,
            "n": 2,
            "temperature": 1,
        },
    },
    {"id": "samples", "prompt": "again"},
    "not a request",
    {**SAMPLED, "id": "none", "n": 2, "max_tokens": 0},
    *[request | {"id": f"s{i}"} for i, request in enumerate(workload(5))],
)


def decode(path, output, *, requests=REQUESTS, **options):
    (path / "in.jsonl").write_bytes(requests)
    settings = {
        "batch": 3,
        "keep_going": True,
        "quiet": True,
        "trace": f"{path}/{output}.trace",
        "summary_json": f"{path}/{output}.summary",
    }
    with StopSignals() as stop:
        return run(
            RunOptions(
                input=[str(path / "in.jsonl")],
                output=None if output is None else str(path / output),
                **(settings | options),
            ),
            stop,
            "continue",
        )


def content(path):
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


@pytest.fixture
def whole(tmp_path):
    decode(tmp_path, "whole")
    return (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    ("keep_order", "first"),
    rest_heavy(2, [(False, 0), (True, 4), (False, 4), (False, 8), (True, 0), (True, 8)]),
)
def test_requests_of_all_kinds_are_continued_wherever_they_were_cut(tmp_path, keep_order, first):
    options = {"requests": VARIED, "keep_order": keep_order}
    decode(tmp_path, "whole", **options)
    whole = (tmp_path / "whole").read_bytes()
    ends = [0]
    for line in whole.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    decode(tmp_path, "out", **options)
    for end in (*ends[first::12], ends[-2] + 7):
        pretend_to_have_stopped(tmp_path / "out", whole[:end])
        assert decode(tmp_path, "out", resume=True, **options) == 1
        out = (tmp_path / "out").read_bytes()
        assert sorted(out.splitlines()) == sorted(whole.splitlines())
        assert out == whole or not keep_order
        for kind in ("trace", "summary"):
            again, before = (tmp_path / f"{name}.{kind}" for name in ("out", "whole"))
            assert again.read_bytes() == before.read_bytes()


def test_results_whose_turn_has_not_come_are_written_when_the_run_is_stopped(tmp_path):
    out = "out.gz"
    long, *short = workload(3, max_tokens=3)
    requests = lines_of(long | {"max_tokens": 60}, *short)
    decode(tmp_path, "whole", keep_order=True, requests=requests)
    arguments = ["in.jsonl", "-o", out, "-b", "3", "--keep-order"]
    trace = tmp_path / "trace"
    process = start("run", *arguments, "--trace", "trace", "--step-delay", "0.05", cwd=tmp_path)
    while not trace.exists() or trace.read_bytes().count(b'"finish"') < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert b" 2 ok  1 unfinished " in stderr
    assert f"2 results went to {out}".encode() in stderr
    lines = content(tmp_path / out).splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["r1", "r2"]
    decode(tmp_path, out, keep_order=True, resume=True, requests=requests)
    assert content(tmp_path / out) == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    "options", [("--policy", "sjf"), ("--kv-blocks", "90"), ("--profile", "constant:2")]
)
def test_a_resumed_run_says_that_it_decodes_again_what_is_there(tmp_path, options):
    (tmp_path / "in").write_bytes(lines_of(*workload(6)))
    command = ["run", "in", "-o", "out", *options]
    assert AGAIN not in batchdecode(*command, cwd=tmp_path).stderr
    whole = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    for num_kept, times in ((3, 1), (0, 0)):
        (tmp_path / "out").write_bytes(b"".join(whole[:num_kept]))
        done = batchdecode(*command, "--resume", cwd=tmp_path)
        assert (done.returncode, done.stderr.count(AGAIN)) == (0, times)
        assert done.stderr.count("resuming: out has 3 results; 6 requests in all\n") == times
        assert sorted((tmp_path / "out").read_bytes().splitlines(keepends=True)) == sorted(whole)
        assert AGAIN not in batchdecode(*command, "--resume", "-q", cwd=tmp_path).stderr


def test_a_run_that_gave_up_is_told_how_to_get_further(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(REQUESTS)
    command = ["run", "in.jsonl", "-o", "out", "-q", "--max-errors", "1"]
    done = batchdecode(*command, cwd=tmp_path)
    assert done.returncode == 1
    assert "continue with" not in done.stderr
    assert done.stderr.endswith("to continue, add --resume and raise --max-errors\n")
    before = (tmp_path / "out").read_bytes()
    assert batchdecode(*command, "--resume", cwd=tmp_path).returncode == 1
    assert (tmp_path / "out").read_bytes() == before
    done = batchdecode(*command[:-1], "2", "--resume", cwd=tmp_path)
    assert done.stderr.count("to go on") == 0
    assert len((tmp_path / "out").read_bytes().splitlines()) == 63


@pytest.mark.parametrize("option", ["follow", "stream"])
def test_a_run_that_followed_or_streamed_is_not_to_be_continued(tmp_path, option):
    decode(tmp_path, "out", **{option: True})
    with pytest.raises(ResumeError, match="that run read a pipe, or used --follow, --stream or"):
        decode(tmp_path, "out", resume=True)
    pretend_to_have_stopped(tmp_path / "out", (tmp_path / "out").read_bytes())
    with pytest.raises(ResumeError, match="did not finish: --force replaces them"):
        decode(tmp_path, "out")


@pytest.mark.parametrize(
    ("options", "keep_order"), [({"scheduling": KV_BLOCKS}, True), ({}, False)]
)
def test_a_finished_run_is_not_decoded_again(tmp_path, monkeypatch, capfd, options, keep_order):
    calls = []
    forward = SimulatedModel.forward

    def counting(model, batch):
        calls.append(batch)
        return forward(model, batch)

    monkeypatch.setattr(SimulatedModel, "forward", counting)
    plain = {"trace": None, "summary_json": None, "quiet": False, "live": "never"}
    options = {**plain, **options, "requests": VARIED, "keep_order": keep_order}
    assert decode(tmp_path, "out", **options) == 1  # lines are no requests
    assert calls
    calls.clear()
    capfd.readouterr()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert decode(tmp_path, "out", resume=True, **options) == 1
    assert (calls, {path.name: path.read_bytes() for path in tmp_path.iterdir()}) == ([], before)
    told = capfd.readouterr().err
    assert told.startswith(f"nothing to do: {tmp_path}/out is complete with ")
    assert told.endswith("; 3 failed (see --retry-failed)\n")
    decode(tmp_path, "out", resume=True, **{**options, "trace": f"{tmp_path}/trace"})
    assert (tmp_path / "trace").read_bytes().endswith(b"}\n")
    whole = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    (tmp_path / "out").write_bytes(b"".join(whole[:-1]))  # finished, and cut short since
    decode(tmp_path, "out", resume=True, **options)
    assert sorted((tmp_path / "out").read_bytes().splitlines(keepends=True)) == sorted(whole)


def test_failed_samples_count_as_they_did(tmp_path, monkeypatch):
    forward = SimulatedModel.forward

    def failing(model, batch):
        output = forward(model, batch)
        return dataclasses.replace(output, failed=dict.fromkeys(batch.slots.tolist(), "no"))

    monkeypatch.setattr(SimulatedModel, "forward", failing)
    sampled = [{**SAMPLED, "n": 3, "id": name} for name in "abcd"]
    options = {"requests": lines_of(*sampled), "max_errors": 2}
    assert decode(tmp_path, "out", **options) == 1
    out = tmp_path / "out"
    before = out.read_bytes()
    assert before.count(b"\n") == 6
    trace = (tmp_path / "out.trace").read_bytes()
    assert trace.count(b'"error":{"code":"model-error","message":"step 0: no"}') >= 3
    for num_lines in (6, 4, 2):
        pretend_to_have_stopped(out, b"".join(before.splitlines(keepends=True)[:num_lines]))
        decode(tmp_path, "out", resume=True, **options)
        assert out.read_bytes() == before
        assert (tmp_path / "out.trace").read_bytes() == trace


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"defaults": {"seed": 5}}, "--seed was not set, now it is 5"),
        ({"model_settings": {"seed": 5}}, "--model: seed was 0, now it is 5"),
        ({"requests": REQUESTS + b"\n"}, "the input is different or has changed"),
        ({"keep_order": True}, "--keep-order was off, now it is on"),
        ({"batch": 8}, "--batch was 3, now it is 8"),
        ({"model": "other_model:f"}, "--model was simulated, now it is other_model:f"),
        ({"follow": True}, "--resume cannot be used with --follow"),
        ({"output": None}, "needs --output FILE"),
    ],
)
def test_another_run_is_not_resumed(tmp_path, whole, monkeypatch, change, reason):
    (tmp_path / "other_model.py").write_text("def f(rows): return [1] * len(rows)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BatchdecodeError, match=reason):
        decode(tmp_path, **({"output": "whole", "resume": True} | change))
    assert (tmp_path / "whole").read_bytes() == whole


def test_results_without_a_record_are_not_resumed(tmp_path, whole):
    record = (tmp_path / "whole.run.json").read_text()
    (tmp_path / "whole.run.json").unlink()
    with pytest.raises(ResumeError, match=r"whole.run.json is missing.*restore it"):
        decode(tmp_path, "whole", resume=True)
    for text in ("{}", "", "nonsense"):
        (tmp_path / "whole.run.json").write_text(text)
        message = r"cannot read .*whole.run.json.*it is damaged.*restore it.*rename it.*--force"
        with pytest.raises(ResumeError, match=message):
            decode(tmp_path, "whole", resume=True)
    (tmp_path / "whole.run.json").write_text(record.replace('"step_time": {}', '"step_time": 5'))
    with pytest.raises(ResumeError, match="its `step_time` is not what this version"):
        decode(tmp_path, "whole", resume=True)


def test_results_are_not_overwritten_unless_that_is_asked_for(tmp_path, whole):
    out = tmp_path / "whole"
    pretend_to_have_stopped(out, whole[:2000])
    with pytest.raises(ResumeError, match="add --resume to continue it, or --force to start"):
        decode(tmp_path, "whole")
    assert out.read_bytes() == whole[:2000]
    decode(tmp_path, "whole", resume=True)
    with pytest.raises(ResumeError, match="contains the complete results of a run: --force"):
        decode(tmp_path, "whole", model_settings={"seed": 1})
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
    decode(tmp_path, "whole", model_settings={"seed": 1}, force=True)
    assert sorted(out.read_bytes().splitlines()) != sorted(whole.splitlines())


def test_a_pipe_is_not_resumed_and_its_results_are_not_lost(tmp_path, whole):
    said = refused("run", "-o", "whole", "--resume", cwd=tmp_path, stdin=REQUESTS)
    assert "a pipe cannot be read again" in said
    done = batchdecode("run", "-o", "whole", "--force", cwd=tmp_path, stdin=REQUESTS)
    assert (done.returncode, "continue with" in done.stderr) == (2, False)
    done = batchdecode("run", "-o", "whole", "--keep-going", cwd=tmp_path, stdin=REQUESTS)
    assert done.returncode == 2
    assert "did not finish: --force replaces them" in done.stderr
    (tmp_path / "whole").unlink()
    for more in ([], ["--force"]):
        command = ["run", "-o", "whole", "--keep-going", *more]
        assert batchdecode(*command, cwd=tmp_path, stdin=REQUESTS).returncode == 1
    assert '"finished": true' in (tmp_path / "whole.run.json").read_text()


def test_whatever_ends_it_and_whenever_the_run_can_be_continued(tmp_path):
    draw = random.Random(1)
    decode(tmp_path, "whole", requests=VARIED)
    whole = (tmp_path / "whole").read_bytes()
    arguments = ["run", "in.jsonl", "-o", "out", "-b", "3", "--keep-going", "-q"]
    slowly = [*arguments, "--step-delay", "0.002", "--trace", "trace", "--resume"]
    for _ in range(2):
        (tmp_path / "trace").unlink(missing_ok=True)
        process = start(*slowly, cwd=tmp_path)
        while process.poll() is None and not (tmp_path / "trace").exists():
            time.sleep(0.01)
        time.sleep(draw.random() * 0.3)
        process.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        stderr = process.communicate()[1].decode()
        if process.returncode in (130, 143):
            assert f"continue with: batchdecode {' '.join(slowly)}" in stderr
        lines = (tmp_path / "out").read_bytes()
        assert lines == lines[: lines.rfind(b"\n") + 1]
        assert set(lines.splitlines()) <= set(whole.splitlines())
    assert batchdecode(*arguments, cwd=tmp_path).returncode == 1
    out = (tmp_path / "out").read_bytes()
    assert sorted(out.splitlines()) == sorted(whole.splitlines())
