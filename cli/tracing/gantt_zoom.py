"""Which steps of a run a gantt shows as bars: what was asked for, or the part worth a look."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter

from batcher.timeline import Selection, Timeline
from batcher.timeline.records import SlotSpan, Wait
from batcher.timeline.step_counts import Stretch, clip

from ..screen.cells import cell_width

MAX_LABEL_CELLS = 6
MAX_ZOOM_CELLS_PER_STEP = 4
LABEL_MARGIN = 2
MAX_SHARE = 2 / 3


def choose_zoom(timeline: Timeline, selection: Selection, num_cells: int) -> tuple[range, str]:
    """Return the steps to draw as bars in `num_cells`, and why these ("" where that is plain).

    What `selection` names goes first; a run that nearly fits is shown whole.
    """
    everything = range(timeline.num_steps)
    window = timeline.window(selection)
    if window and window != everything:
        return window, ""
    around = _around_requests(timeline, selection.request_ids)
    if around:
        return around, ""
    num_steps = _readable_steps(timeline, num_cells)
    if len(everything) <= max(num_cells, num_steps / MAX_SHARE):
        return everything, ""
    return _worst_bubble(timeline, num_steps) or _longest_queue(timeline, num_steps)


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


def _readable_steps(timeline: Timeline, num_cells: int) -> int:
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


def _worst_bubble(timeline: Timeline, num_steps: int) -> tuple[range, str] | None:
    """Return the `num_steps` with the most idle slot-steps, the bubble in their middle.

    The end of the run, when nothing is left to admit, is not a bubble.
    """
    last_admission = max(span.start for span in timeline.spans)
    worst = first = last = 0
    start, num_idle = 0, sum(s.total for s in _idle(timeline, last_admission, range(num_steps)))
    for stop, change in _window_changes(timeline, last_admission, num_steps):
        if num_idle > worst:
            worst, first, last = num_idle, start, start
        if num_idle == worst and not change and last == start:
            last = stop
        start, num_idle = stop, num_idle + change * (stop - start)
    if num_idle > worst:
        worst, first, last = num_idle, start, start
    if not worst:
        return None
    middle = (first + last) // 2
    reason = f"worst bubble: {worst:,} idle slot-step{'s' * (worst > 1)}"
    return range(middle, middle + num_steps), reason


def _idle(timeline: Timeline, last_admission: int, steps: range) -> Iterator[Stretch]:
    """Yield how many slots are idle in `steps`, none from the last admission on."""
    for start, stop, occupied in clip(timeline.occupied(), steps):
        if start < last_admission:
            yield Stretch(start, min(stop, last_admission), timeline.num_slots - occupied)
        if stop > last_admission:
            yield Stretch(max(start, last_admission), stop, 0)


def _window_changes(
    timeline: Timeline, last_admission: int, num_steps: int
) -> Iterator[tuple[int, int]]:
    """Yield by how much each step changes what is idle in the window of `num_steps` it begins.

    It is the same for each step up to the one that is yielded with it.
    """
    end = timeline.num_steps
    leaving = _idle(timeline, last_admission, range(end - num_steps))
    coming = _idle(timeline, last_admission, range(num_steps, end))
    _, left_stop, left = next(leaving, (0, 0, 0))
    _, right_stop, right = next(coming, (0, 0, 0))
    start = 0
    while start < end - num_steps:
        stop = min(left_stop, right_stop - num_steps)
        yield stop, right - left
        start = stop
        if left_stop == stop:
            _, left_stop, left = next(leaving, (0, 0, 0))
        if right_stop == stop + num_steps:
            _, right_stop, right = next(coming, (0, 0, 0))


def _longest_queue(timeline: Timeline, num_steps: int) -> tuple[range, str]:
    """Return the `num_steps` around the step in which the most requests wait."""
    longest = max(timeline.waiting(), key=attrgetter("num"))
    peak = longest.num
    start = min(max(longest.start - num_steps // 2, 0), timeline.num_steps - num_steps)
    reason = f"longest queue: {peak:,} waiting" if peak else "the start, as nothing ever waited"
    return range(start, start + num_steps), reason
