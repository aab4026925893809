"""Help: a short page and a page of all options, whole in narrow terminals and in wide ones."""

import re

import pytest
import typer
from process import batchdecode

from cli.app import app
from cli.usage.page import MAX_WIDTH, Page

ROOT = typer.main.get_command(app)


def commands():
    """Yield the name of every command, and the command."""
    for name in ROOT.list_commands(None):
        command = ROOT.get_command(None, name)
        yield name, command
        for below, subcommand in command.subcommands.items():
            yield f"{name} {below}", subcommand


COMMANDS = dict(commands())
PAGES = [(name, is_whole) for name in COMMANDS for is_whole in (False, True)]


@pytest.fixture
def shown(monkeypatch):
    """Gives a page of help for a terminal of so many columns; the name of no command: the first."""

    def page_of(name, *, is_whole=False, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        root = ROOT.make_context("batchdecode", [], resilient_parsing=True)
        if not name:
            return root.get_help()
        command = COMMANDS[name]
        context = command.make_context(name, [], parent=root, resilient_parsing=True)
        return command.page(context, is_whole=True) if is_whole else context.get_help()

    return page_of


@pytest.mark.parametrize(("name", "is_whole"), [("", False), *PAGES])
def test_a_page_is_as_wide_as_the_terminal_and_cuts_nothing(name, is_whole, shown):
    words = None
    for columns in (40, 60, 80, 100, 200):
        page = shown(name, is_whole=is_whole, columns=columns)
        assert max(map(len, page.splitlines())) <= min(columns, MAX_WIDTH)
        assert "env var" not in page
        assert not re.search(r"\w\.\.\.|<=|>=|<\w", page)
        found = page.replace("\\\n", "").split()
        assert words in (None, found), columns
        words = found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_on_the_page_of_all_and_a_short_page_fits_a_screen(name, shown):
    short, whole = shown(name), shown(name, is_whole=True)
    assert len(short.splitlines()) <= 45
    for param in COMMANDS[name].params:
        for flag in param.opts if param.param_type_name == "option" else ():
            has = re.search(rf"^  (-\w, )?{flag}(,| |$)", whole, re.MULTILINE)
            assert bool(has) is not param.hidden, flag
    assert set(re.findall(r"^  .*?(--[a-z-]+)", short, re.MULTILINE)) <= {
        "--help-all",
        *re.findall(r"--[a-z-]+", whole),
    }
    assert ("--help-all" in short) is (short != whole)
    assert "-h, --help" in whole


def test_both_pages_are_shown_and_what_is_common_is_on_the_first(shown):
    short, whole = (batchdecode("run", page).stdout.decode() for page in ("-h", "--help-all"))
    assert short == shown("run") + "\n"
    assert whole == shown("run", is_whole=True) + "\n"
    assert "\nOptions:\n  -b, --batch N " in short
    assert "  --help-all            Show all options, grouped.\n" in short
    assert "--watermark" not in short
    assert re.findall(r"^(\w+):$", whole, re.MULTILINE) == [
        *("Arguments", "Input", "Decoding", "Scheduling", "Time", "Speculation", "Output"),
        *("Errors", "Display", "Server", "Options", "Examples"),
    ]
    assert "  -h, --help              Show the common options.\n" in whole


def test_ranges_and_defaults_are_words(shown):
    whole = " ".join(shown("run", is_whole=True).split())
    assert "Slots of the batch. [default: 8; from 1 to 1,048,576]" in whole
    assert "[default: no limit; from 1]" in whole
    assert "take. [default: 5; from 0.1 to 86,400]" in whole
    assert "[default: 120; from 0.000001 to 86,400]" in whole
    assert "[required]" in shown("plan")


def test_the_first_page_says_of_each_command_all_of_what_it_does(shown):
    assert "error, and check them\n              against their hardware.\n" in shown("")


def test_an_example_that_is_too_long_can_still_be_copied(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    page = Page([])
    page.examples(["batchdecode compare requests.jsonl --batch 8,16 --policy fcfs"])
    assert str(page).splitlines() == [
        "",
        "Examples:",
        "  batchdecode compare requests.jsonl \\",
        "    --batch 8,16 --policy fcfs",
    ]
