"""A worker: an engine in a process of its own, and the messages between it and the run.

A worker takes instructions, decodes for a while and returns a report.  A line of the input is
identified by its index from 0, not counting blank lines.  The worker finds out what a line is by
itself; the run compares it with the lines before it (duplicate ids, arrival times that go back).
"""

import shutil
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from batcher.engine import Engine
from batcher.errors import BatchdecodeError, LostModelError, describe
from batcher.events import Event, RejectEvent, RestartEvent, RestartReason, RunEvent
from batcher.foreign import RaisedError
from batcher.garbage import look_seldom
from batcher.metrics.summary import EngineState, state_of
from batcher.processes import become_helper
from batcher.requests.lines import BadLine, ParsedLine
from batcher.requests.openai import Form
from batcher.requests.problems import Problem
from batcher.requests.results import make_lost_result
from batcher.result import ErrorInfo
from batcher.trace.run import event_of_worker

from .engine_setup import EngineSetup
from .input import InputError, LineParser, Source, arrival_goes_back, checksum_of, id_of, parse_line
from .loop import Loop
from .problems import ModelTracebacks, ProblemReport
from .results import Answers, InputOrder
from .run_options import RunOptions

REPORT_SECONDS = 0.05  # between two reports of a busy worker
DIED = "worker-died"


class Line(Struct, array_like=True, gc=False):
    """A line of the input, and how it relates to the lines before it.

    number: from 1.  checksum: of a valid request, see LineParser; 0 if the line is to be checked.
    first_number: the earlier line with the same id, or 0.  last_arrival: the arrival time before
    it, if its own is earlier.  num_deaths: workers that died with it.  failure: why it fails, if it
    killed too many of them.
    """

    index: int
    number: int
    text: bytes
    checksum: int
    first_number: int = 0
    last_arrival: float | None = None
    num_deaths: int = 0
    failure: str = ""


class CheckedLine(Struct, array_like=True, gc=False):
    """What a line is by itself.

    id: of the request, or of the bad line.  checksum: see Line.  num_results, num_outputs: how many
    results it gets, and how many samples they are chosen from.  bad: the fields of a BadLine.
    """

    id: str
    checksum: int
    arrival: float = 0.0
    num_results: int = 1
    num_outputs: int = 1
    session: str | None = None
    bad: tuple[str, list[Problem], Form] | None = None


class Instruction(Struct, frozen=True, array_like=True):
    """What the run asks of a worker.

    check: numbered lines to check, not to decode.  decode: lines to answer, in any order.
    drops: whether to answer the lines that are not in the engine yet with nothing.
    is_last: whether no more lines follow.
    """

    check: list[tuple[int, bytes]] = []
    decode: list[Line] = []
    drops: bool = False
    is_last: bool = False


class WorkerFailure(Struct, frozen=True, array_like=True):
    """Why the run is over: no worker could continue.

    traceback: of the model's code, if it raised.  cause: `interrupt` if the model raised a
    KeyboardInterrupt.
    """

    message: str
    traceback: str = ""
    cause: Literal["error", "input", "interrupt"] = "error"


class Report(Struct, frozen=True, omit_defaults=True):
    """What a worker did since its last report, and the state of its engine.

    run: the first event in a trace of this worker alone; in the first report, with nothing else.
    checked: the lines of each `check`, in order.
    indexes, answers: lines that were answered, and their results as lines of the output.
    num_failed: failed requests.  first_failure: id and error of the first one ever.
    said: messages for people, whole lines.
    events: as the trace of the whole run has them, if it needs any.
    constraints: how many were compiled, and how many were found compiled.
    num_steps, now: of the engine.  state: if metrics are exposed.
    num_begun: lines in the engine.
    is_finished: whether all lines are answered and no more follow.
    """

    run: RunEvent | None = None
    checked: list[list[CheckedLine]] = []
    indexes: list[int] = []
    answers: list[bytes] = []
    num_failed: int = 0
    first_failure: str = ""
    said: str = ""
    events: list[Event] = []
    constraints: tuple[int, int] = (0, 0)
    num_steps: int = 0
    now: float = 0.0
    state: EngineState | None = None
    num_begun: int = 0
    is_finished: bool = False
    failure: WorkerFailure | None = None


encode = msgspec.msgpack.Encoder().encode
decode_instruction = msgspec.msgpack.Decoder(Instruction).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


