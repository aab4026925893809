"""A usual command line is read without typer, and means what typer makes of it."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process import ROOT, batchdecode

from cli.commands import NAMES, command_of
from cli.usual_line import usual_values

TEXTS = ["a.jsonl", "-", "0", "1", "7", "64", "0.5", "2.25", "1e3", "-1", "99999999999", "-q", ""]
TEXTS += ["auto", "never", "fcfs", "sjf", "nan", "512MiB", "x=y", "requests é.jsonl"]


COMMANDS = {name: command_of(name) for name in NAMES}
COMMANDS |= {f"{n} {b}": c for n, above in COMMANDS.items() for b, c in above.below.items()}


@pytest.fixture(autouse=True)
def _silent_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("BATCHDECODE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("os.isatty", lambda _: False)


@st.composite
def lines(draw):
    name = draw(st.sampled_from(sorted(COMMANDS)))
    parameters = COMMANDS[name].parameters
    parts = []
    for _ in range(draw(st.integers(0, 4))):
        parameter = draw(st.sampled_from(parameters)) if parameters else None
        text = draw(st.sampled_from(TEXTS))
        flags = parameter.flags if parameter is not None else ()
        if not flags:
            parts.append(text)
            continue
        flag = draw(st.sampled_from(flags))
        has_value = parameter.kind not in {bool, bool | None}
        with_equals = [f"{flag}={text}"]
        parts += draw(st.sampled_from([[flag, text] if has_value else [flag], with_equals, [flag]]))
    return name, parts


@given(line=lines())
def test_what_is_read_as_usual_is_what_typer_reads(line):
    name, arguments = line
    command = COMMANDS[name]
    values = usual_values(command, arguments)
    if values is not None:
        context = command.parser.make_context(name, arguments)
        assert values == context.params


USUAL = [
    ["run", "a.jsonl"],
    ["run", "a.jsonl", "-o", "b.jsonl", "--quiet", "-b", "64", "--kv-blocks=40", "--seed", "3"],
    ["run", "--step-delay", "0.5", "--live", "never", "--keep-order", "-"],
    ["check", "a.jsonl", "--json"],
    ["trace", "a.jsonl", "--format", "steps"],
]


@pytest.mark.parametrize("line", USUAL, ids=" ".join)
def test_a_usual_line_is_read(line):
    assert usual_values(COMMANDS[line[0]], line[1:]) is not None


NOT_USUAL = [
    *(["--help"], ["--config", "a.yaml"], ["--bach", "4"], ["--batch", "0"], ["--batch", "four"]),
    *(["--batch", "4", "-b", "5"], ["-b4"], ["-qb", "4"], ["--quiet=1"], ["--batch"], ["--", "a"]),
    *(
        ["a", "b", "c"],
        ["--trace", "-"],
        ["--resume=repair"],
        ["--live", "often"],
        ["--seed", "-1"],
    ),
]


@pytest.mark.parametrize("line", NOT_USUAL, ids=" ".join)
def test_help_mistakes_and_what_is_rare_are_for_typer(line):
    assert usual_values(COMMANDS["run"], line) is None


def test_a_line_is_not_usual_if_the_environment_says_something(monkeypatch):
    monkeypatch.setenv("BATCHDECODE_BATCH", "2")
    assert usual_values(COMMANDS["run"], ["a.jsonl"]) is None


def test_a_person_who_gives_no_input_is_shown_the_help(monkeypatch):
    monkeypatch.setattr("os.isatty", lambda _: True)
    assert usual_values(COMMANDS["run"], []) is None


def test_a_command_below_another_is_read_as_usual_too():
    done = batchdecode("trace", "why", "dash", ROOT / "samples/requests.jsonl", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["stories"][0]["id"] == "dash"


def test_a_model_that_interrupts_ends_a_command_without_a_traceback(tmp_path):
    (tmp_path / "rude.py").write_text("raise KeyboardInterrupt")
    done = batchdecode("check", "-", "--model", "rude:model", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "error: aborted\n")
