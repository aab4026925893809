"""What workers have done and how they stand, as each told last: for the summary, and Prometheus.

Rule: what a worker had done that has died counts on with that of the next in its place.
"""

from typing import NamedTuple

from batcher.events import RunEvent
from batcher.metrics.run_totals import (
    RunTotals,
    decode_totals,
    in_turn,
    nothing_done,
    of_the_dead,
    summarize_workers,
)
from batcher.metrics.slo import Slo
from batcher.metrics.summary import RunSummary
from batcher.metrics.watched import EngineState
from batcher.request import NOTHING_UNREAD, Unread

from .lines import InputLines
from .messages import Answered


class _Told(NamedTuple):
    """What is known of a worker.  It is replaced as a whole: any thread may read it.

    totals: its own, see decode_totals; b"" before it has told any.  earlier: of those in its place
    that have died.  num_answered: lines, by all of them.  num_begun: those that are in its engine.
    now: when its next step starts.
    """

    totals: bytes
    earlier: RunTotals | None
    state: EngineState
    num_answered: int
    num_begun: int
    now: float = 0.0


class Standings:
    """Takes in what workers tell of themselves.

    run: how the trace of one begins.  lines: what is to be answered.
    """

    def __init__(self, run: RunEvent, num_workers: int, lines: InputLines) -> None:
        self._run, self._lines, self._num_to_answer = run, lines, lines.num_to_answer
        self._idle = EngineState(run.batch)
        self._told = [_Told(b"", None, self._idle, 0, 0)] * num_workers

    def take(self, number: int, answered: Answered) -> None:
        """Take in what a worker has told."""
        known = self._told[number]
        self._told[number] = _Told(
            answered.totals or known.totals,
            known.earlier,
            answered.state or known.state,
            known.num_answered + len(answered.indexes),
            answered.num_begun,
            answered.now,
        )

    def lose(self, number: int) -> None:
        """Take note that a worker has died, and that there is another one in its place."""
        known = self._told[number]
        earlier = of_the_dead(self._totals(known)) if known.totals else known.earlier
        self._told[number] = _Told(b"", earlier, self._idle, known.num_answered, 0, known.now)

    @property
    def num_begun(self) -> int:
        """How many lines are in an engine."""
        return sum(told.num_begun for told in self._told)

    @property
    def backlog(self) -> Unread:
        """Lines that no engine has begun, by what has arrived for the worker that is furthest."""
        if self._num_to_answer is None:
            return NOTHING_UNREAD
        num_left = self._num_to_answer - sum(t.num_answered + t.num_begun for t in self._told)
        now = max(told.now for told in self._told)
        coming = min(num_left, self._lines.arrivals.left(now).coming)
        return Unread(num_left - coming, coming)

    def engines(self) -> list[tuple[EngineState, RunTotals]]:
        """Return, by worker, how it stands and what it has done."""
        return [(told.state, self._totals(told)) for told in list(self._told)]

    def summary(self, slo: Slo | None) -> RunSummary:
        """Return the numbers of all workers."""
        return summarize_workers([self._totals(told) for told in self._told], self._run, slo)

    def _totals(self, told: _Told) -> RunTotals:
        """Return what a worker has done, with all that were in its place before it."""
        earlier = told.earlier
        if not told.totals:
            return nothing_done(self._run) if earlier is None else earlier
        totals = decode_totals(told.totals)
        return totals if earlier is None else in_turn(earlier, totals)