class Died(NamedTuple):
    """A worker died.

    how: in words.  reason, code: see RestartEvent.  is_machine: its machine or the connection to it
    is lost, which counts against no line.
    """

    how: str
    reason: RestartReason = "lost"
    code: int = 0
    is_machine: bool = False


Told = tuple[int, Report | Died]
"""The number of a worker and its message; after Died, none follows until `start`."""


def wants_events(options: RunOptions) -> bool:
    readers = (options.trace, options.report, options.otel, options.timeseries)
    is_read = any(each is not None for each in (*readers, options.summary_json))
    return is_read or options.is_exposed or not options.quiet


class Worker:
    """Decodes lines with the engine of the options, which the first `exchange` creates.

    number: from 0; its slots begin at number * options.batch.
    restart: where its predecessor died, if it replaces one.
    is_idle: whether it has nothing to do until the next instruction.
    """

    def __init__(
        self, options: RunOptions, number: int, restart: RestartEvent | None = None
    ) -> None:
        self._options, self._number, self._restart = options, number, restart
        self._problems = ProblemReport("")
        self._tracebacks = ModelTracebacks(self._problems, is_quiet=options.quiet)
        self._has_started = self.is_idle = False
        self._wants_events = wants_events(options)
        self._events: list[Event] = []
        self._num_held = 0  # lines without an answer
        self._num_failed, self._constraints = 0, (0, 0)  # as reported last

    def _start(self) -> RunEvent:
        setup, restart = EngineSetup(self._options), self._restart
        if not isinstance(setup.engine, Engine):
            raise BatchdecodeError(
                f"--workers needs a local model, and {self._options.model} is on a server: use "
                "--batch to set the number of concurrent requests"
            )
        self._engine = setup.engine
        if restart is not None:
            self._engine.start_at(restart.step, restart.time)
        self._parser = setup.parser(self._problems.tell)
        self._source = GivenLines(LineParser(self._parser))
        self._order = AnswersByIndex()
        self._answers = Answers(
            setup.model.name,
            setup.bytes_of,
            order=self._order,
            first_slot=self._number * self._options.batch,
        )
        self._loop = Loop(self._engine, self._source, self._answers, keep_going=True)
        self._has_started = True
        look_seldom()
        return self._engine.run_event()

    def exchange(self, given: Sequence[Instruction]) -> Report | None:
        """Carry out instructions and decode for a while; return what there is to report.

        The first call is without instructions, and loads the model.

        Raises:
            LostModelError: the model is lost, but another worker may continue.
        """
        self.is_idle = True
        try:
            if not self._has_started:
                return Report(run=self._start())
            with self._tracebacks:
                checked = [
                    [self._check(*line) for line in each.check] for each in given if each.check
                ]
                for instruction in given:
                    self._follow(instruction)
                return self._report(checked) if checked else self._decode()
        except LostModelError:
            raise
        except KeyboardInterrupt:
            failure = WorkerFailure("", cause="interrupt")
        except BatchdecodeError as error:
            raised = error.raised.traceback if isinstance(error, RaisedError) else ""
            failure = WorkerFailure(
                str(error),
                raised if self._has_started else "",
                "input" if isinstance(error, InputError) else "error",
            )
        except Exception as error:  # noqa: BLE001 - the run reports it
            return Report(failure=WorkerFailure(describe(error), traceback.format_exc()))
        return self._report(failure=failure) if self._has_started else Report(failure=failure)

    def _check(self, number: int, text: bytes) -> CheckedLine:
        parsed = parse_line(self._parser, text, number)
        checksum = checksum_of(text, parsed)
        if isinstance(parsed, BadLine):
            return CheckedLine(parsed.id, checksum, bad=(parsed.id, parsed.problems, parsed.form))
        request, numbers = parsed.request, (1, 1)
        if parsed.form == "result":
            numbers = request.n, request.best_of or request.n
        return CheckedLine(id_of(parsed), checksum, request.arrival_time, *numbers, request.session)

    def _follow(self, instruction: Instruction) -> None:
        source = self._source
        self._num_held += len(instruction.decode)
        for line in instruction.decode:
            if not line.failure:
                source.lines.append(line)
                continue
            parsed = source.parse(line)
            if isinstance(parsed, ParsedLine):
                request, engine, name = parsed.request, self._engine, id_of(parsed)
                self._answers.open(request, parsed.form, line.index)
                error = ErrorInfo(DIED, line.failure)
                self._answers.take([make_lost_result(name, i, error) for i in range(request.n)])
                self._loop.note_failure(name, line.failure)
                self._note_events([RejectEvent(engine.num_steps, engine.now, name, 0, DIED)])
        if instruction.drops:
            for line in source.lines:
                self._order.put(line.index, b"")
            source.lines.clear()
        source.is_closed |= instruction.is_last
        self._note_idle()

    def _decode(self) -> Report | None:
        until = time.monotonic() + REPORT_SECONDS
        for outcome in self._loop:
            self._note_events(outcome.events)
            self._note_idle()
            if self.is_idle or time.monotonic() > until:
                return self._report()
        if self._loop.broken is not None:
            raise self._loop.broken
        self.is_idle = True
        self._note_events([self._engine.end_event()])
        return self._report(is_finished=True)

    def _note_idle(self) -> None:
        source = self._source
        is_fed = source.lines or source.is_closed or self._loop.num_ahead
        self.is_idle = not (self._engine.has_work or is_fed)

    def _note_events(self, events: Sequence[Event]) -> None:
        if self._wants_events:
            batch = self._options.batch
            self._events += [event_of_worker(e, self._number, batch) for e in events]

    def _report(
        self,
        checked: Sequence[list[CheckedLine]] = (),
        failure: WorkerFailure | None = None,
        *,
        is_finished: bool = False,
    ) -> Report | None:
        loop, engine, is_watched = self._loop, self._engine, self._options.is_exposed
        said, answers = self._problems.take(), self._order.take()
        is_end = is_finished or failure is not None
        if not (answers or said or self._events or checked or is_watched or is_end):
            return None
        self._note_events(engine.take_step_events())  # so a later death loses none of these steps
        events, self._events = self._events, []
        self._num_held -= len(answers)
        # A request of which one sample has failed starts again if this worker dies before its end.
        num_failed = loop.num_failed - self._answers.num_failing
        num_failed, self._num_failed = num_failed - self._num_failed, num_failed
        (compiled, before), counts = self._constraints, engine.constraint_counts
        self._constraints = counts
        return Report(
            checked=list(checked),
            indexes=[index for index, _ in answers],
            answers=[lines for _, lines in answers],
            num_failed=num_failed,
            first_failure=loop.first_failure or "",
            said=said,
            events=events,
            constraints=(counts[0] - compiled, counts[1] - before),
            num_steps=engine.num_steps,
            now=engine.now,
            state=state_of(engine) if is_watched else None,
            num_begun=self._num_held - len(self._source.lines) - loop.num_ahead,
            is_finished=is_finished,
            failure=failure,
        )


