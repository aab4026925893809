import json
import os
import pty
from contextlib import suppress
from pathlib import Path

import pytest
from process import batchdecode, lines_of, refused, results, start, workload, write

NASTY = "\x9b2Ja\u202eb\u2066"


@pytest.mark.parametrize(("locale", "mark"), [("C", "* 1 ok   "), ("C.UTF-8", "✓ 1 ok   ")])
def test_the_summary_is_ascii_where_the_locale_is(locale, mark):
    done = batchdecode("run", "-o", "/dev/null", stdin=b'{"prompt": "a"}', LC_ALL=locale)
    assert done.stderr.startswith(mark)
    assert done.stderr.isascii() == (locale == "C")


@pytest.fixture
def requests(tmp_path):
    return write(tmp_path / "requests.jsonl", lines_of(*workload(60)))


@pytest.mark.parametrize(
    "command",
    [
        ["run", "-q"],
        ["check", "--json"],
        ["trace", "--format", "chrome"],
        ["verify", "--json", "--settings", "1"],
        ["compare", "--json", "-q"],
    ],
)
def test_descriptor_1_of_a_model_and_its_child_processes_is_stderr(tmp_path, command):
    (tmp_path / "noisy.py").write_text(
        "import ctypes, os, subprocess\n"
        "def next_tokens(rows):\n"
        "    os.write(1, b'by descriptor\\n')\n"
        "    subprocess.run(['echo', 'by a child'], check=True)\n"
        "    ctypes.CDLL(None).puts(b'by a library')\n"
        "    return [5] * len(rows)\n"
        "os.write(1, b'while it loads\\n')\n"
    )
    path = write(tmp_path / "in", lines_of({"id": "a", "prompt": "x", "max_tokens": 2}))
    done = batchdecode(*command, path, "--model", "noisy:next_tokens", cwd=tmp_path)
    assert json.loads(done.stdout)
    assert "while it loads\n" in done.stderr
    if command[0] != "check":
        for line in ("by descriptor\n", "by a child\n", "by a library\n"):
            assert line in done.stderr


@pytest.mark.parametrize("command", [["run", "-q"], ["trace", "--format", "chrome"]])
def test_what_a_model_prints_while_the_process_ends_is_on_stderr(tmp_path, command):
    (tmp_path / "late.py").write_text(
        "import atexit, ctypes, os\n"
        "atexit.register(print, 'at exit')\n"
        "atexit.register(os.write, 1, b'by descriptor\\n')\n"
        "atexit.register(ctypes.CDLL(None).puts, b'by a library')\n"
        "def next_tokens(rows):\n    return [5] * len(rows)\n"
    )
    path = write(tmp_path / "in", lines_of({"id": "a", "prompt": "x", "max_tokens": 2}))
    done = batchdecode(*command, path, "--model", "late:next_tokens", cwd=tmp_path)
    assert json.loads(done.stdout)
    for line in ("at exit\n", "by descriptor\n", "by a library\n"):
        assert line in done.stderr


def on_a_terminal(*arguments, cwd):
    """Run the command with stdout on a terminal; return what that was sent."""
    ours, theirs = pty.openpty()
    process = start(*arguments, cwd=cwd, stdout=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # that is how the end comes
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    assert process.communicate()[1] is not None
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    "command",
    [
        *(["trace", "--format", view] for view in ("steps", "csv", "chrome", "svg")),
        ["trace", "why", NASTY, "--json"],
        ["run", "-q", "--format", "jsonl"],
        ["run", "--live", "always", "--format", "jsonl"],
        ["verify", "--json", "--settings", "1"],
    ],
)
def test_a_terminal_is_sent_nothing_that_moves_its_cursor_or_reorders_a_line(tmp_path, command):
    path = write(tmp_path / "in", lines_of({"id": NASTY, "prompt": "x", "max_tokens": 2}))
    shown = on_a_terminal(*command, path, cwd=tmp_path)
    plain = batchdecode(*command, path, cwd=tmp_path).stdout.decode()
    assert shown.replace("\n", "").isprintable()
    if "csv" in command:
        assert shown.splitlines()[1] == r"0,\x9b2Ja\u202eb\u2066,0,0,2,length,sample,0,false"
        assert NASTY in plain
    elif "svg" in command:
        assert shown == plain
    elif "chrome" in command or "--json" in command:
        assert json.loads(shown) == json.loads(plain)
    else:
        assert results(shown) == results(plain)


def test_a_dash_is_stdout_for_results_only(tmp_path, requests):
    for command in ("run", "trace"):
        to_dash = batchdecode(command, requests, "-o", "-", cwd=tmp_path)
        assert to_dash.returncode == 0
        assert to_dash.stdout == batchdecode(command, requests, cwd=tmp_path).stdout
    assert [path.name for path in tmp_path.iterdir()] == ["requests.jsonl"]


@pytest.mark.parametrize(
    "arguments",
    ["requests.jsonl -o x --trace x.run.json", "x.run.json -o x", "requests.jsonl -o link"],
)
def test_no_file_of_a_run_is_the_input_or_stands_beside_the_results(tmp_path, requests, arguments):
    (tmp_path / "x.run.json").write_bytes(Path(requests).read_bytes())
    (tmp_path / "link").symlink_to(requests)
    assert "they must be different files" in refused("run", *arguments.split(), cwd=tmp_path)


@pytest.mark.parametrize("is_gone", [True, False])
def test_nobody_who_reads_stderr_stops_nothing(tmp_path, requests, is_gone):
    (tmp_path / "chatty.py").write_text(
        "def next_tokens(rows):\n    print('thinking')\n    return [5] * len(rows)\n"
    )
    read_end, write_end = os.pipe()
    stderr = write_end if is_gone else os.open("/dev/full", os.O_WRONLY)
    os.close(read_end)
    command = ["run", requests, "--live", "always", "--model", "chatty:next_tokens"]
    process = start(*command, cwd=tmp_path, stderr=stderr)
    assert len(process.communicate()[0].splitlines()) == 60
    assert process.returncode == 0
    os.close(write_end)


@pytest.mark.parametrize(
    "command",
    [
        *("run INPUT", "check INPUT", "trace INPUT", "schema request", "completion bash"),
        *("--version", "run --help", "demo"),
        *("run INPUT -o /dev/full", "run INPUT --trace /dev/full", "trace INPUT -o /dev/full"),
        "run INPUT -o /dev/null --summary-json /dev/full",
    ],
)
def test_a_full_disk_is_said_so(requests, command):
    with Path("/dev/full").open("wb") as full:
        process = start(*command.replace("INPUT", requests).split(), stdout=full)
        stderr = process.communicate()[1].decode()
    assert process.returncode == 1
    name = "/dev/full" if "/dev/full" in command else "stdout"
    assert f"error: cannot write {name}: No space left on device" in stderr
    assert "Traceback" not in stderr


def test_a_closed_pipe_ends_the_run_quietly_and_the_trace_is_whole(tmp_path):
    path, trace = write(tmp_path / "in", lines_of(*workload(3000))), tmp_path / "trace"
    process = start("run", path, "--trace", trace)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == -13
    assert all(json.loads(line) for line in trace.read_bytes().splitlines())
