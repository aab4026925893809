import json
import re
import subprocess

import pytest
from examples import mostly_heavy
from process import COMMAND, ENVIRONMENT, batchdecode, lines_of

from cli import main


@pytest.mark.parametrize("kind", ["request", "result", "trace"])
def test_schemas_are_json(kind):
    assert json.loads(batchdecode("schema", kind).stdout)["$schema"]


def with_closed(descriptor, *command):
    """Return status and stderr of a command that was started with a descriptor closed."""
    shell = ["sh", "-c", f'exec "$@" {descriptor}>&-', "sh"]
    done = subprocess.run(
        [*shell, *COMMAND, *(command or ["run", "/dev/stdin" if descriptor else "-"])],
        input=lines_of({"prompt": "x"}),
        env=ENVIRONMENT,
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stderr.decode()


def test_a_closed_stdin_or_stdout_is_an_error():
    assert with_closed(0) == (2, "error: cannot read <stdin> after line 0: Bad file descriptor\n")
    for command in ((), ("--version",), ("run", "--help"), ("demo",), ("help",)):
        lost = with_closed(1, *command)
        assert lost == (1, "error: cannot write stdout: Bad file descriptor\n"), command
    assert with_closed(2) == (0, "")


@pytest.mark.heavy
def test_so_it_is_for_every_command():
    for command in (["trace"], ["trace", "-"]):
        assert with_closed(0, *command) == (2, "error: cannot read <stdin>: Bad file descriptor\n")
    assert with_closed(1, "trace", "-", "--format", "gantt")[0] == 1
    for command in (["check", "-"], ["trace", "-"], ["schema", "request"], ["completion", "bash"]):
        status, stderr = with_closed(1, *command)
        assert (status, stderr) == (1, "error: cannot write stdout: Bad file descriptor\n")


def test_run_on_a_terminal_without_input_shows_its_help(tty):
    done = subprocess.run(
        [*COMMAND, "run"], stdin=tty[1], env=ENVIRONMENT, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"Usage: batchdecode run")


@pytest.mark.parametrize("most", mostly_heavy([7, 8, 9], 8))
def test_too_many_open_files_are_told_with_the_limit_and_no_file_of_ours(tmp_path, most):
    (tmp_path / "in").write_text('{"prompt": "x"}\n')
    limited = ["bash", "-c", f'ulimit -n {most}; exec "$@"', "bash", *COMMAND]
    done = subprocess.run(
        [*limited, "run", "in", "-o", "out", "-q"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"error: too many files are open at once: `ulimit -n` allows {most}"
    )


WORDS = lines_of(*({"prompt": "a", "max_tokens": 400, "ignore_eos": True} for _ in range(20_000)))


def limited(limit, *arguments, stdin):
    return subprocess.run(
        ["bash", "-c", f'ulimit {limit}; exec "$@"', "bash", *COMMAND, *arguments],
        env=ENVIRONMENT,
        input=stdin,
        capture_output=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("limit", "arguments", "said"),
    [
        ("-n 24", ["run", "--workers", "8"], r"--workers 8 opens up to \d+ files, but `ulimit -n`"),
        ("-v 60000", ["check"], "cannot load a library: "),
    ],
)
def test_too_small_a_limit_is_one_line(limit, arguments, said):
    done = limited(limit, *arguments, stdin=WORDS[:200])
    stderr = done.stderr.decode()
    assert done.returncode in {1, 2}
    assert "Traceback" not in stderr
    assert re.search(f"^error: {said}", stderr, re.MULTILINE)


@pytest.mark.parametrize(
    "error", [MemoryError(), MemoryError("32 MiB"), RuntimeError("can't start new thread")]
)
def test_a_lack_of_memory_is_one_line_wherever_it_shows(error, monkeypatch, capsys):
    def carry_out(_arguments):
        raise error

    monkeypatch.setattr(main, "_carry_out", carry_out)
    monkeypatch.setattr(main, "_occupy_standard_descriptors", lambda: None)
    monkeypatch.setattr("cli.signals.end_stdout", lambda: None)
    monkeypatch.setattr(main.gc, "disable", lambda: None)
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)  # SIGPIPE would end the tests
    with pytest.raises(SystemExit) as left:
        main.main()
    assert left.value.code == 1
    assert capsys.readouterr().err.startswith("error: not enough memory; ")
