"""`batchdecode trace --format html`: a run as a page for a browser, in the words of `trace why`."""

import html
import os
from collections.abc import Iterator

from batcher.errors import BatchdecodeError
from batcher.formats.page.document import Opening, PageFacts, Words, encode_page
from batcher.formats.page.records import PageTimeline

from ..commands.trace import TraceOptions
from ..screen.cells import printable
from .story_text import GAVE_WAY, SHORT_CAUSES, STANDSTILLS

WORDS = Words(SHORT_CAUSES, STANDSTILLS, GAVE_WAY)


def render_page(
    timeline: PageTimeline, name: str, steps: range, options: TraceOptions
) -> Iterator[bytes]:
    """Yield the page of a run, which shows at first what the options select, and holds all of it.

    steps: those that were selected.

    Raises:
        BatchdecodeError: it would go to a terminal.
    """
    if options.output is None and os.isatty(1):
        raise BatchdecodeError("--format html is for a browser: give -o run.html")
    opening = Opening(
        None if options.steps is None else (steps.start, steps.stop),
        options.request or None,
        options.slot or None,
    )
    title = title_of(name)
    return encode_page([(title, timeline)], PageFacts(WORDS, opening), page_title(title))


def title_of(path: str) -> str:
    """Return what a run is called on a page: its file without the folders."""
    return path.rpartition("/")[2]


def page_title(name: str) -> str:
    """Return the title of a document about what is called `name`, as HTML."""
    return html.escape(f"{printable(name)} - batchdecode")
