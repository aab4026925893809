"""Which steps of a run a gantt shows as bars: what was asked for, or the part worth a look."""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter

from batcher.trace.run import SlotSpan, Wait
from batcher.trace.timeline import Selection, Timeline, worst_bubble

from ..screen.terminal import cell_width

MAX_LABEL_CELLS = 6
MAX_ZOOM_CELLS_PER_STEP = 4
LABEL_MARGIN = 2
MAX_SHARE = 2 / 3


def choose_zoom(
    timeline: Timeline, selection: Selection, num_cells: int
) -> tuple[range, list[str]]:
    """Return the steps to draw as bars in `num_cells`, and why these, in parts if that is to say.

    What `selection` names goes first; a run that nearly fits is shown whole.
    """
    everything = range(timeline.num_steps)
    window = timeline.window(selection)
    if window and window != everything:
        return window, []
    around = _around_requests(timeline, selection.request_ids)
    if around:
        return around, []
    num_steps = readable_steps(timeline, num_cells)
    if len(everything) <= max(num_cells, num_steps / MAX_SHARE):
        return everything, []
    return _around_bubble(timeline, num_steps) or _longest_queue(timeline, num_steps)


def _around_requests(timeline: Timeline, request_ids: frozenset[str]) -> range:
    """Return the steps in which the requests run, and a little around; none for none.

    Of requests that never ran, those in which they wait.
    """
    if not request_ids:
        return range(0)
    chosen = Selection(request_ids=request_ids)
    found: list[SlotSpan] | list[Wait] = list(timeline.select_spans(chosen))
    found = found or list(timeline.select_waits(chosen))
    first = min((span.start for span in found), default=0)
    stop = max((span.end for span in found), default=0)
    margin = (stop - first + 9) // 10
    return range(max(0, first - margin), min(timeline.num_steps, stop + margin))


def readable_steps(timeline: Timeline, num_cells: int) -> int:
    """Return how many steps to show in `num_cells` so that usual bars have room for a label."""
    length = usual_length(timeline.spans)
    widths = sorted(cell_width(span.label) for span in islice(timeline.spans, 1000))
    cells_per_bar = min(widths[len(widths) // 2], MAX_LABEL_CELLS) + LABEL_MARGIN
    if length >= cells_per_bar:
        return num_cells * (length // cells_per_bar)
    return num_cells // min(MAX_ZOOM_CELLS_PER_STEP, -(-cells_per_bar // length))


def usual_length(spans: Iterable[SlotSpan]) -> int:
    """Return how many steps the one in the middle takes, by length; 0 if there is none."""
    lengths = Counter(span.end - span.start for span in spans)
    middle = lengths.total() // 2
    for length, number in sorted(lengths.items()):
        middle -= number
        if middle < 0:
            return length
    return 0


def _around_bubble(timeline: Timeline, num_steps: int) -> tuple[range, list[str]] | None:
    """Return `num_steps` with the worst bubble in their middle, or as much of it as they hold."""
    bubble = worst_bubble(timeline)
    if bubble is None:
        return None
    first = bubble.start - max(num_steps - (bubble.stop - bubble.start), 0) // 2
    start = min(max(first, 0), timeline.num_steps - num_steps)
    idle = f"{bubble.num_idle:,} idle slot-step{'s' * (bubble.num_idle > 1)}"
    return range(start, start + num_steps), [
        f"worst bubble: steps {bubble.start}:{bubble.stop}",
        idle,
    ]


def _longest_queue(timeline: Timeline, num_steps: int) -> tuple[range, list[str]]:
    """Return the `num_steps` around the step in which the most requests wait."""
    longest = max(timeline.waiting(), key=attrgetter("num"))
    peak = longest.num
    start = min(max(longest.start - num_steps // 2, 0), timeline.num_steps - num_steps)
    reason = f"longest queue: {peak:,} waiting" if peak else "the start, as nothing ever waited"
    return range(start, start + num_steps), [reason]
