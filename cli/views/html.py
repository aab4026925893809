"""Pages for a browser, in the words of `trace why` and `trace diff`: a run, or two in step."""

from collections.abc import Iterable, Iterator, Sequence

from batcher.events import Event
from batcher.explaining.differences import RunComparison
from batcher.page.page import (
    Opening,
    PageDifference,
    PageFacts,
    PageRun,
    PageTimeline,
    StoryWords,
    encode_page,
    page_runs,
    page_title,
    title_of,
)

from ..screen.terminal import printable
from .story_text import tell, tell_reject, why_waiting

PAGE_WORDS = StoryWords(tell, why_waiting, tell_reject)


def render_page(
    timelines: Sequence[PageTimeline],
    name: str,
    steps: tuple[int, int] | None,
    requests: Sequence[str] | None,
    slots: Sequence[int] | None,
) -> Iterator[bytes]:
    """Yield the page of a run, which shows at first what was selected, and holds all of it.

    timelines: of its workers, most often one.
    """
    opening = Opening(steps, list(requests or ()) or None, list(slots or ()) or None)
    title = title_of(name)
    runs = page_runs(timelines, title)
    return encode_page(runs, PageFacts(opening), PAGE_WORDS, page_title(printable(title)))


def render_difference(
    runs: Sequence[tuple[str, Iterable[Event]]],
    comparison: RunComparison,
    lines: list[str],
    top: int,
) -> Iterator[bytes]:
    """Yield the page of two runs, A and B, with `lines` that say how they differ.

    Raises:
        InvariantError, BatchdecodeError: see Timeline.from_events.
    """
    parting = comparison.parting
    changed = [change.label for change in comparison.changes[:top]]
    difference = PageDifference(None if parting is None else parting.step, lines, changed)
    shown = [PageRun(title_of(name), PageTimeline.from_events(events)) for name, events in runs]
    title = page_title(printable(" and ".join(run.name for run in shown)))
    return encode_page(shown, PageFacts(diff=difference), PAGE_WORDS, title)
