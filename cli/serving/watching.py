"""Who looks on while a server's engine runs: its metrics, its trace and its picture."""

from batcher.engine import Engine, StepOutcome
from batcher.foreign import Raised
from batcher.serving.metrics import ServerMetrics
from batcher.timeline.records import label_of

from ..running.recorder import TraceWriter
from ..screen.cells import printable_lines
from ..screen.view import GaugeReading, View

MAX_FAILURES = 10  # kinds of them that are told of


class ServerGauges:
    """What a view asks of a server; see Gauges."""

    current_step = None  # nobody asks while a step is computed

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def read_gauges(self) -> GaugeReading:
        """Return what events do not tell."""
        engine, scheduler = self._engine, self._engine.scheduler
        first = scheduler.queue.peek(engine.now)
        next_up = None if first is None else label_of(first.id, first.index, first.role)
        num_free = engine.batch_size - engine.num_running
        return GaugeReading(
            engine.now, num_free, next_up, engine.block_use, engine.num_waiting, engine.num_coming
        )

    def find_upcoming(self, text: str) -> None:
        """Nothing: which requests will come, nobody knows."""

    def knows_upcoming(self) -> bool:
        """Return false, as above."""
        return False


class ServerWatcher:
    """A Watcher that counts, writes and draws; trace: None if there is to be none."""

    def __init__(
        self, engine: Engine, metrics: ServerMetrics, trace: TraceWriter | None, view: View
    ) -> None:
        self._engine, self._metrics, self._trace, self._view = engine, metrics, trace, view
        self._num_steps = 0
        self._failures: set[str] = set()
        if trace is not None:
            trace.write([engine.run_event()])

    def after_step(self, outcome: StepOutcome) -> None:
        """Take note of what a step did."""
        events, view = outcome.events, self._view
        if events:
            with view.lock:  # it reads the fold of the metrics
                self._metrics.after_step(outcome)
            if self._trace is not None:
                self._trace.write(events)
        num_steps = self._engine.num_steps
        if num_steps > self._num_steps:
            self._num_steps = num_steps
            if view.is_watched:
                view.after_step(num_steps - 1)
        elif view.is_watched:
            view.keep_up()

    def while_idle(self) -> float | None:
        """Write and draw what is left; return when to draw again, in seconds."""
        self._metrics.share()
        if self._trace is not None:
            self._trace.flush()
        return self._view.refresh() or None

    def hear(self, raised: Raised) -> None:
        """Say once of each kind what a model raises; its text may hold a prompt, so that is not."""
        kind = f"the model raised {raised.said.partition(':')[0]} at {raised.place}"
        if kind not in self._failures and len(self._failures) < MAX_FAILURES:
            self._failures.add(kind)
            self._view.write_message(printable_lines(f"{kind}\n"))

    def close(self) -> None:
        """End the trace and the picture, when the engine has come to its end."""
        if self._trace is not None:
            self._trace.write([*self._engine.hand_out().events, self._engine.end_event()])
            self._trace.close()
        self._view.close()
