import subprocess

import pytest
from command_server import command_line
from process import batchdecode, lines_of
from reference_schedule import DESIGN_JOBS, play

from batcher.trace.files import encode_events

# The command leaves its files open to the end of the process, which here goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

DESIGN_TRACE = encode_events(play(DESIGN_JOBS, 2).events)


@pytest.fixture
def design_trace(tmp_path):
    path = tmp_path / "run.trace.jsonl"
    path.write_bytes(DESIGN_TRACE)
    return path


def command(*arguments, **options):
    return subprocess.run(
        [*command_line(), "trace", *arguments],
        capture_output=True,
        timeout=60,
        check=False,
        **options,
    )


def test_bad_requests_are_reported_as_by_run(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"promt":"x"}\n')
    done = command(str(path))
    assert done.returncode == 2
    assert b"did you mean `prompt`?" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            b'{"id":"a","index":0,"text":"","tokens":[],"finish_reason":"length"}',
            "holds results: give the trace of that run",
        ),
        (b'{"id":"x","custom_id":"a","response":{},"error":null}', "holds results"),
        (
            b'{"event":"token","step":0,"id":"a","index":0,"tokens":[5],"text":"x"}',
            "holds a stream: give the trace of that run (run --trace FILE) or its requests",
        ),
        (b'{"event":"arrive","step":0}', "a trace whose first line"),
        (b'{"name":"x","id":3}', "neither a trace nor requests: its first line has no prompt"),
        (b"[1, 2]", "neither a trace nor requests"),
        (b"\x89PNG\r\n", "neither a trace nor requests"),
        (b"Dear reader,", "neither a trace nor requests"),
    ],
)
def test_what_is_neither_trace_nor_requests_is_said_in_one_line(tmp_path, line, said):
    path = tmp_path / "something"
    path.write_bytes(b"".join([line, b"\n"]) * 60)
    done = command(str(path))
    stderr = done.stderr.decode()
    assert done.returncode == 2
    assert said in stderr
    assert stderr.count("\n") == 1
    assert "--keep-going" not in stderr


def test_a_file_of_chats_holds_requests(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"messages":[{"role":"user","content":"Hi"}],"ignore_eos":true}\n')
    rows = command(str(path), "--format", "csv").stdout.splitlines()
    assert rows[1:] == [b"0,1,0,0,4096,length,sample,0,false"]


def test_bad_lines_of_requests_are_reported_or_shown_as_rejected(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"id":"a","prompt":"x","max_tokens":2,"ignore_eos":true}\n{"prompt":}\n')
    done = command(str(path))
    assert done.returncode == 2
    assert b"error[invalid-json]" in done.stderr
    assert b"--keep-going to skip" in done.stderr
    done = command(str(path), "--format", "csv", "--keep-going")
    assert done.returncode == 0
    assert b"error[invalid-json]" in done.stderr
    assert done.stdout.splitlines()[1:] == [b"0,a,0,0,2,length,sample,0,false"]


def test_how_requests_are_run_comes_from_the_configuration(tmp_path, design_trace):
    path, settings = tmp_path / "requests.jsonl", tmp_path / "settings.yaml"
    path.write_bytes(b'{"prompt":"x","max_tokens":9}\n' * 3)
    settings.write_text("batch: 2\noutput: precious\nkeep-order: true\nsimulated:\n  eos_rate: 0\n")
    rows = command(str(path), "--format", "csv", "--config", str(settings)).stdout.splitlines()
    assert rows[1:] == [
        b"0,1,0,0,9,length,sample,0,false",
        b"1,2,0,0,9,length,sample,0,false",
        b"0,3,0,9,18,length,sample,0,false",
    ]
    rows = command(str(path), "--format", "csv", "--config", str(settings), "-b", "3").stdout
    assert rows.splitlines()[-1].startswith(b"2,3,0,0,9")
    done = command(str(design_trace), "--config", str(settings))
    assert done.returncode == 2
    assert b"--config is for requests" in done.stderr
    settings.write_text("width: 90\n")
    assert b"unknown setting width" in command(str(path), "--config", str(settings)).stderr


@pytest.mark.parametrize("bad", ["nothing", "[]", '{"x":1}', '{"event":"x"}', "\x00"])
def test_with_keep_going_the_first_line_may_be_any_bad_line(tmp_path, bad):
    (tmp_path / "in").write_bytes(lines_of(bad, {"id": "a", "prompt": "x", "max_tokens": 2}))
    done = batchdecode("trace", "in", "--format", "spans", "--keep-going", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b'"id":"a"' in done.stdout
