"""The run itself: requests from a source, through the engine, out as one outcome after the other.

No file and no terminal is touched here, so whoever iterates decides what becomes of the outcomes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from batcher.engine import Engine
from batcher.engine.outcome import StepOutcome
from batcher.errors import InvariantError
from batcher.events import FinishEvent, RejectEvent, RequestEvent, TokenEvent
from batcher.formats.requests import BadLine, ParsedLine
from batcher.formats.results import encode_result
from batcher.models.base import Model, bytes_of

from .answers import Answer, Flights, KnownResults
from .entries import Entry
from .sources import Source, name_of

_MAX_HELD = 1024  # results that wait for a step


class Outcome(NamedTuple):
    """What a step, or reading before it, has brought; tokens: if the engine streams them."""

    events: list[RequestEvent]
    answers: list[Answer]
    tokens: list[TokenEvent]


class Loop:
    """Iterates over the outcomes of a run.

    is_plain: see Flights.
    num_read: lines taken from the source.  num_failed: requests that failed so far.
    first_failure: what the model did to the first request that failed in it.
    has_refused: a bad line has ended the reading, since such lines are not skipped.
    """

    def __init__(
        self,
        engine: Engine,
        source: Source,
        *,
        model: Model,
        known: KnownResults | None = None,
        is_plain: bool = True,
        keep_going: bool = False,
        max_errors: int | None = None,
        on_bad_line: Callable[[BadLine], None] | None = None,
    ) -> None:
        self.engine, self.source = engine, source
        self.num_read = self.num_failed = 0
        self.has_refused = False
        self.first_failure: str | None = None
        self._flights = Flights(known, is_plain=is_plain)
        self._model = model
        self._keep_going = keep_going
        self._max_errors = max_errors or float("inf")
        self._on_bad_line = on_bad_line
        self._is_reading, self._is_computing = True, False
        self._ahead: Entry | None = None  # a line that was read, and not taken yet
        self._reject_events: list[RequestEvent] = []
        self._reject_answers: list[Answer] = []

    @property
    def has_given_up(self) -> bool:
        """Whether so many requests have failed that no more are read."""
        return self.num_failed >= self._max_errors

    @property
    def is_complete(self) -> bool:
        """Whether every request of the input has come to its end."""
        return self.source.has_ended and self._ahead is None and not self.engine.has_work

    @property
    def current_step(self) -> int | None:
        """The number of the step that is being computed, None between two of them."""
        return self.engine.num_steps if self._is_computing else None

    @property
    def upcoming(self) -> str | None:
        """The id of the first request that the engine has not been given, if that is known."""
        return self.source.upcoming if self._ahead is None else name_of(self._ahead)

    def __iter__(self) -> Iterator[Outcome]:
        engine = self.engine
        while True:
            if self._is_reading:
                while self._read():
                    yield self._outcome(engine.hand_out())
                if self._reject_events:
                    yield Outcome(self._reject_events, self._reject_answers, [])
                    self._reject_events, self._reject_answers = [], []
            if engine.has_work:
                yield self._step()
            elif self._is_reading:
                if self._ahead is not None:
                    raise InvariantError("a request that was read waits for an engine that is idle")
                self.source.wait()
            else:
                return

    def encode(self, answer: Answer) -> bytes:
        """Return the line that `answer` is, in the form its request had."""
        if answer.form == "result":
            return encode_result(answer.results[0])
        from batcher.formats.result_rows import encode_openai_row  # noqa: PLC0415 - only for them

        model = self._model
        read_token = partial(bytes_of, token_bytes=model.tokenizer.token_bytes)
        return encode_openai_row(answer.results, model.name, answer.form, read_token)

    def _step(self) -> Outcome:
        self._is_computing = True
        try:
            outcome = self.engine.step()
        finally:
            self._is_computing = False
        return self._outcome(outcome)

    def _outcome(self, outcome: StepOutcome) -> Outcome:
        """Return what the engine has brought, with answers for its results."""
        events, results, tokens = outcome
        flights = self._flights
        if not (results or flights.is_resumed):  # as in most steps
            return Outcome(events, [], tokens)
        for result in results:
            if result.error is not None and flights.is_first_failure(result.id):
                self._count_failure()
                if self.first_failure is None:
                    self.first_failure = f"{result.id}, {result.error.message}"
        if flights.is_resumed:
            for event in events:
                if type(event) is FinishEvent and flights.note_replayed(event):
                    self._count_failure()
        return Outcome(events, flights.answer(results), tokens)

    def _read(self) -> bool:
        """Read what the next step has room for, as far as it has come, and what needs none.

        So one line may be read ahead.  A request without a slot to wait for ends in the step in
        which it has arrived and all before it have theirs, whatever it is that reads the input.

        Returns whether so many of these have ended that they are to be handed out before the rest.
        """
        num_ended = 0
        engine, source = self.engine, self.source
        while self._is_reading:
            is_wanted = engine.wants_request
            if self._ahead is None and (is_wanted or engine.num_pending == 0):
                self._ahead = source.next()
                if self._ahead is None:
                    self._is_reading = not source.has_ended
            entry = self._ahead
            if entry is None or not (is_wanted or self._ends_at_once(entry)):
                return False
            self._ahead = None
            self.num_read += 1
            if isinstance(entry.parsed, ParsedLine):
                self._add(entry.place, entry.parsed)
                num_ended += entry.parsed.request.max_tokens == 0
                if num_ended == _MAX_HELD:
                    return True
            elif self._keep_going:
                self._reject(entry.place, entry.parsed)
            else:
                self._report(entry.parsed)
                self.has_refused = True
                self._is_reading = False
        return False

    def _ends_at_once(self, entry: Entry) -> bool:
        """Return whether a line is a request that has arrived and needs no slot."""
        if not isinstance(entry.parsed, ParsedLine):
            return False
        request = entry.parsed.request
        has_arrived = request.arrival_time <= self.engine.now or self.source.reason == "follow"
        return has_arrived and request.max_tokens == 0 and request.prompt_logprobs is None

    def _add(self, place: int, parsed: ParsedLine) -> None:
        engine, reason = self.engine, self.source.reason
        request = parsed.request
        known = self._flights.begin(parsed, place)
        if reason == "follow":
            request = replace(request, arrival_time=max(request.arrival_time, engine.now))
        engine.enqueue(request, place=place, reason=reason, known=known)

    def _reject(self, place: int, bad: BadLine) -> None:
        """Make the bad line an event, and an answer unless it has one."""
        engine, problem = self.engine, bad.problems[0]
        self._report(bad)
        event = RejectEvent(engine.num_steps, engine.now, bad.id, 0, problem.code)
        self._reject_events.append(event)
        self._reject_answers += self._flights.reject(bad, place)
        self._count_failure()

    def _report(self, bad: BadLine) -> None:
        if self._on_bad_line is not None:
            self._on_bad_line(bad)

    def _count_failure(self) -> None:
        self.num_failed += 1
        if self.has_given_up:
            self._is_reading = False
