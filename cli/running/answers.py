"""Requests in flight, and the answers their results become: a line for each, or one for all."""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Protocol

from msgspec import Struct

from batcher.events import FinishEvent
from batcher.formats.openai import Form
from batcher.formats.requests import BadLine, ParsedLine
from batcher.formats.results import make_rejected_result
from batcher.request import Request
from batcher.result import Result
from batcher.validation import constraint_fields_of

_NOTHING: Mapping[int, Result] = {}


class KnownResults(Protocol):
    """The results of an earlier run."""

    def results_of(self, request: Request, /) -> Mapping[int, Result]:
        """Return the results that `request` has already, by their index."""

    def check_replay(self, request: Request, known: Mapping[int, Result], /) -> None:
        """Make sure that `known` results of `request` can be replayed.

        Raises:
            BatchdecodeError: one cannot have come about in a plain run.
        """

    def has_rejected(self, request_id: str, line_number: int, /) -> bool:
        """Return whether there is the result of a bad line: the id it gave and its number."""


class Answer(Struct, gc=False):
    """What is written at once for one line of the input.

    place: of that line.  results: one of them in our own form, all of them for an OpenAI row, in
    their order.  rank: ascends over the answers of a line in their order, which is that of the
    index, or, with best_of, the best first.  is_last: nothing more comes for this line.
    """

    place: int
    results: list[Result]
    form: Form = "result"
    rank: int = 0
    is_last: bool = True


class _Flight(Struct, gc=False):
    """A request that is in the engine.

    num_left: how many of its results have not come.  known: those that an earlier run has given.
    num_lacking: how many are not written; failures may have made other samples the best ones.
    is_replayed: the engine goes through the motions for them, and decodes only the others.
    is_ranked: its results come in their order, all at once.  form: that of the answer.
    row: the results that have come, of an OpenAI row; None for a request in our own form.
    """

    place: int
    num_left: int
    num_lacking: int
    known: Mapping[int, Result]
    is_replayed: bool
    is_ranked: bool
    form: Form
    has_failed: bool = False
    row: list[Result] | None = None


class Flights:
    """All requests in the engine, by id, and what is still to come for each.

    is_plain: what every step does follows from how many tokens each row has, so that known results
    need not be decoded again.
    """

    def __init__(self, earlier: KnownResults | None = None, *, is_plain: bool = True) -> None:
        self.is_resumed = earlier is not None
        self._is_plain = is_plain
        self._earlier = earlier
        self._flights: dict[str, _Flight] = {}

    def begin(self, parsed: ParsedLine, place: int) -> Mapping[int, Result]:
        """Take in the request of a line; return those of its results that the engine may replay."""
        request = parsed.request
        request_id: str = request.id  # type: ignore[assignment]  # its parser has set it
        known, is_replayed = _NOTHING, False
        if self._earlier is not None:
            known = self._earlier.results_of(request)
            is_replayed = self._is_plain and can_be_replayed(request)
            if is_replayed:
                self._earlier.check_replay(request, known)
        is_ranked = request.best_of is not None
        num_lacking = request.n - len(known)
        flight = _Flight(place, request.n, num_lacking, known, is_replayed, is_ranked, parsed.form)
        if parsed.form != "result":
            flight.row = []
        self._flights[request_id] = flight
        return known if is_replayed else _NOTHING

    def reject(self, bad: BadLine, place: int) -> list[Answer]:
        """Return the answer to a bad line, nothing if an earlier run has given it."""
        number = bad.problems[0].line
        if self._earlier is not None and self._earlier.has_rejected(bad.id, number):
            return []
        return [Answer(place, [make_rejected_result(bad.id, bad.problems)], bad.form)]

    def is_first_failure(self, request_id: str) -> bool:
        """Take note that a result of a request is an error; return whether it is its first."""
        flight = self._flights[request_id]
        is_first = not flight.has_failed
        flight.has_failed = True
        return is_first

    def note_replayed(self, event: FinishEvent) -> bool:
        """Take note that a sequence has ended; return whether its request failed by that.

        Needed only if a run is resumed: of a replayed sample there is no result.
        """
        flight = self._flights.get(event.id)
        if flight is None or not flight.is_replayed or event.index not in flight.known:
            return False
        if event.role == "negative":
            return False
        has_failed = event.reason == "error" and self.is_first_failure(event.id)
        self._count_down(event.id, flight)
        return has_failed

    def answer(self, results: Iterable[Result]) -> list[Answer]:
        """Return what is to be written now that these results have come."""
        answers = []
        for result in results:
            flight = self._flights[result.id]
            self._count_down(result.id, flight)
            is_last = not flight.num_left
            if flight.row is not None:
                flight.row.append(result)
                if is_last and not flight.known:  # of a row, all results are known or none is
                    if not flight.is_ranked:
                        flight.row.sort(key=attrgetter("index"))
                    answers.append(Answer(flight.place, flight.row, flight.form))
            elif result.index not in flight.known and flight.num_lacking > 0:
                flight.num_lacking -= 1
                rank = -flight.num_left if flight.is_ranked else result.index
                answers.append(Answer(flight.place, [result], rank=rank, is_last=is_last))
        return answers

    def _count_down(self, request_id: str, flight: _Flight) -> None:
        flight.num_left -= 1
        if not flight.num_left:
            del self._flights[request_id]


def can_be_replayed(request: Request) -> bool:
    """Return whether the schedule of `request` follows from its results, one by one.

    Where tokens are forced, several may come in one step, and of best_of and beams some rows have
    no result.  Of those that only have their prompt computed, a slot is held for no token.
    """
    is_forced = request.heal or bool(constraint_fields_of(request))
    is_scored_alone = request.max_tokens == 0 and request.prompt_logprobs is not None
    is_forced |= is_scored_alone
    return request.best_of is None and request.num_beams == 1 and not is_forced
