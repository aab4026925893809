"""One HTML file with runs in it and all that shows them: it loads nothing, and runs nothing else.

Rule: what comes from a run is in the file as base64 alone, or escaped by `report`; and a browser is
told to run the scripts of the page and no others.
"""

import base64
import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

import msgspec
from msgspec import Struct

from batcher.events import PreemptReason
from batcher.explaining.story import GAVE_WAY, SHORT_CAUSES, STANDSTILLS, Cause
from batcher.page import START
from batcher.page.blocks import packed_lines
from batcher.page.records import PageTimeline
from batcher.page.tables import blocks_of

SCRIPTS = (
    "d3.min.js",
    "unpack.js",
    "run.js",
    "story.js",
    "view.js",
    "chart.js",
    "panel.js",
    "controls.js",
    "page.js",
)
"""In the order in which each finds what it needs."""


class PageRun(NamedTuple):
    """A run, or a worker of one, that a page shows; first_slot: the number of its first slot."""

    name: str
    timeline: PageTimeline
    first_slot: int = 0


def page_runs(timelines: Sequence[PageTimeline], title: str) -> list[PageRun]:
    """Return what a page shows of a run: each worker as one, or the run itself if there is one."""
    if len(timelines) == 1:
        return [PageRun(title, timelines[0])]
    return [
        PageRun(f"{title}, worker {worker}", timeline, worker * timeline.num_slots)
        for worker, timeline in enumerate(timelines)
    ]


def title_of(path: str) -> str:
    """Return what a run is called on a page: its file without the folders."""
    return path.rpartition("/")[2]


def page_title(name: str) -> str:
    """Return the title of a document about what is called `name`, as HTML."""
    return html.escape(f"{name} - batchdecode")


class Opening(Struct, frozen=True, omit_defaults=True):
    """What a page shows at first: steps [start, end), and requests and slots; None for all."""

    steps: tuple[int, int] | None = None
    requests: list[str] | None = None
    slots: list[int] | None = None


class Sample(Struct, frozen=True):
    """A sample that a page leads to."""

    id: str
    index: int


class PageDifference(Struct, frozen=True):
    """How two runs differ, in lines of text.

    step: where they part, None if they do not.  changed: whom to look at, the most changed first.
    """

    step: int | None
    lines: list[str]
    changed: list[Sample]


class Words(Struct, frozen=True):
    """How a page says why: a request waited, stood still in its slot, or was preempted."""

    waits: Mapping[Cause, str]
    standstills: Mapping[Cause, str]
    preemptions: Mapping[PreemptReason, str]


WORDS = Words(SHORT_CAUSES, STANDSTILLS, GAVE_WAY)


class PageFacts(Struct, frozen=True):
    """What a page is told beside its runs.  is_part: whether a longer document is around it."""

    words: Words
    opening: Opening = Opening()
    diff: PageDifference | None = None
    is_part: bool = False


def encode_page(
    runs: Iterable[PageRun], facts: PageFacts, title: str, above: str = "", below: str = ""
) -> Iterator[bytes]:
    """Yield the file piece by piece: one run, its workers, or two to compare.

    title: of the document, as HTML.  above, below: what stands around the timeline, as HTML.
    """
    scripts = {name: _asset(name) for name in SCRIPTS}
    style, licence = _asset("page.css"), _asset("d3.LICENSE")
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src " + " ".join(
        map(_hash, scripts.values())
    )
    yield (
        START
        + (
            '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<link rel="icon" href="data:,">\n'
            f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n{above}"
            '<main id="page"><noscript><p>The timeline needs JavaScript, which is off in this '
            f"browser.</p></noscript></main>\n{below}"
        ).encode()
    )
    yield b'<script type="text/plain" id="facts">' + base64.b64encode(msgspec.json.encode(facts))
    yield b"</script>\n"
    for name, timeline, first_slot in runs:
        yield b'<script type="text/plain" class="run">\n'
        yield from packed_lines(blocks_of(timeline, name, first_slot))
        yield b"</script>\n"
    yield f"<!-- d3: {licence}-->\n".encode()
    for script in scripts.values():
        yield f"<script>{script}</script>\n".encode()
    yield b"</body>\n</html>\n"


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")


def _hash(text: str) -> str:
    """Return how a policy names a script or a style of just this text."""
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"
