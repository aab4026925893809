"""The run over time of one of several workers, from its events as the trace has them.

Rule: what a worker had not ended when it died leaves its slot or the queue there, and has not
finished.
"""

from batcher.events import Event, RestartEvent, RunEvent
from batcher.metrics.summary import TimedMetrics
from batcher.metrics.times import TimeSeries
from batcher.trace.run import RequestFold


class WorkerSeries:
    """Takes in what a worker does whose run `run` began, and tells `series` of it."""

    def __init__(self, run: RunEvent, series: TimeSeries) -> None:
        self._fold, self._timed = RequestFold(), TimedMetrics(run, None, series)

    def add(self, event: Event) -> None:
        """Take in the next event.

        Raises:
            InvariantError: it contradicts those before it.
        """
        if isinstance(event, RestartEvent):
            for end in self._fold.ends_at(event):
                self.add(end)
        found = self._fold.take(event)
        self._timed.observe(event, found)

    def close(self, num_steps: int) -> None:
        """Tell the series all that is left of `num_steps`, which may be broken off."""
        self._timed.close(num_steps)
