"""What /metrics tells of a server: of its engine, and of those of the workers beside it.

Each worker leaves what it tells in a folder that all of them share, at least every second in which
something happens and whenever nothing does, and /metrics of each adds what the others have left.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest, write_to_textfile
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from batcher.engine import Engine, StepOutcome
from batcher.metrics.prometheus import RunCollector, joined
from batcher.metrics.summary import RunMetrics
from batcher.trace.run import RequestFold

SHARE_SECONDS = 1.0


class ServerMetrics:
    """Counts what an engine does, for as long as it runs; of all but `text` its thread makes use.

    model: what it is called.  fold: see RunMetrics.  worker: the number of this one.  folder: what
    the workers share; None for a server without others.
    """

    def __init__(
        self,
        engine: Engine,
        model: str,
        fold: RequestFold | None = None,
        worker: int = 0,
        folder: Path | None = None,
    ) -> None:
        self._collector = RunCollector(
            RunMetrics(fold=fold, is_watched=True), engine, (model, str(worker))
        )
        self._collector.observe([engine.run_event()])
        self._own = CollectorRegistry()
        self._own.register(self._collector)
        self._file = None if folder is None else folder / f"{worker}.prom"
        self._is_shared, self._shared_at = False, time.monotonic()
        self.share()

    def after_step(self, outcome: StepOutcome) -> None:
        """Count what a step did."""
        self._collector.observe(outcome.events)
        self._is_shared = False
        if self._file is not None and time.monotonic() - self._shared_at > SHARE_SECONDS:
            self.share()

    def share(self) -> None:
        """Let the other workers know, if they do not."""
        if self._file is not None and not self._is_shared:
            write_to_textfile(str(self._file), self._own)
            self._is_shared, self._shared_at = True, time.monotonic()

    def text(self) -> bytes:
        """Return what /metrics answers."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what there is to tell of all workers."""
        yield from joined(self._told_of_each())

    def _told_of_each(self) -> Iterator[Iterable[Metric]]:
        yield self._collector.collect()
        for path in sorted(self._file.parent.glob("*.prom")) if self._file is not None else ():
            if path != self._file:
                yield text_string_to_metric_families(path.read_text())
