"""`batchdecode help TOPIC`: from a word to where it is told, out of the pages as they are."""

import os
import pty
import re
from functools import cache
from pathlib import Path

import pytest
from process import COMMAND, ENVIRONMENT, batchdecode, refused

from batcher.errors import BatchdecodeError
from batcher.request import REQUEST_FIELDS
from batcher.settings import SETTINGS
from cli.commands import COMMANDS, all_options
from cli.commands import help as topics
from cli.commands.help import find

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {path.stem: path for path in DOCS.rglob("*.md") if path.stem != "README"}


KEPT = {name: cache(getattr(topics, name)) for name in ("topics", "_key")}


@pytest.fixture
def pages_read_once(monkeypatch):
    for name, kept in KEPT.items():
        monkeypatch.setattr(topics, name, kept)


def test_every_page_is_listed_on_a_line_of_its_own():
    lines = batchdecode("help").stdout.decode().splitlines()
    listed = [line.split()[0] for line in lines if re.match(r"  [a-z-]+  +\S", line)]
    assert sorted(listed) == sorted(PAGES)
    assert max(map(len, lines)) <= 80


@pytest.mark.usefixtures("pages_read_once")
def test_every_page_command_option_and_field_is_a_topic():
    for page, path in PAGES.items():
        assert find(page)[0].text == path.read_text(), page
    for name in COMMANDS:
        assert find(name)
    options = {max(param.opts, key=len) for _, param in all_options()}
    for option in options | {setting.option for setting in SETTINGS.values()}:
        assert not option.startswith("--") or find(option), option
    for field in REQUEST_FIELDS:
        assert any(topic.page == "requests-and-results" for topic in find(field)), field


@pytest.mark.parametrize(
    ("words", "page", "told"),
    [
        ("run", "cli", "## run\n"),
        ("trace why", "cli", "### trace why\n"),
        ("--policy", "cli", "| `--policy` NAME |"),
        ("max_tokens", "requests-and-results", "| `max_tokens` |"),
        ("Exit Codes", "streams", "## Exit codes\n"),
        ("Continuous batching", "glossary", "| continuous batching, "),
        ("ttft", "glossary", "| TTFT, "),
        ("Read a gantt", "reading-a-gantt", "# Read a gantt\n"),
        ("gantt", "reading-a-gantt", "# Read a gantt\n"),
        ("smollm2", "checkpoints", "# Checkpoints\n"),
        ("prompts", "first-file", "# Your first file\n"),
        ("model", "checkpoints", "# Checkpoints\n"),
        ("kv", "kv-blocks", "# KV blocks\n"),
        ("ctrl-c", "stop-and-resume", "# Stop and resume\n"),
        ("resume", "stop-and-resume", "# Stop and resume\n"),
        ("slot", "glossary", "| slot |"),
        ("trace", "cli", "## trace\n"),
        ("server", "serve", "# Serve, and use servers\n"),
        ("learn", "learn", "- `batchdecode help kv-blocks`: KV blocks\n"),
    ],
)
def test_words_lead_to_where_they_are_told(words, page, told):
    best = find(words)[0]
    assert best.page == page
    assert told in best.text


def test_a_topic_goes_to_a_pipe_as_markdown_and_an_unknown_one_suggests():
    assert refused("help", "schedulng") == (
        "error: no topic 'schedulng'; did you mean: scheduling? "
        "(batchdecode help lists all pages)\n"
    )
    assert "pages that mention it: " in batchdecode("help", "sjf").stderr
    assert batchdecode("help", "xyzzy").stderr == (
        "error: no topic 'xyzzy' (batchdecode help lists all pages)\n"
    )
    assert "no topic ''" in batchdecode("help", "").stderr
    told = batchdecode("help", "--kv-blocks").stdout.decode()
    assert told.startswith("### Scheduling and time\n\n| option | default | meaning |\n")
    assert "- `batchdecode help cli`\n" in told
    for title in re.findall(r"`batchdecode help (.*)`", told):
        assert find(title)


def read_on_a_terminal(*topics, keys=b"", **environment):
    """Return what a terminal shows of a topic, or of them all, and the status.

    keys: what is typed when it says WAITS.
    """
    process, terminal = pty.fork()
    if not process:
        environment = ENVIRONMENT | {"TERM": "xterm-256color"} | environment
        os.execve(COMMAND[0], [*COMMAND, "help", *topics], environment)
    shown = b""
    try:
        while read := os.read(terminal, 65536):
            shown += read
            if keys and b"WAITS" in shown:
                os.write(terminal, keys)
                keys = b""
    except OSError:  # it has ended
        pass
    os.close(terminal)
    return shown.decode(), os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def without_styles(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture
def pager(tmp_path):

    def pager(line):
        path = tmp_path / "pager"
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return str(path)

    return pager


def test_the_pager_gets_it_laid_out_and_ctrl_c(pager):
    shown, status = read_on_a_terminal("policies", PAGER=pager("echo PAGED\nexec cat"))
    text = without_styles(shown)
    assert status == 0
    assert text.startswith("PAGED\r\n")
    assert "](" not in text
    assert "\x1b[" in shown
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    shown, status = read_on_a_terminal("input index", PAGER="no-such-pager")
    assert status == 0
    assert "input index" in without_styles(shown)
    waiting = pager("trap 'echo INTERRUPTED; exit' INT\necho WAITS\nwhile :; do sleep 0.05; done")
    shown, status = read_on_a_terminal("policies", keys=b"\x03", PAGER=waiting)
    assert status == 0
    assert "INTERRUPTED" in shown


@pytest.mark.parametrize(
    ("page", "lines"),
    [
        ("verify", ["1. each request alone --> equal?", "equal? -- yes --> proven"]),
        ("architecture", ["[*] --> pending", "pending --> waiting: arrive"]),
    ],
)
def test_a_diagram_is_shown_as_lines_of_text(page, lines, pager):
    text = without_styles(read_on_a_terminal(page, PAGER=pager("exec cat"))[0])
    assert set(lines) <= {line.strip() for line in text.splitlines()}
    assert "flowchart" not in text
    assert "stateDiagram" not in text


def test_without_the_pages_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(topics, "_PACKAGE", tmp_path / "cli")
    with pytest.raises(BatchdecodeError, match="the documentation is not installed"):
        find("run")