class GivenLines(Source):
    """The lines of a worker that are not in the engine yet; is_closed: no more will follow."""

    def __init__(self, parser: LineParser) -> None:
        self.lines: deque[Line] = deque()
        self.is_closed = False
        self._parser = parser

    def next(self) -> ParsedLine | BadLine | None:
        if not self.lines:
            self.has_ended = self.is_closed
            return None
        line = self.lines.popleft()
        self.input_index = line.index
        return self.parse(line)

    def parse(self, line: Line) -> ParsedLine | BadLine:
        """Parse a line, considering the lines before it.

        Raises:
            InputError: it has changed since it was checked.
        """
        number, text = line.number, line.text
        parsed = self._parser.parse_again(text, number, line.checksum, line.first_number)
        if isinstance(parsed, ParsedLine) and line.last_arrival is not None:
            return arrival_goes_back(parsed, text, number, line.last_arrival)
        return parsed


class AnswersByIndex(InputOrder):
    """Keeps each whole answer with the index of its line until the next report."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: list[tuple[int, bytes]] = []

    def put(self, index: int, lines: bytes) -> list[bytes]:
        self._answers.append((index, lines))
        return []

    def take(self) -> list[tuple[int, bytes]]:
        taken, self._answers = self._answers, []
        return taken


def serve(
    connection: Connection,
    options: RunOptions,
    number: int,
    restart: RestartEvent | None,
    folder: str,
) -> None:
    """Run a worker until the run ends: the main function of its process.

    folder: of the socket of the process that forked it, removed here if the run was killed.
    """
    become_helper(folder)
    worker = Worker(options, number, restart)
    try:
        while True:
            given: list[Instruction] = []
            while connection.poll(None if worker.is_idle and not given else 0):
                given.append(decode_instruction(connection.recv_bytes()))
            report = worker.exchange(given)
            if report is not None:
                connection.send_bytes(encode(report))
    except (EOFError, ConnectionError):  # the run was killed
        shutil.rmtree(folder, ignore_errors=True)
    except LostModelError as error:  # another worker's may work
        sys.exit(str(error))
