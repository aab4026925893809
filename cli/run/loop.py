"""The loop of a run: it reads requests from a source, steps the engine and yields the outcomes.

It touches no file and no terminal: that is the caller's business.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from batcher.engine import Engine, StepOutcome
from batcher.errors import InvariantError
from batcher.events import (
    ArriveEvent,
    EndEvent,
    Event,
    FinishEvent,
    RejectEvent,
    RequestEvent,
    SequenceName,
    TokenEvent,
)
from batcher.request import Unread
from batcher.requests.lines import BadLine, ParsedLine
from batcher.trace.run import RequestTimeline, label_of_name

from ..screen.view import MAX_LISTED, GaugeReading
from .input import InputError, Line, Source, has_arrived, name_of
from .results import Answers

if TYPE_CHECKING:
    from batcher.metrics.prometheus import RunCollector
    from batcher.metrics.summary import RunMetrics
    from batcher.remote.engine import RemoteEngine

MAX_HELD = 1024  # results or bad lines, before they are yielded without a step


class RunOutcome(NamedTuple):
    """What a step, or the reading before it, has brought; lines: of results."""

    events: Sequence[Event]
    lines: Sequence[bytes] = ()
    tokens: Sequence[TokenEvent] = ()


def gauges_of(
    engine: "Engine | RemoteEngine", waiting: Sequence[SequenceName], unread: Unread
) -> GaugeReading:
    """Return the state of an engine; waiting: the first of the queue."""
    return GaugeReading(
        engine.now,
        engine.batch_size - engine.num_running,
        label_of_name(waiting[0]) if waiting else None,
        engine.block_use,
        engine.num_waiting + unread.queued,
        engine.num_coming + unread.coming,
        waiting,
    )


class Loop:
    """Iterates over the outcomes of a run.

    num_read: lines passed to the engine or refused.  num_failed: requests so far.
    first_failure: id and error of the first request that failed in the model.
    has_refused: whether a bad line has ended the reading.
    broken: why the rest of a pipe cannot be read; the requests before it are finished.
    """

    def __init__(
        self,
        engine: "Engine | RemoteEngine",
        source: Source,
        answers: Answers,
        *,
        keep_going: bool = False,
        max_errors: int | None = None,
        on_bad_line: Callable[[BadLine], None] | None = None,
    ) -> None:
        self.engine, self.source, self.answers = engine, source, answers
        self.num_read = self.num_failed = 0
        self.has_refused = False
        self.broken: InputError | None = None
        self.first_failure: str | None = None
        self._keep_going = keep_going
        self._max_errors = max_errors or float("inf")
        self._on_bad_line = on_bad_line
        self._is_reading, self._is_computing = True, False
        self._ahead: ParsedLine | BadLine | None = None  # read, not in the engine yet
        self._rejected: list[tuple[RequestEvent, BadLine, int]] = []

    @property
    def has_given_up(self) -> bool:
        return self.num_failed >= self._max_errors

    @property
    def is_complete(self) -> bool:
        return self.source.has_ended and self._ahead is None and not self.engine.has_work

    @property
    def num_ahead(self) -> int:
        return int(self._ahead is not None)

    @property
    def num_unread(self) -> int | None:
        total = self.source.total
        return None if total is None else total - self.num_read

    @property
    def backlog(self) -> Unread:
        """The unread requests, by the start of the last step."""
        return self.source.backlog(self.engine.last_start)

    @property
    def total(self) -> int | None:
        return self.source.total

    @property
    def num_steps(self) -> list[int]:
        return [self.engine.num_steps]

    def __iter__(self) -> Iterator[RunOutcome]:
        engine = self.engine
        while True:
            while self._is_reading and (outcome := self._read()) is not None:
                yield outcome
            if engine.has_work:
                yield self._step()
            elif self._is_reading:
                if self._ahead is not None:
                    raise InvariantError("a request that was read waits for an idle engine")
                self.source.wait()
                yield RunOutcome(())
            else:
                return

    def note_failure(self, request_id: str, message: str) -> None:
        self._count_failure()
        if self.first_failure is None:
            self.first_failure = f"request {request_id}: {message}"

    def arrived(self) -> list[RequestEvent]:
        """Return the arrivals that are not reported yet, after a step was interrupted."""
        return [e for e in self.engine.take_outcome().events if type(e) is ArriveEvent]

    def end_events(self) -> list[EndEvent]:
        return [self.engine.end_event()]

    def collector(self, metrics: "RunMetrics", model: str) -> "RunCollector":
        from batcher.metrics.prometheus import RunCollector  # noqa: PLC0415 - an extra

        return RunCollector(metrics, self.engine, (model, "0"), lambda: self.backlog)

    def rest(self) -> Iterator[bytes]:
        return self.answers.rest()

    def close(self) -> None:
        self.answers.close()

    def _step(self) -> RunOutcome:
        self._is_computing = True
        try:
            outcome = self.engine.step()
        finally:
            self._is_computing = False
        return self._answered(outcome)

    def _answered(self, outcome: StepOutcome) -> RunOutcome:
        answers = self.answers
        events, results, tokens = outcome
        if not (results or answers.is_resumed):
            return RunOutcome(events, (), tokens)
        for result in results:
            if result.error is not None and answers.is_first_failure(result.id):
                self.note_failure(result.id, result.error.message)
        if answers.is_resumed:
            for event in events:
                if type(event) is FinishEvent and answers.note_replayed(event):
                    self._count_failure()
        return RunOutcome(events, answers.take(results), tokens)

    def _read(self) -> RunOutcome | None:
        """Read requests for the next step, and those that need no slot.

        A request without a slot to wait for ends in the step in which it has arrived and all
        requests before it have a slot, so at most one line is read ahead.
        Returns bad lines or results to yield before reading continues; None when there is enough.
        """
        engine, source = self.engine, self.source
        while self._is_reading:
            is_wanted = engine.wants_request
            if self._ahead is None and (is_wanted or engine.num_pending == 0):
                self._ahead = self._next()
            line = self._ahead
            if line is None or not (is_wanted or self._ends_at_once(line)):
                break
            self._ahead = None
            self.num_read += 1
            source.took(line)
            if isinstance(line, ParsedLine):
                request = line.request
                replayed = self.answers.open(request, line.form, source.input_index)
                if source.reason == "follow":
                    request = replace(request, arrival_time=max(request.arrival_time, engine.now))
                engine.enqueue(
                    request, input_index=source.input_index, reason=source.reason, replayed=replayed
                )
                if engine.num_results >= MAX_HELD:
                    return self._answered(engine.take_outcome())
                continue
            if self._on_bad_line is not None:
                self._on_bad_line(line)
            if not self._keep_going:
                self.has_refused = True
                self._is_reading = False
                continue
            event = RejectEvent(engine.num_steps, engine.now, line.id, 0, line.problems[0].code)
            self._rejected.append((event, line, source.input_index))
            self._count_failure()
            if len(self._rejected) == MAX_HELD:
                break
        if not self._rejected:
            return None
        rejected, self._rejected = self._rejected, []
        lines: list[bytes] = []
        for _, bad, input_index in rejected:
            lines += self.answers.reject(bad, input_index)
        return RunOutcome([event for event, _, _ in rejected], lines)

    def _next(self) -> Line | None:
        """Return the next line; at the end, or where a pipe breaks, stop reading."""
        source = self.source
        try:
            line = source.next()
        except InputError as error:
            if source.total is not None or not self.num_read:
                raise
            self.broken, self._is_reading = error, False
            return None
        if line is None:
            self._is_reading = not source.has_ended
        return line

    def _ends_at_once(self, line: ParsedLine | BadLine) -> bool:
        if not isinstance(line, ParsedLine):
            return False
        request = line.request
        if request.output_limit or request.prompt_logprobs is not None:
            return False
        return request.arrival_time <= self.engine.now or self.source.reason == "follow"

    def _count_failure(self) -> None:
        self.num_failed += 1
        if self.has_given_up:
            self._is_reading = False

    # -- for the view --------------------------------------------------------------------------

    @property
    def current_step(self) -> int | None:
        return self.engine.num_steps if self._is_computing else None

    def read_gauges(self) -> GaugeReading:
        return gauges_of(self.engine, self.waiting, self.backlog)

    def peek(self, request_id: str, index: int, num_tokens: int) -> tuple[str, str] | None:
        return self.engine.peek(request_id, index, num_tokens)

    def unfinished_texts(self, found: Iterable[RequestTimeline]) -> Iterator[tuple[str, str, int]]:
        """Yield the label, the text and the number of tokens of each output that has a token."""
        for output in found:
            num_tokens = output.tokens_after(self.engine.num_steps - 1)
            if output.role == "sample" and num_tokens > 0:
                texts = self.engine.peek(output.id, output.index, num_tokens, sys.maxsize)
                if texts is not None:
                    yield output.label, texts[1], num_tokens

    def find_upcoming(self, text: str) -> str | None:
        ahead, source = self._ahead, self.source
        found = source.find(text)
        if ahead is not None and found != text:
            name = name_of(ahead, source.input_index)
            if text in name:
                return name
        return found

    def knows_upcoming(self) -> bool:
        return self.source.is_in_memory and not self.engine.num_pending

    @property
    def waiting(self) -> list[SequenceName]:
        """The next sequences to be admitted, as far as they are known."""
        found, num, now = self.engine.next_waiting(MAX_LISTED), MAX_LISTED, self.engine.last_start
        ahead = self._ahead  # it is read when a slot is free
        if ahead is not None:
            if not isinstance(ahead, ParsedLine) or not has_arrived(ahead.request, now):
                return found
            found.append(SequenceName(name_of(ahead, self.source.input_index), 0))
        names = self.source.upcoming(now, num - len(found))
        return [*found, *(SequenceName(name, 0) for name in names)]
