"""The run itself: requests from a source, through the engine, out as one outcome after the other.

No file and no terminal is touched here, so whoever iterates decides what becomes of the outcomes.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from msgspec.structs import replace

from batcher.engine import Engine, StepOutcome
from batcher.events import FinishEvent, RejectEvent
from batcher.formats.requests import BadLine, ParsedLine
from batcher.formats.results import encode_openai_row, encode_result, make_rejected_result
from batcher.request import Result
from cli.running.sources import Source


class KnownResults(Protocol):
    """The results of an earlier run."""

    def get(self, index: int, /) -> Result | None:
        """Return the result of the line with this index, None if it has none yet."""


class Loop:
    """Iterates over the outcomes of a run.

    num_read: lines taken from the source.  num_failed: requests that failed so far.
    first_failure: what the model did to the first request that failed in it.
    has_refused: a bad line has ended the reading, since such lines are not skipped.
    """

    def __init__(
        self,
        engine: Engine,
        source: Source,
        *,
        model_name: str,
        known: KnownResults | None = None,
        keep_going: bool = False,
        max_errors: int | None = None,
        on_bad_line: Callable[[BadLine], None] | None = None,
    ) -> None:
        self.engine, self.source = engine, source
        self.num_read = self.num_failed = 0
        self.has_refused = False
        self.first_failure: str | None = None
        self._known: KnownResults = {} if known is None else known
        self._model_name = model_name
        self._keep_going = keep_going
        self._max_errors = max_errors or float("inf")
        self._on_bad_line = on_bad_line
        self._is_reading = True
        self._openai_rows: set[int] = set()
        self._rejected = StepOutcome([], [])

    @property
    def has_given_up(self) -> bool:
        """Whether so many requests have failed that no more are read."""
        return self.num_failed >= self._max_errors

    @property
    def is_complete(self) -> bool:
        """Whether every request of the input has come to its end."""
        return self.source.has_ended and not self.engine.has_work

    def __iter__(self) -> Iterator[StepOutcome]:
        engine = self.engine
        while True:
            if self._is_reading:
                self._read()
                if self._rejected.events:
                    rejected, self._rejected = self._rejected, StepOutcome([], [])
                    yield rejected
            if engine.has_work:
                outcome = engine.step()
                for event in outcome.events:
                    if type(event) is FinishEvent and event.reason == "error":
                        self._note_failure(outcome.results)
                yield outcome
            elif self._is_reading:
                self.source.wait()
            else:
                return

    def encode(self, result: Result) -> bytes:
        """Return the line that answers a request, in the form the request had."""
        if result.index in self._openai_rows:
            self._openai_rows.discard(result.index)
            return encode_openai_row(result, self._model_name)
        return encode_result(result)

    def _read(self) -> None:
        """Read what the next step has room for, as far as it has come."""
        engine, source = self.engine, self.source
        while self._is_reading and engine.wants_request:
            entry = source.next()
            if entry is None:
                self._is_reading = not source.has_ended
                return
            self.num_read += 1
            if isinstance(entry.parsed, ParsedLine):
                self._add(entry.index, entry.parsed)
            elif self._keep_going:
                self._reject(entry.index, entry.parsed)
            else:
                self._report(entry.parsed)
                self.has_refused = True
                self._is_reading = False

    def _add(self, index: int, parsed: ParsedLine) -> None:
        engine, reason = self.engine, self.source.reason
        request, known = parsed.request, self._known.get(index)
        if reason == "follow":
            request = replace(request, arrival_time=max(request.arrival_time, engine.now))
        if parsed.is_openai and known is None:
            self._openai_rows.add(index)
        engine.enqueue(request, index=index, reason=reason, known=known)

    def _reject(self, index: int, bad: BadLine) -> None:
        """Make the bad line an event, and a result unless it has one."""
        engine, problem = self.engine, bad.problems[0]
        self._report(bad)
        event = RejectEvent(engine.num_steps, engine.now, bad.id, index, problem.code)
        self._rejected.events.append(event)
        if self._known.get(index) is None:
            if bad.is_openai:
                self._openai_rows.add(index)
            self._rejected.results.append(make_rejected_result(bad.id, index, bad.problems))
        self._count_failure()

    def _report(self, bad: BadLine) -> None:
        if self._on_bad_line is not None:
            self._on_bad_line(bad)

    def _note_failure(self, results: list[Result]) -> None:
        self._count_failure()
        if self.first_failure is None:
            failures = (f"{r.id}: {r.error.message}" for r in results if r.error is not None)
            self.first_failure = next(failures, None)

    def _count_failure(self) -> None:
        self.num_failed += 1
        if self.has_given_up:
            self._is_reading = False
