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

from .messages import Answered


class _Told(NamedTuple):
    """What is known of a worker.  It is replaced as a whole: any thread may read it.

    totals: its own, see decode_totals; b"" before it has told any.  earlier: of those in its place
    that have died.  num_answered: lines, by all of them.  num_begun: those that are in its engine.
    """

    totals: bytes
    earlier: RunTotals | None
    state: EngineState
    num_answered: int
    num_begun: int


class Standings:
    """Takes in what workers tell of themselves.

    run: how the trace of one begins.  num_to_answer: of lines, None if nobody knows.
    """

    def __init__(self, run: RunEvent, num_workers: int, num_to_answer: int | None) -> None:
        self._run, self._num_to_answer = run, num_to_answer
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
        )

    def lose(self, number: int) -> None:
        """Take note that a worker has died, and that there is another one in its place."""
        known = self._told[number]
        earlier = of_the_dead(self._totals(known)) if known.totals else known.earlier
        self._told[number] = _Told(b"", earlier, self._idle, known.num_answered, 0)

    @property
    def num_unread(self) -> int | None:
        """How many lines no engine has begun, None if nobody knows."""
        if self._num_to_answer is None:
            return None
        return self._num_to_answer - sum(t.num_answered + t.num_begun for t in self._told)

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
