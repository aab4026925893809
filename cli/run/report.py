"""`run --report`: what a run came to as a page for a colleague, its timeline included."""

from collections.abc import Mapping, Sequence

from batcher.events import RunEvent
from batcher.metrics.summary import RunSummary, encode_summary, unit_of
from batcher.page.page import (
    WORDS,
    PageFacts,
    PageTimeline,
    encode_page,
    page_runs,
    page_title,
    title_of,
)
from batcher.page.report import render_report

from ..errors import WriteError
from ..printing import output_sink, write_lines
from ..screen.summary import BLOCKED_CAUSES, PER, UNICODE, headline, idle_causes
from ..screen.terminal import counted, duration, number, printable
from .out_file import OutFile
from .output import OutputError
from .run_options import RunOptions

_BLOCKED = {reason: f"blocked: {cause}" for reason, cause in BLOCKED_CAUSES.items()}


def _headline(summary: RunSummary, run: RunEvent) -> str:
    """Return the numbers that matter most."""
    more = [counted(summary.generated_tokens, "generated token")]
    if summary.wall is not None:
        more += [
            duration(summary.wall.seconds),
            f"{number(summary.wall.tokens_per_second)} tokens/s",
        ]
    elif summary.throughput is not None:
        unit = PER[unit_of(summary, is_timed=bool(run.step_time))]
        more.append(f"{number(summary.throughput.output_tokens)} tokens/{unit}")
    return headline(summary, UNICODE.separator, more)


def write_numbers(
    options: RunOptions,
    files: Mapping[str, OutFile],
    summary: RunSummary,
    timelines: Sequence[PageTimeline] | None,
    run: RunEvent,
    source_name: str,
) -> dict[str, Exception]:
    """Write --summary-json and --report; return why one could not be written, by its option."""
    failures: dict[str, Exception] = {}
    if options.summary_json is not None:
        try:
            with output_sink(files.get("--summary-json")) as sink:
                sink.write(encode_summary(summary))
        except (WriteError, OutputError) as error:
            failures["--summary-json"] = error
    if options.report is not None and timelines is not None:
        try:
            write_report(files["--report"], timelines, summary, run, source_name)
        except (WriteError, OutputError) as error:
            failures["--report"] = error
    return failures


def write_report(
    file: OutFile,
    timelines: Sequence[PageTimeline],
    summary: RunSummary,
    run: RunEvent,
    source_name: str,
) -> None:
    """Write the report of a run that is over, or was broken off, by the timelines of its workers.

    Raises:
        InvariantError: its events contradict each other.
        WriteError, OutputError: there is no such file, or no room in it.
    """
    for timeline in timelines:
        timeline.close()
    name = title_of(source_name)
    report = render_report(
        summary, run, name, _headline(summary, run), idle_causes(summary) | _BLOCKED
    )
    facts = PageFacts(WORDS, is_part=True)
    runs = page_runs(timelines, name)
    with file.replace() as sink:
        write_lines(encode_page(runs, facts, page_title(printable(name)), *report), sink)
