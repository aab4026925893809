"""The documentation is true: commands print what it says, and nothing goes unmentioned."""

import re
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import get_args

import pytest
from command_server import command_line
from consoles import INSTALLED, PAGES, ROOT, regenerated
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
from batcher.result import (
    ErrorInfo,
    FinishReason,
    StepTimes,
    Usage,
)
from cli.commands import COMMANDS, command_of

DOCS = ROOT / "docs"
PATHS = [page for page in PAGES if page.parent.parent == DOCS]


# Their commands take seconds, so they run with what is heavy.
LONG_PAGES = (
    *("acceptance", "beams", "calibrating", "compare", "constraints", "draft-diagnose"),
    *("draft-trees", "fleets", "from-a-real-log", "from-mlx-lm", "from-vllm", "managed-fleets"),
    *("metrics", "model-protocol", "models", "observability", "own-models", "padding", "page"),
    *("pieces", "plan", "planned-drafts", "planning", "player", "policies", "preempt-for"),
    *("preemption", "python", "replay", "rooflines", "sampling", "scale", "scheduling", "serve"),
    *("servers", "settings", "simulated", "speculation", "steps-and-slots", "summary"),
    *("tensor-parallel", "timing", "tokenizers", "trace-format", "training", "verify", "views"),
    *("what-changed", "workloads"),
)


def check_commands(page: Path, tool: list[str]) -> None:
    shown = regenerated(page, tool)
    assert page.read_text() == shown.text, "run `python tests/consoles.py` and look"
    for path, picture in shown.pictures.items():
        assert path.read_text() == picture, f"run `python tests/consoles.py` and look at {path}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in LONG_PAGES], ids=lambda page: page.name
)
def test_commands_print_what_the_page_says(page: Path) -> None:
    check_commands(page, command_line())


@pytest.mark.heavy
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem in LONG_PAGES], ids=lambda page: page.name
)
def test_commands_of_long_pages_print_what_the_page_says(page: Path) -> None:
    check_commands(page, command_line())


@pytest.mark.heavy
@pytest.mark.parametrize("page", ["README.md", "docs/prompts/first-file.md"])
def test_the_installed_commands_print_what_the_page_says(page: str) -> None:
    check_commands(ROOT / page, INSTALLED)


def test_long_pages_are_pages() -> None:
    assert {page.stem for page in PAGES}.issuperset(LONG_PAGES)


def test_tables_of_public_names_are_those_of_the_code() -> None:
    for page in PAGES:
        text = page.read_text()
        assert TO_BE_WRITTEN not in text, page
        assert text == renewed(text), "run `python tests/member_tables.py`"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page}: {path}"
            assert not anchor or anchor in anchors_of(linked), f"{page}: {path}#{anchor}"


def test_every_page_is_linked_from_the_first() -> None:
    text = (DOCS / "README.md").read_text()
    linked = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)#:]+)\)", text)}
    pages = {page for page in PAGES if page.is_relative_to(DOCS)}
    assert pages - linked == {DOCS / "README.md"}


def test_a_page_of_a_path_has_a_picture() -> None:
    for page in PATHS:
        assert re.search(r"^```mermaid$|^!\[|[┃│█└]", page.read_text(), re.MULTILINE), page


def test_a_page_of_the_docs_ends_with_a_way_on() -> None:
    for page in PAGES:
        if DOCS in page.parents and page != DOCS / "README.md":
            last = page.read_text().rstrip().split("\n\n")[-1]
            assert re.search(r"(Next|See also): .*\]\(", last), page


def test_the_readme_names_the_extras_that_pages_tell_to_install():
    told = set().union(*(re.findall(r"'batchdecode\[(\w+)\]'", p.read_text()) for p in PAGES))
    listed = re.search(r"need an extra \(([^)]*)\)", (ROOT / "README.md").read_text())[1]
    assert told <= set(re.findall(r"`(\w+)`", listed))


@cache
def anchors_of(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_contributing_names_files_that_are_there() -> None:
    spans = re.findall(r"`([^`\n]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    paths = [span for span in spans if re.fullmatch(r"[\w./-]+(/|\.py|\.md|\.toml)", span)]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def code_spans(page: str) -> set[str]:
    """What stands in `backticks` on a page of docs/."""
    return set(re.findall(r"`([^`\n]+)`", (DOCS / page).read_text()))


def test_every_command_and_option_is_documented() -> None:
    documented = code_spans("cli.md")
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


def test_every_field_is_documented() -> None:
    documented = code_spans("requests-and-results.md") | code_spans("segments.md")
    for record in (Request, PromptSegment, Result, Usage, StepTimes, ErrorInfo):
        assert set(record.__struct_fields__) <= documented, record
    assert {"custom_id", "prompt_tokens"} <= documented
    assert set(get_args(FinishReason)) <= documented


def test_every_error_code_is_documented() -> None:
    assert set(ERROR_CODES) <= code_spans("requests-and-results.md")


def test_every_event_has_its_row_and_every_reason_is_documented() -> None:
    documented = code_spans("trace-format.md")
    rows = rows_of(DOCS / "trace-format.md", "| `event` |")
    kinds = {event.__struct_config__.tag: event for event in event_types(Event)}
    assert rows.keys() == kinds.keys()
    for tag, event in kinds.items():
        assert set(event.__struct_fields__) <= rows[tag] | COMMON_FIELDS, tag
    assert documented >= COMMON_FIELDS
    reasons = {*get_args(AdmitReason), *get_args(ArriveReason), *get_args(FinishReason), "unused"}
    reasons |= {*get_args(PreemptReason), *get_args(BlockedReason), *get_args(SpeculateReason)}
    assert reasons | {*get_args(Role)} <= documented


COMMON_FIELDS = {"step", "time", "id", "index", "reason", "worker"}


def rows_of(page: Path, head: str) -> dict[str, set[str]]:
    """What stands in `backticks` in the rows of the table that begins with `head`, by the first."""
    lines = page.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head))
    rows = takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    spans = [re.findall(r"`([^`]+)`", row) for row in rows]
    return {first: {first, *others} for first, *others in spans}


def event_types(union: object) -> list[type]:
    members = get_args(union)
    return [union] if not members else [kind for member in members for kind in event_types(member)]


def test_every_setting_of_the_simulated_model_is_documented() -> None:
    assert set(SimulatedSettings.__struct_fields__) <= code_spans("simulated.md")


def test_the_lifecycle_diagram_is_the_table() -> None:
    lines = [
        f"    {source} --> {target}: {move.name}"
        for move in MOVES
        for source, target in move.items()
    ]
    diagram = "```mermaid\nstateDiagram-v2\n    [*] --> pending\n" + "\n".join(lines) + "\n```"
    assert diagram in (DOCS / "architecture.md").read_text()
