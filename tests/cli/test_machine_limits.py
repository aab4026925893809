"""A machine that allows too little, or kills a process, gets one line and leaves no files."""

import re
import subprocess

import pytest
from process import COMMAND, ENVIRONMENT, lines_of

from cli import main

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
        ("-n 24", ["run", "--workers", "8"], r"--workers 8 opens up to \d+ files, and `ulimit -n`"),
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
