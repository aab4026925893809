"""Results as text: on a terminal, and wherever --format text asks for it."""

import json
import re

import pytest
from command_terminal import CommandTerminal
from process import batchdecode, lines_of

MODEL = r"""
TEXTS = {b"ansi": "a\x1b[2Jb\u202ec", b"two": "one\n\n  two\tx", b"none": "", b"space": "\n x \n"}

def next_tokens(rows):
    answers = []
    for row in rows:
        name, _, done = bytes(row).partition(b":")
        if name == b"fails":
            raise ValueError("\x07")
        text = TEXTS.get(name, "word " * 40).encode()
        answers.append((text + b"|")[len(done)])
    return answers
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "written.py").write_text(MODEL)
    return tmp_path


def shown(folder, *prompts, options=(), **environment):
    requests = [
        {
            "id": f"{name}{' id' * (name == 'two')}",
            "prompt": f"{name}:",
            "max_tokens": most,
            "stop": "|",
        }
        for name, most in prompts
    ]
    command = ["run", "-q", "--model", "written:next_tokens", "-", *options]
    done = batchdecode(*command, cwd=folder, stdin=lines_of(*requests), **environment)
    return done.stdout.decode(), done.stderr


@pytest.mark.parametrize(
    ("name", "most", "text"),
    [
        ("ansi", 20, "ansi  a\\x1b[2Jb\\u202ec\n"),
        ("two", 20, "two id  one\n\n    two   x\n"),
        ("none", 20, "none  [no text]\n"),
        ("space", 20, "space  x\n"),
        ("words", 9, "words  word word… [cut after 9 tokens]\n"),
        ("words", 1, "words  w… [cut after 1 token]\n"),
        ("words", 0, "words  [no text]\n"),
        (
            "fails",
            9,
            "fails  error (model-error): step 0: written:next_tokens raised ValueError: \\x07\n",
        ),
    ],
)
def test_a_result_as_text(folder, name, most, text):
    assert shown(folder, (name, most), options=["--format", "text"])[0] == text


def test_without_unicode_text_is_ascii(folder):
    text, _ = shown(folder, ("words", 9), options=["--format", "text"], LC_ALL="C")
    assert text == "words  word word... [cut after 9 tokens]\n"


@pytest.mark.parametrize("options", [[], ["--format", "jsonl"]])
def test_a_pipe_gets_json_lines(folder, options):
    assert json.loads(shown(folder, ("two", 20), options=options)[0])["text"] == "one\n\n  two\tx"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-o out", "error: --format text is for stdout: --output gets JSON lines, which --resume"),
        ("--stream", "error: --format text cannot be used with --stream: a stream has JSON"),
    ],
)
def test_text_is_for_reading_only(folder, options, message):
    text, said = shown(folder, ("two", 20), options=["--format", "text", *options.split()])
    assert (text, message in said) == ("", True)
    assert not (folder / "out").exists()


def test_the_format_of_results_is_not_that_of_a_trace(folder):
    (folder / "config.yaml").write_text("format: text\n")
    (folder / "in").write_bytes(lines_of({"prompt": "two:", "max_tokens": 20, "stop": "|"}))
    given = ("in", "--model", "written:next_tokens", "--config", "config.yaml")
    done = batchdecode("run", "-q", *given, cwd=folder, BATCHDECODE_FORMAT="gantt")
    assert done.stdout == b"1  one\n\n    two   x\n"
    for options in ("-o", "out"), ("--stream",):
        done = batchdecode("run", "-q", *given, *options, cwd=folder)
        lines = (folder / "out").read_bytes() if "-o" in options else done.stdout
        assert (done.returncode, lines[:1]) == (0, b"{"), done.stderr
    done = batchdecode("trace", *given, cwd=folder, BATCHDECODE_FORMAT="csv")
    assert done.stdout.startswith(b"slot,")


def screen_of(folder, *options):
    """The lines of a terminal of 80 columns after a run of three requests, and those below."""
    requests = lines_of(
        *(
            {"id": name, "prompt": f"{name}:", "max_tokens": 150, "stop": "|"}
            for name in ("words", "two", "none")
        )
    )
    (folder / "in").write_bytes(requests)
    arguments = ("run", "in", "--model", "written:next_tokens", "-b", "2", *options)
    with CommandTerminal(*arguments, folder=folder) as terminal:
        assert terminal.ended() == 0
        return [line.rstrip() for line in terminal.screen.lines()]


@pytest.mark.parametrize("live", ["never", "auto"])
def test_a_terminal_shows_wrapped_text(folder, live):
    lines = screen_of(folder, "--live", live)
    start = lines.index("two  one")
    assert lines[start : start + 7] == [
        "two  one",
        "",
        "    two   x",
        "none  [no text]",
        "words  word word word word word word word word word word word word word word",
        "  word word word word word word word word word word word word word word word",
        "  word… [cut after 150 tokens]",
    ]
    assert any(line.startswith("✓ 3 ok") for line in lines[start + 7 :])


def test_a_narrow_terminal_wraps_text_itself(folder):
    prompt = ("-p", "words:", "--model", "written:next_tokens", "--max-tokens", "30")
    command = ("run", *prompt, "-q", "--live", "never")
    with CommandTerminal(*command, folder=folder, columns=10) as terminal:
        assert terminal.ended() == 0
        text = "1  word word word word word word… [cut after 30 tokens]"
        assert terminal.written.decode() == f"{text}\r\n"


@pytest.mark.parametrize("is_text", [True, False])
def test_a_stopped_run_shows_the_texts_so_far(folder, is_text):
    command = ["run", "-p", "words:", "-p", "more:", "--model", "written:next_tokens", "-b", "1"]
    command += ["--max-tokens", "150", "--live", "never", "--step-delay", "0.05", "--trace", "t"]
    options = [] if is_text else ["--format", "jsonl"]
    with CommandTerminal(*command, *options, folder=folder) as terminal:
        terminal.wait_for(
            lambda: (folder / "t").exists() and b"admit" in (folder / "t").read_bytes()
        )
        terminal.press(b"\x03")
        assert terminal.ended() == 130
        shown = terminal.screen.text()
    found = re.search(r"1  ([word ]+)… \[stopped after (\d+) tokens?\]\s+■ ", shown)
    assert bool(found) == is_text, shown
    assert found is None or found[1] == ("word " * 40)[: int(found[2])].strip()
    assert "2  " not in shown.partition("■")[0]


def test_format_jsonl_and_streams_on_a_terminal_stay_json(folder):
    for options in (["--format", "jsonl"], ["--stream"]):
        lines = screen_of(folder, "--live", "never", *options)
        assert any(line.startswith('{"') for line in lines), lines
        assert "none  [no text]" not in lines
