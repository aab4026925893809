"""Help: a short page and a page of all options, whole in narrow terminals and in wide ones."""

import re

import pytest
import typer
from process import batchdecode

from cli.commands import COMMANDS, app, command_of

ROOT = typer.main.get_command(app)
PAGES = [(name, is_whole) for name in COMMANDS for is_whole in (False, True)]


@pytest.fixture
def shown(monkeypatch):

    def page_of(name, *, is_whole=False, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        root = ROOT.make_context("batchdecode", [], resilient_parsing=True)
        if not name:
            return root.get_help()
        command = command_of(name)
        context = command.make_context(name, [], parent=root, resilient_parsing=True)
        if is_whole:
            context.meta["help_all"] = True
        return context.get_help()

    return page_of


def test_a_page_is_as_wide_as_the_terminal_and_cuts_nothing(shown):
    for name, is_whole in [("", False), *PAGES]:
        narrow, wide = (shown(name, is_whole=is_whole, columns=columns) for columns in (80, 200))
        assert max(map(len, narrow.splitlines())) <= 80, name
        assert max(map(len, wide.splitlines())) <= 100, name
        assert "env var" not in wide, name
        text = wide.replace("[ARGS]...", "").replace("INPUT...", "")
        assert not re.search(r"\w\.\.\.|<=|>=|<\w", text), name
        assert narrow.split() == wide.split()


def test_every_option_is_on_the_page_of_all_and_what_is_common_on_a_short_one(shown):
    for name in COMMANDS:
        short, whole = shown(name), shown(name, is_whole=True)
        assert len(short.splitlines()) <= 50, name
        for param in command_of(name).params:
            for flag in param.opts if param.param_type_name == "option" else ():
                has = re.search(rf"^  (-\w, )?{flag}(,| |$)", whole, re.MULTILINE)
                assert bool(has) is not param.hidden, (name, flag)
        assert ("--help-all" in short) is (short != whole), name
        assert "-h, --help" in whole, name
    short, whole = (batchdecode("run", page).stdout.decode() for page in ("-h", "--help-all"))
    assert short == shown("run") + "\n"
    words = " ".join(whole.split())
    assert "Number of slots. [default: 8; from 1 to 1,048,576]" in words
    assert "[default: no limit; from 1]" in words
    assert "[required]" in shown("plan")
    assert whole == shown("run", is_whole=True) + "\n"
    assert "\nOptions:\n  -p, --prompt TEXT " in short
    assert "  --help-all            Show all options, grouped.\n" in short
    assert "--watermark" not in short
    assert re.findall(r"^(\w+):$", whole, re.MULTILINE) == [
        *("Arguments", "Input", "Decoding", "Scheduling", "Time", "Speculation", "Output"),
        *("Errors", "Display", "Server", "Options", "Examples"),
    ]


def help_texts():
    """Yield every text of help, with the name of what it is about."""
    for name, text in COMMANDS.items():
        yield name, text
        command = command_of(name)
        assert " ".join(command.help.partition("\n\n")[0].split()) == text
        yield from ((name, note) for note in command.notes)
        for param in command.params:
            if not getattr(param, "hidden", False):
                yield f"{name} {max(param.opts, key=len)}", param.help


def test_help_begins_with_a_noun_or_an_imperative():
    questions = re.compile(r"(what|where|who|how|whether)\b", re.IGNORECASE)
    assert [f"{name}: {text}" for name, text in help_texts() if questions.match(text)] == []
