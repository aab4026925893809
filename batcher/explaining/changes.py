"""What came of the differences of two runs: for each request, and in all.

Rule: latency is from arrival to the end of the last step, wait is all steps in the queue.
"""

from collections import Counter

from msgspec import Struct

from batcher.explaining.lives import Life
from batcher.timeline import Timeline
from batcher.timeline.stays import label_of

NUM_DIGITS = 6  # of means and seconds, after the point


class Course(Struct, frozen=True):
    """How it went for one sample in one run; times are in seconds, None if it did not end.

    admitted: the step it was first admitted in.  recomputed: tokens it lost in preemptions.
    cached: tokens found in the cache.
    """

    admitted: int | None
    latency_steps: int | None
    latency: float | None
    wait_steps: int
    preemptions: int
    recomputed: int
    cached: int
    outcome: str | None
    tokens: int


class Change(Struct, frozen=True):
    """A sample that went another way in run B than in run A."""

    id: str
    index: int
    a: Course
    b: Course

    @property
    def label(self) -> str:
        """What it is called."""
        return label_of(self.id, self.index, "sample")

    @property
    def later(self) -> float:
        """By how many seconds it took longer in B; less than 0 if it was faster."""
        return (self.b.latency or 0.0) - (self.a.latency or 0.0)


class RunTotals(Struct, frozen=True):
    """The sums of a run; latency and wait are means over those that ended in a slot, in seconds."""

    steps: int
    time: float
    ended: int
    tokens: int
    latency: float
    wait_steps: float
    preemptions: int
    recomputed: int
    cached: int


def pair_lives(
    lives_a: list[Life], lives_b: list[Life]
) -> tuple[list[tuple[Life, Life]], list[str], list[str]]:
    """Return the lives that belong together, and the labels of those that are alone in A and B.

    An id that comes again belongs to the one that comes again.
    """
    named_a, named_b = _by_name(lives_a), _by_name(lives_b)
    pairs = [(life, named_b[name]) for name, life in named_a.items() if name in named_b]
    only_a = [life.label for name, life in named_a.items() if name not in named_b]
    only_b = [life.label for name, life in named_b.items() if name not in named_a]
    return pairs, only_a, only_b


def _by_name(lives: list[Life]) -> dict[tuple[str, int, int], Life]:
    """Return the lives by id, index and how often these came before."""
    seen: Counter[tuple[str, int]] = Counter()
    named: dict[tuple[str, int, int], Life] = {}
    for life in lives:
        named[life.id, life.index, seen[life.id, life.index]] = life
        seen[life.id, life.index] += 1
    return named


def changes_of(
    timeline_a: Timeline, timeline_b: Timeline, pairs: list[tuple[Life, Life]]
) -> list[Change]:
    """Return the pairs that differ, the one whose latency changed most first."""
    changes = []
    for life_a, life_b in pairs:
        a, b = course_of(timeline_a, life_a), course_of(timeline_b, life_b)
        if a != b:
            changes.append(Change(life_a.id, life_a.index, a, b))
    return sorted(changes, key=_order)


def _order(change: Change) -> tuple[float, int, int]:
    a, b = change.a, change.b
    return (
        -abs(change.later),
        -abs(b.wait_steps - a.wait_steps),
        -abs(b.preemptions - a.preemptions),
    )


def course_of(timeline: Timeline, life: Life) -> Course:
    """Return how it went for `life`."""
    steps = life.steps(timeline.num_steps)
    in_slots = sum(
        (life.end(timeline.num_steps) if visit.preempt is None else visit.preempt.step)
        - visit.admit.step
        for visit in life.visits
    )
    has_ended = life.finish is not None and life.arrive is not None
    latency = None
    if has_ended and life.is_running and life.arrive is not None:
        latency = round(timeline.figures.end_of(steps.stop - 1) - life.arrive.time, NUM_DIGITS)
    return Course(
        admitted=life.visits[0].admit.step if life.visits else None,
        latency_steps=len(steps) if has_ended else None,
        latency=latency,
        wait_steps=len(steps) - in_slots if steps else 0,
        preemptions=life.num_preemptions,
        recomputed=sum(visit.preempt.tokens for visit in life.visits if visit.preempt is not None),
        cached=sum(visit.admit.cached for visit in life.visits),
        outcome=None if life.finish is None else life.finish.reason,
        tokens=0 if life.finish is None else life.finish.tokens,
    )


def totals_of(timeline: Timeline, lives: list[Life]) -> RunTotals:
    """Return the sums over all lives of a run."""
    courses = [course_of(timeline, life) for life in lives]
    ended = [course for course in courses if course.latency is not None]
    num_ended = max(1, len(ended))
    last = timeline.num_steps - 1
    return RunTotals(
        steps=timeline.num_steps,
        time=round(timeline.figures.end_of(last), NUM_DIGITS) if last >= 0 else 0.0,
        ended=sum(course.outcome is not None for course in courses),
        tokens=sum(course.tokens for course in courses),
        latency=round(sum(course.latency or 0.0 for course in ended) / num_ended, NUM_DIGITS),
        wait_steps=round(sum(course.wait_steps for course in ended) / num_ended, NUM_DIGITS),
        preemptions=sum(course.preemptions for course in courses),
        recomputed=sum(course.recomputed for course in courses),
        cached=sum(course.cached for course in courses),
    )
