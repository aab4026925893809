"""Resuming names what no run has written, drops it if asked to, and tries again what has failed."""

import gzip
import json
import time

import pytest
from process import batchdecode, lines_of, pretend_to_have_stopped, start, workload

from cli.run.files import ResumeError
from cli.run.run import run
from cli.run.run_options import RunOptions
from cli.signals import StopSignals

REQUESTS = lines_of(
    *workload(12),
    "not a request",
    {"id": "samples", "prompt": "Once", "n": 3, "temperature": 1.0, "max_tokens": 6},
    {"id": "last", "prompt": "Once", "max_tokens": 5},
)
FLAKY = """
from pathlib import Path

def next_tokens(rows):
    with open("calls", "a") as calls:
        calls.write("x" * len(rows))
    if Path("broken").exists() and any(row[0] % 10 == 9 for row in rows):
        raise ValueError("out of order")
    return [len(row) % 5 + 1 for row in rows]
"""


def decode(path, output="out", **options):
    (path / "in").write_bytes(REQUESTS)
    settings = {"batch": 3, "keep_going": True, "quiet": True}
    with StopSignals() as stop:
        names = {"input": [f"{path}/in"], "output": f"{path}/{output}"}
        return run(RunOptions(**names, **(settings | options)), stop, ["continue"])


def read(path):
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def leave(path, lines):
    data = b"".join(lines)
    pretend_to_have_stopped(path, gzip.compress(data) if path.suffix == ".gz" else data)


def foreign(line):
    return line.replace(b'"id":"', b'"id":"somebody-', 1)


def shortened(line):
    row = json.loads(line)
    row["tokens"].pop()
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


EDITS = {
    "another id": (foreign, "the result of 'somebody-r"),
    "another text": (lambda line: line.replace(b'"text":"', b'"text":"!', 1), "was changed"),
    "fewer tokens": (shortened, "was changed"),
    "another slot": (lambda line: line.replace(b'"slot":', b'"slot":9', 1), "was changed"),
    "blank": (lambda _: b"\n", "it is blank"),
    "zeroed": (lambda line: b"\0" * (len(line) - 1) + b"\n", "not a result: it is not JSON"),
    "after a blank line": (lambda line: b"\n" + line, "it is blank"),
    "twice": (lambda line: line * 2, "one of two results with index 0 of request 'r"),
}


HOW = [("out", False), ("out.gz", True), ("out", True), ("out.gz", False)]


@pytest.mark.parametrize("case", EDITS)
def test_what_no_run_has_written_is_named_and_dropped_if_asked_to(tmp_path, case):
    edit, reason = EDITS[case]
    name, keep_order = HOW[[*EDITS].index(case) % len(HOW)]
    decode(tmp_path, name, keep_order=keep_order)
    whole = read(tmp_path / name)
    lines = whole.splitlines(keepends=True)
    place = next(n for n in (4, 5, 6) if b'"finish_reason":"length"' in lines[n])
    leave(tmp_path / name, [*lines[:place], edit(lines[place]), *lines[place + 1 : -2]])
    before = (tmp_path / name).read_bytes()
    number = place + 1 + (reason.startswith("one"))
    with pytest.raises(ResumeError, match=rf"line {number}: .*{reason}.*--resume=repair"):
        decode(tmp_path, name, keep_order=keep_order, resume=True)
    assert (tmp_path / name).read_bytes() == before
    decode(tmp_path, name, keep_order=keep_order, resume=True, repair=True)
    mended = read(tmp_path / name)
    assert sorted(mended.splitlines()) == sorted(whole.splitlines())
    assert mended == whole or not keep_order


def test_without_sums_of_the_lines_nothing_is_resumed(tmp_path):
    decode(tmp_path)
    leave(tmp_path / "out", [(tmp_path / "out").read_bytes()])
    (tmp_path / "out.run.sums").unlink()
    with pytest.raises(ResumeError, match=r"out.run.sums is missing.*restore it.*rename.*--force"):
        decode(tmp_path, resume=True)


def test_resume_is_a_flag_that_may_say_how(tmp_path):
    (tmp_path / "in").write_bytes(REQUESTS)
    command = ["run", "-q", "--keep-going", "-o", "out"]
    batchdecode(*command, "in", cwd=tmp_path)
    whole = (tmp_path / "out").read_bytes()
    leave(tmp_path / "out", [b"\n", whole])
    done = batchdecode(*command, "--resume", "in", cwd=tmp_path)
    assert (done.returncode, "line 1: it is blank" in done.stderr) == (2, True)
    done = batchdecode(*command, "--resume=drop", "in", cwd=tmp_path)
    assert (done.returncode, "--resume or --resume=repair" in done.stderr) == (2, True)
    assert batchdecode(*command, "--resume=repair", "in", cwd=tmp_path).returncode == 1
    assert (tmp_path / "out").read_bytes() == whole


