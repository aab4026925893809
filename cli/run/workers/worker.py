"""What a worker is: an engine over the lines it is given, which tells what has come of them.

Rule: it takes instructions and gives reports, and knows nothing of how these travel.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import starmap

from msgspec.structs import astuple, force_setattr

from batcher.engine import Engine, StepOutcome
from batcher.errors import BatchdecodeError, LostModelError
from batcher.events import FinishEvent, RejectEvent, RestartEvent
from batcher.foreign import RaisedError
from batcher.request import Request
from batcher.requests.lines import BadLine, ParsedLine
from batcher.requests.results import make_lost_result
from batcher.result import ErrorInfo, Result

from ..answers import Answers
from ..engine_setup import EngineSetup
from ..intake import InputError
from ..loop import Loop
from ..problems import ModelTracebacks, ProblemReport, arrival_goes_back, id_given_before, id_of
from ..reading import Duplicates, LineParser, checksum_of, parse_line
from ..run_options import RunOptions
from ..sources import Source
from .messages import (
    Answered,
    Check,
    Checked,
    Decode,
    Drop,
    Dropped,
    Failed,
    Finish,
    Finished,
    Instruction,
    Line,
    Lines,
    Ready,
    Refused,
    Remark,
    Report,
    Row,
    Several,
    StoppedByModel,
)
from .telling import Telling, Wanted

REPORT_SECONDS = 0.05
"""For so long, at least, answers are collected while there is more to do."""
DIED = "worker-died"


class Worker:
    """Answers lines with the engine that the options describe.

    number: which worker it is, from 0: it has the slots from number * options.batch on.
    is_idle: it has nothing to do until it is told more.
    wanted: what it is to tell beside answers.
    restart: where it goes on, if it is in the place of one that has died.

    Raises:
        BatchdecodeError: there is no such model, or it cannot have such a batch.
    """

    def __init__(
        self,
        options: RunOptions,
        number: int,
        wanted: Wanted,
        restart: RestartEvent | None = None,
    ) -> None:
        setup = EngineSetup(options)
        if not isinstance(setup.engine, Engine):
            raise BatchdecodeError(
                f"--workers decode by themselves; {options.model} is a server's: "
                "--batch says how many requests it is sent at once"
            )
        self._engine = setup.engine
        if restart is not None:
            self._engine.go_on_from(restart.step, restart.time)
        self._first_slot = number * options.batch
        self._report = ProblemReport("")
        self._tracebacks = ModelTracebacks(self._report, is_quiet=options.quiet)
        self._parser = setup.parser(self._report.tell)
        self._source = GivenLines(LineParser(self._parser, Duplicates()))
        self._order = AsTheyCome()
        self._answers = Answers(setup.model.name, setup.bytes_of, order=self._order)
        self._loop = Loop(self._engine, self._source, self._answers, keep_going=True)
        self._telling = Telling(wanted, self._engine, number, restart)
        self._num_failed = 0  # that were reported
        self._num_held = 0  # lines without an answer
        self._partial: list[FinishEvent] = []  # of outputs of those
        self.is_idle = True

    def ready(self) -> Ready:
        """Return what it reports first."""
        return Ready(self._engine.run_event())

    def exchange(self, instructions: Sequence[Instruction]) -> Iterator[Report]:
        """Do what is said, and what is left of what was said before, for a while.

        Raises:
            LostModelError: another worker may go on with what this one cannot.
        """
        with self._tracebacks:
            try:
                for instruction in instructions:
                    match instruction:
                        case Check(numbers, texts):
                            yield self._check(numbers, texts)
                        case Decode(lines):
                            self._take(lines)
                        case Finish():
                            self._source.is_closed = True
                        case Drop():
                            yield self._drop()
                yield from self._decode()
            except LostModelError:
                raise
            except KeyboardInterrupt:
                yield from self._answered()
                yield StoppedByModel()
            except BatchdecodeError as error:
                yield from self._answered()
                traceback = error.raised.traceback if isinstance(error, RaisedError) else ""
                is_input = isinstance(error, InputError)
                yield Failed(str(error), traceback, is_input=is_input)

    def _check(self, numbers: list[int], texts: list[bytes]) -> Checked:
        """Return what lines are by themselves."""
        checked = Checked([], [], {}, {}, [], {})
        arrivals = []
        for place, (number, text) in enumerate(zip(numbers, texts, strict=True)):
            parsed = parse_line(self._parser, text, number)
            checked.checksums.append(checksum_of(text, parsed))
            if isinstance(parsed, BadLine):
                checked.bad[place] = Refused(parsed.id, parsed.problems, parsed.form)
                checked.ids.append(parsed.id)
                arrivals.append(0.0)
                continue
            request = parsed.request
            checked.ids.append(id_of(parsed))
            arrivals.append(request.arrival_time)
            if request.n > 1 and parsed.form == "result":
                checked.several[place] = Several(request.n, request.best_of or request.n)
            if request.session is not None:
                checked.sessions[place] = request.session
        if any(arrivals):
            checked.arrivals.extend(arrivals)
        return checked

    def _take(self, lines: Lines) -> None:
        """Take in lines to be answered; those that are lost are so at once."""
        self._num_held += len(lines)
        if not lines.remarks:
            self._source.lines.extend(lines.rows())
            return
        for line in starmap(Line, lines.rows()):
            remark = lines.remarks.get(line.index)
            if remark is not None and remark.deaths:
                self._lose(line, remark.deaths)
                continue
            self._source.lines.append(astuple(line))
            if remark is not None:
                self._source.remarks[line.index] = remark

    def _lose(self, line: Line, why: str) -> None:
        """Answer a line that no worker has survived."""
        parsed = self._source.parse(*astuple(line))
        if isinstance(parsed, ParsedLine):
            self._answers.open(parsed.request, parsed.form, line.index)
            self._answers.take(_lost(parsed.request, why))
            self._loop.note_failure(id_of(parsed), why)
            name, engine = id_of(parsed), self._engine
            event = RejectEvent(engine.num_steps, engine.now, name, 0, DIED)
            self._telling.note([event])

    def _drop(self) -> Dropped:
        """Forget the lines that have not begun."""
        lines = self._source.lines
        dropped = Dropped([index for index, *_ in lines])
        self._num_held -= len(lines)
        lines.clear()
        self._source.remarks.clear()
        return dropped

    def _decode(self) -> Iterator[Report]:
        """Take steps until there is enough to tell, or nothing to do."""
        until, self.is_idle = time.monotonic() + REPORT_SECONDS, False
        try:
            for outcome in self._loop:
                self._note(outcome)
                if time.monotonic() > until:
                    break
            else:
                if self._loop.broken is not None:
                    raise self._loop.broken
                self.is_idle = True
                self._telling.note([self._engine.end_event()])
                yield from self._answered()
                yield Finished()
                return
        except NothingGiven:
            self.is_idle = True
        yield from self._answered()

    def _note(self, outcome: StepOutcome) -> None:
        """Take note of what a step did."""
        if outcome.events:
            self._telling.note(outcome.events)
        if self._first_slot:
            for result in outcome.results:
                if result.slot is not None:
                    force_setattr(result, "slot", self._first_slot + result.slot)
        answers = self._answers
        answers.take(outcome.results)
        if answers.has_open or self._partial:
            ended = [event for event in outcome.events if isinstance(event, FinishEvent)]
            self._partial = [e for e in self._partial + ended if answers.is_open(e.id)]

    def _answered(self) -> Iterator[Answered]:
        """Yield what has come since the last time, if anything has."""
        loop, telling, said = self._loop, self._telling, self._report.take()
        indexes, answers = self._order.take()
        is_overdue = telling.is_overdue
        if indexes or said or telling.has_events or is_overdue:
            # If it dies after this, nothing is missing of the steps that were made by now.
            telling.note(self._engine.tell_steps())
        events = telling.events()
        self._num_held -= len(indexes)
        if indexes or said or events or is_overdue:
            # A request that has failed in part is decoded again if this worker dies before its end.
            num_failed = loop.num_failed - self._answers.num_failing
            num_failed, self._num_failed = num_failed - self._num_failed, num_failed
            yield Answered(
                indexes,
                b"".join(answers),
                list(map(len, answers)),
                num_failed,
                loop.first_failure or "",
                said,
                events,
                self._engine.num_steps,
                self._engine.now,
                telling.totals(self._partial) if indexes or events or is_overdue else b"",
                telling.state(),
                self._num_held - len(self._source.lines) - loop.num_ahead,
            )


class GivenLines(Source):
    """The lines that a worker was given and has not begun.

    lines: what makes a `Line` of each.  remarks: see Lines.  is_closed: there will be no more.
    """

    def __init__(self, parser: LineParser) -> None:
        self.lines: deque[Row] = deque()
        self.remarks: dict[int, Remark] = {}
        self.is_closed = False
        self._parser = parser

    def next(self) -> ParsedLine | BadLine | None:
        """Return the next line; see Source."""
        if not self.lines:
            self.has_ended = self.is_closed
            return None
        row = self.lines.popleft()
        self.input_index = row[0]
        return self.parse(*row)

    def parse(self, index: int, number: int, text: bytes, checksum: int) -> ParsedLine | BadLine:
        """Return what a line is, beside the lines before it.

        Raises:
            InputError: it is not what it was when it was checked.
        """
        parsed = self._parser.parse_again(text, number, index, checksum)
        remark = self.remarks.pop(index, None) if self.remarks else None
        if remark is not None and isinstance(parsed, ParsedLine):
            if remark.first_number:
                return id_given_before(parsed, text, number, remark.first_number)
            if remark.last_arrival is not None:
                return arrival_goes_back(parsed, text, number, remark.last_arrival)
        return parsed

    def wait(self) -> None:
        """Leave the loop, which goes on when there is more.

        Raises:
            NothingGiven: always.
        """
        raise NothingGiven


class NothingGiven(Exception):  # noqa: N818 - it is none
    """An engine is idle, and no line is there for it."""


class AsTheyCome:
    """The `Order` of lines that are answered as soon as all results of one are there."""

    def __init__(self) -> None:
        self._indexes: list[int] = []
        self._answers: list[bytes] = []

    def put(self, index: int, lines: bytes) -> list[bytes]:
        """Take in the lines that answer the line `index`; nothing is to be written by now."""
        self._indexes.append(index)
        self._answers.append(lines)
        return []

    def take(self) -> tuple[list[int], list[bytes]]:
        """Return what was put since the last time: the indexes, and the lines for each."""
        taken = self._indexes, self._answers
        self._indexes, self._answers = [], []
        return taken

    def rest(self) -> Iterator[bytes]:
        """Yield nothing: nothing is kept back."""
        yield from ()

    def close(self) -> None:
        """Do nothing: there is no file."""


def _lost(request: Request, why: str) -> list[Result]:
    """Return what a request is answered with that no worker has survived."""
    error = ErrorInfo(DIED, why)
    return [make_lost_result(request.id or "", index, error) for index in range(request.n)]
