"""The worst bubble of a run, against all steps in a row there are."""

from fractions import Fraction
from itertools import combinations

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from reference_schedule import Job, timeline_of, workloads

from batcher.trace.timeline import EVERYTHING, Timeline, worst_bubble
from cli.views.gantt import choose_zoom


def idle_of(timeline: Timeline) -> list[int]:
    rows = list(timeline.select_steps())
    last = max((span.start for span in timeline.spans), default=0)
    return [row.slots.count(None) for row in rows[:last]]


@given(workloads(), st.integers(1, 5))
@examples(200)
def test_it_is_the_best_of_all_steps_in_a_row(jobs: list[Job], batch: int) -> None:
    timeline = timeline_of(jobs, batch)
    idle = idle_of(timeline)
    mean = Fraction(sum(idle), max(len(idle), 1))
    gains = {
        (start, stop): sum(idle[start:stop]) - mean * (stop - start)
        for start, stop in combinations(range(len(idle) + 1), 2)
    }
    bubble, most = worst_bubble(timeline), max(gains.values(), default=0)
    assert (bubble is None) == (most == 0)
    if bubble is not None:
        steps = bubble.start, bubble.stop
        assert gains[steps] == most
        assert bubble.num_idle == sum(idle[slice(*steps)])


def test_every_width_names_the_same_bubble() -> None:
    jobs = [Job(f"r{n}", 20, n * 7.0 + 300 * (n > 60)) for n in range(200)]
    timeline = timeline_of(jobs, 8)
    bubble = worst_bubble(timeline)
    assert bubble is not None
    for num_cells in (20, 64, 150, 300):
        zoom, (named, _) = choose_zoom(timeline, EVERYTHING, num_cells)
        assert named == f"worst bubble: steps {bubble.start}:{bubble.stop}"
        assert bubble.start in zoom