@pytest.fixture
def flaky(tmp_path, monkeypatch):
    (tmp_path / "flaky_model.py").write_text(FLAKY)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_bytes(
        lines_of(*[r | {"prompt": r["prompt"] * (i % 3 + 1)} for i, r in enumerate(workload(40))])
    )

    def execute(output, *more, **pipes):
        command = ["run", "in", "-q", "-b", "3", "--model", "flaky_model:next_tokens"]
        run_it = start if pipes else batchdecode
        return run_it(*command, "-o", output, *more, cwd=tmp_path, **pipes)

    return execute


def outputs(path):
    return [(row["id"], row["tokens"], row["finish_reason"]) for row in rows(path)]


def rows(path):
    return [json.loads(line) for line in read(path).splitlines()]


@pytest.mark.parametrize(("name", "order"), [("out.gz", []), ("out", ["--keep-order"])])
def test_what_has_failed_is_decoded_again_and_nothing_else(tmp_path, flaky, name, order):
    assert flaky("whole", *order).returncode == 0
    (tmp_path / "broken").touch()
    assert flaky(name, *order).returncode == 1
    kept = [row for row in rows(tmp_path / name) if row["finish_reason"] != "error"]
    assert 0 < len(kept) < 40
    (tmp_path / "broken").unlink()
    (tmp_path / "calls").unlink()
    assert flaky(name, *order, "--resume").returncode == 1
    assert not (tmp_path / "calls").exists()
    done = flaky(name, *order, "--resume", "--retry-failed")
    assert done.returncode == 0, done.stderr
    num_tokens = sum(len(row["tokens"]) for row in rows(tmp_path / name))
    kept_tokens = sum(len(row["tokens"]) for row in kept)
    assert len((tmp_path / "calls").read_text()) == num_tokens - kept_tokens
    assert all(row in rows(tmp_path / name) for row in kept)
    again, whole = outputs(tmp_path / name), outputs(tmp_path / "whole")
    assert sorted(again) == sorted(whole)
    assert again == whole or not order


FLAKY_SAMPLES = """
from pathlib import Path
from msgspec.structs import replace
from batcher import SimulatedModel

class Model(SimulatedModel):
    def forward(self, batch):
        output = super().forward(batch)
        if Path("broken").exists():  # the samples of "best" that win, and all of "failed"
            output.failed.update({slot: "broken" for slot in batch.slots.tolist() if slot > 1})
        return output
"""


@pytest.mark.parametrize("order", [[], ["--keep-order"]])
def test_what_is_best_of_samples_that_failed_unseen_is_decoded_again(tmp_path, order):
    (tmp_path / "flaky_model.py").write_text(FLAKY_SAMPLES)
    sampled = {"prompt": "Once", "temperature": 1.0, "max_tokens": 6}
    requests = [{**sampled, "id": f"best{i}", "best_of": 5, "seed": i} for i in range(4)]
    (tmp_path / "in").write_bytes(lines_of({**sampled, "id": "n", "n": 5}, *requests))
    command = ["run", "in", "-q", "-b", "5", "--model", "flaky_model:Model", *order]
    assert batchdecode(*command, "-o", "whole", cwd=tmp_path).returncode == 0
    whole = sorted(outputs(tmp_path / "whole"))
    (tmp_path / "broken").touch()
    assert batchdecode(*command, "-o", "out", cwd=tmp_path).returncode == 1
    survivors = [row for row in outputs(tmp_path / "out") if row[0].startswith("best")]
    assert len(survivors) == 4
    assert not all(row in whole for row in survivors)
    (tmp_path / "broken").unlink()
    again = batchdecode(*command, "-o", "out", "--resume", "--retry-failed", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert sorted(outputs(tmp_path / "out")) == whole


def test_a_second_try_that_is_killed_is_continued(tmp_path, flaky):
    order = ["--keep-order"]
    assert flaky("whole", *order).returncode == 0
    (tmp_path / "broken").touch()
    assert flaky("out", *order).returncode == 1
    num_failed = sum(row["finish_reason"] == "error" for row in rows(tmp_path / "out"))
    (tmp_path / "broken").unlink()
    more = [*order, "--resume", "--retry-failed", "--step-delay", "0.01"]
    process = flaky("out", *more, stdin=None)
    while '"finished": true' in (tmp_path / "out.run.json").read_text():
        time.sleep(0.005)
    time.sleep(0.15)
    process.kill()
    process.communicate()
    (tmp_path / "calls").write_text("")
    assert flaky("out", *order, "--resume").returncode == 0
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")
    assert num_failed > 0
