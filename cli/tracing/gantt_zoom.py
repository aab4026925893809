"""Which steps of a run are worth a close look, and how many of them fit in."""

from itertools import accumulate

from batcher.timeline import Selection, Timeline
from batcher.timeline.stays import Span, Wait
from cli.screen.cells import cell_width

MAX_LABEL_CELLS = 6
MAX_CELLS_PER_STEP = 4
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
    stays: list[Span] | list[Wait] = list(timeline.select_spans(chosen))
    stays = stays or list(timeline.select_waits(chosen))
    first = min((stay.start for stay in stays), default=0)
    stop = max((stay.end for stay in stays), default=0)
    margin = (stop - first + 9) // 10
    return range(max(0, first - margin), min(timeline.num_steps, stop + margin))


def _readable_steps(timeline: Timeline, num_cells: int) -> int:
    """Return how many steps to show in `num_cells` so that usual bars have room for a label."""
    lengths = sorted(span.end - span.start for span in timeline.spans)
    widths = sorted(cell_width(span.label) for span in timeline.spans[:1000])
    usual_length, usual_width = lengths[len(lengths) // 2], widths[len(widths) // 2]
    cells_per_bar = min(usual_width, MAX_LABEL_CELLS) + LABEL_MARGIN
    if usual_length >= cells_per_bar:
        return num_cells * (usual_length // cells_per_bar)
    return num_cells // min(MAX_CELLS_PER_STEP, -(-cells_per_bar // usual_length))


def _worst_bubble(timeline: Timeline, num_steps: int) -> tuple[range, str] | None:
    """Return the `num_steps` with the most idle slot-steps, the bubble in their middle.

    The end of the run, when nothing is left to admit, is not a bubble.
    """
    last_admission = timeline.spans[-1].start
    idle = [timeline.num_slots - occupied for occupied in timeline.occupied[:last_admission]]
    idle_before = list(accumulate(idle, initial=0))
    idle_before += [idle_before[-1]] * (timeline.num_steps - last_admission)
    starts = range(timeline.num_steps - num_steps + 1)
    num_idle = [idle_before[start + num_steps] - idle_before[start] for start in starts]
    worst = max(num_idle)
    if not worst:
        return None
    first = num_idle.index(worst)
    stop = next((start for start in starts[first:] if num_idle[start] < worst), starts.stop)
    middle = (first + stop - 1) // 2
    reason = f"worst bubble: {worst:,} idle slot-step{'s' * (worst > 1)}"
    return range(middle, middle + num_steps), reason


def _longest_queue(timeline: Timeline, num_steps: int) -> tuple[range, str]:
    """Return the `num_steps` around the step in which the most requests wait."""
    peak = max(timeline.waiting)
    start = timeline.waiting.index(peak) - num_steps // 2
    start = min(max(start, 0), timeline.num_steps - num_steps)
    reason = f"longest queue: {peak:,} waiting" if peak else "the start, as nothing ever waited"
    return range(start, start + num_steps), reason
