"""`run --report`: what a run came to as a page for a colleague, its timeline included."""

from collections.abc import Sequence

from batcher.events import RunEvent
from batcher.formats.page.document import PageFacts, encode_page
from batcher.formats.page.records import PageTimeline
from batcher.formats.page.report import render_report
from batcher.metrics.summary import RunSummary

from ..printing import write_lines
from ..screen.summary import idle_causes
from ..screen.timed_lines import BLOCKED_CAUSES
from ..tracing.page import WORDS, page_runs, page_title, title_of
from .out_file import OutFile

_BLOCKED = {reason: f"blocked: {cause}" for reason, cause in BLOCKED_CAUSES.items()}


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
    report = render_report(summary, run, name, idle_causes(summary) | _BLOCKED)
    facts = PageFacts(WORDS, is_part=True)
    runs = page_runs(timelines, name)
    with file.replace() as sink:
        write_lines(encode_page(runs, facts, page_title(name), report), sink)
