"""The documentation is true: commands print what it says, and nothing goes unmentioned."""

import re
from functools import cache
from itertools import takewhile
from typing import get_args

import pytest
from command_server import command_line
from consoles import INSTALLED, PAGES, ROOT, regenerated
from examples import mostly_heavy
from member_tables import TO_BE_WRITTEN, renewed

from batcher import Request, Result, SimulatedSettings
from batcher.errors import ERROR_CODES
from batcher.events import (
    AdmitReason,
    ArriveReason,
    BlockedReason,
    Event,
    PreemptReason,
    Role,
    SpeculateReason,
)
from batcher.lifecycle import MOVES
from batcher.request import PromptSegment
from batcher.result import ErrorInfo, FinishReason, StepTimes, Usage
from cli.commands import COMMANDS, command_of

DOCS = ROOT / "docs"


# The commands of the other pages take long together, so they run with what is heavy.
QUICK_PAGES = [ROOT / "README.md", *sorted((DOCS / "guide").glob("*.md"))]


def check_commands(page, tool):
    shown = regenerated(page, tool)
    assert page.read_text() == shown.text, "run `python tests/consoles.py` and look"
    for path, picture in shown.pictures.items():
        assert path.read_text() == picture, f"run `python tests/consoles.py` and look at {path}"


@pytest.mark.parametrize("page", mostly_heavy(PAGES, *QUICK_PAGES), ids=lambda page: page.name)
def test_commands_print_what_the_page_says(page):
    check_commands(page, command_line())


@pytest.mark.heavy
@pytest.mark.parametrize("page", ["README.md", "docs/guide/first-file.md"])
def test_the_installed_commands_print_what_the_page_says(page):
    check_commands(ROOT / page, INSTALLED)


def test_tables_of_public_names_are_those_of_the_code():
    for page in PAGES:
        text = page.read_text()
        assert TO_BE_WRITTEN not in text, page
        assert text == renewed(text), "run `python tests/member_tables.py`"


def test_links_lead_somewhere():
    for page in PAGES:
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page}: {path}"
            assert not anchor or anchor in anchors_of(linked), f"{page}: {path}#{anchor}"


def test_tests_that_pages_name_are_there():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`(tests/[\w/]+(?:\.py)?)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_every_page_is_linked_from_the_first():
    text = (DOCS / "README.md").read_text()
    linked = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)#:]+)\)", text)}
    pages = {page for page in PAGES if page.is_relative_to(DOCS)}
    assert pages - linked == {DOCS / "README.md"}


@cache
def anchors_of(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_spans(page):
    return set(re.findall(r"`([^`\n]+)`", (DOCS / page).read_text()))


def test_every_command_and_option_is_documented():
    documented = code_spans("reference/cli.md")
    for name in COMMANDS:
        command = command_of(name)
        assert f"batchdecode {name}" in " ".join(documented), name
        for parameter in command.params:
            if getattr(parameter, "hidden", False):
                continue
            for option in parameter.opts:
                if option.startswith("-"):
                    assert any(option in span.replace(",", " ").split() for span in documented), (
                        name,
                        option,
                    )


def test_commands_of_the_cheat_sheet_have_their_options():
    commands = re.findall(r"batchdecode ([^`|\\]+)", (DOCS / "guide/cheat-sheet.md").read_text())
    assert len(commands) >= 25
    for words in map(str.split, commands):
        name = " ".join(words[:2])
        command = command_of(name if name in COMMANDS else words[0])
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, words


def test_every_field_is_documented():
    documented = code_spans("reference/requests-and-results.md") | code_spans("guide/sessions.md")
    for record in (Request, PromptSegment, Result, Usage, StepTimes, ErrorInfo):
        assert set(record.__struct_fields__) <= documented, record
    assert {"custom_id", "prompt_tokens"} <= documented
    assert set(get_args(FinishReason)) <= documented


def test_every_error_code_is_documented():
    assert set(ERROR_CODES) <= code_spans("reference/requests-and-results.md")


def test_every_event_has_its_row_and_every_reason_is_documented():
    documented = code_spans("reference/trace-format.md")
    rows = rows_of(DOCS / "reference/trace-format.md", "| `event` |")
    kinds = {event.__struct_config__.tag: event for event in event_types(Event)}
    assert rows.keys() == kinds.keys()
    for tag, event in kinds.items():
        assert set(event.__struct_fields__) <= rows[tag] | COMMON_FIELDS, tag
    assert documented >= COMMON_FIELDS
    reasons = {*get_args(AdmitReason), *get_args(ArriveReason), *get_args(FinishReason), "unused"}
    reasons |= {*get_args(PreemptReason), *get_args(BlockedReason), *get_args(SpeculateReason)}
    assert reasons | {*get_args(Role)} <= documented


COMMON_FIELDS = {"step", "time", "id", "index", "reason", "worker"}


def rows_of(page, head):
    lines = page.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head))
    rows = takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    spans = [re.findall(r"`([^`]+)`", row) for row in rows]
    return {first: {first, *others} for first, *others in spans}


def event_types(union):
    members = get_args(union)
    return [union] if not members else [kind for member in members for kind in event_types(member)]


def test_every_setting_of_the_simulated_model_is_documented():
    assert set(SimulatedSettings.__struct_fields__) <= code_spans("inside/model-protocol.md")


def test_the_lifecycle_diagram_is_the_table():
    lines = [
        f"    {source} --> {target}: {move.name}"
        for move in MOVES
        for source, target in move.items()
    ]
    diagram = "```mermaid\nstateDiagram-v2\n    [*] --> pending\n" + "\n".join(lines) + "\n```"
    assert diagram in (DOCS / "inside/architecture.md").read_text()
