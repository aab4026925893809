"""Workers of a run: engines in processes of this machine, and what is said between them and it.

A line of the input is known by its index, from 0, without blank ones.  What a line is by itself, a
worker finds out; what it is beside others (an id given before), the run does.  A worker takes
instructions and returns reports, and knows nothing of how these travel.

The run never waits for a process to read or write; a process waits for the run, so that one whose
reports pile up goes no further.  Processes end when the run does, however it ends.
"""

import os
import resource
import select
import selectors
import shutil
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from batcher.engine import Engine, StepOutcome
from batcher.errors import BatchdecodeError, LostModelError, describe
from batcher.events import Event, RejectEvent, RestartEvent, RestartReason, RunEvent
from batcher.foreign import RaisedError
from batcher.garbage import look_seldom
from batcher.metrics.summary import EngineState, state_of
from batcher.processes import become_helper, helpers_started, threads_shared
from batcher.requests.lines import BadLine, ParsedLine
from batcher.requests.openai import Form
from batcher.requests.problems import Problem
from batcher.requests.results import make_lost_result
from batcher.result import ErrorInfo
from batcher.trace.run import event_of_worker

from .engine_setup import EngineSetup
from .input import (
    Duplicates,
    InputError,
    LineParser,
    Source,
    arrival_goes_back,
    checksum_of,
    id_given_before,
    id_of,
    parse_line,
)
from .loop import Loop
from .problems import ModelTracebacks, ProblemReport
from .results import Answers, InputOrder
from .run_options import RunOptions

REPORT_SECONDS = 0.05
"""For so long, at least, answers are collected while there is more to do."""
DIED = "worker-died"
CHUNK_BYTES = 2**18
_OWN_FILES, _FILES_OF_WORKER = 16, 4  # at once: of the run itself, and for each worker
_GRACE = 5.0  # seconds, in which the end of a process is known
_LENGTH = struct.Struct("<Q")

Waiting = Callable[[], AbstractContextManager[None]]


Line = tuple[int, int, bytes, int]
"""A line of the input: its index, its number from 1, its text and its checksum.

That is the checksum of a line that is known to be a request, see LineParser; 0 of one that is to be
looked at.
"""


class Remark(Struct, frozen=True):
    """What is odd about a line beside others.

    first_number: which line has the id of this one already; 0 if none has.
    last_arrival: that of the line before it, if this one goes back behind it.
    deaths: why the workers died that had it alone, if they were so many that it has failed.
    """

    first_number: int = 0
    last_arrival: float | None = None
    deaths: str = ""


class Lines(Struct, array_like=True):
    """Lines of the input, in its order, as columns; remarks: by their indexes.

    Millions go by in thousands, so nothing is done for one of them that is not done in C.
    """

    indexes: list[int] = []
    numbers: list[int] = []
    texts: list[bytes] = []
    checksums: list[int] = []
    remarks: dict[int, Remark] = {}

    def __len__(self) -> int:
        return len(self.indexes)

    def rows(self) -> Iterable[Line]:
        return zip(self.indexes, self.numbers, self.texts, self.checksums, strict=True)

    def append_line(self, line: Line, remark: Remark | None = None) -> None:
        columns = (self.indexes, self.numbers, self.texts, self.checksums)
        for column, value in zip(columns, line, strict=True):
            column.append(value)  # type: ignore[attr-defined]  # of four types
        if remark is not None:
            self.remarks[line[0]] = remark

    def extend(self, more: "Lines") -> None:
        self.indexes += more.indexes
        self.numbers += more.numbers
        self.texts += more.texts
        self.checksums += more.checksums
        self.remarks |= more.remarks

    def take_first(self, most: int) -> "Lines":
        """Remove the first lines, up to so many, and return them."""
        columns = indexes, numbers, texts, checksums = (
            self.indexes,
            self.numbers,
            self.texts,
            self.checksums,
        )
        taken = Lines(indexes[:most], numbers[:most], texts[:most], checksums[:most])
        for column in columns:
            del column[:most]
        if self.remarks:
            first = set(taken.indexes).intersection(self.remarks)
            taken.remarks = {index: self.remarks.pop(index) for index in first}
        return taken


class Several(NamedTuple):
    """How many results a line is answered with, and how many its best are chosen from."""

    num_results: int
    num_outputs: int


Refused = tuple[str, list[Problem], Form]
"""What a BadLine is: its id, problems and form."""

# -- instructions ---------------------------------------------------------------------------------


class Check(Struct, frozen=True, tag=True):
    """Find out what these lines are; they are not decoded yet.  Answered by `Checked`."""

    numbers: list[int]
    texts: list[bytes]


class Decode(Struct, frozen=True, tag=True):
    """Answer these lines, in whatever order; in steps of all that are there."""

    lines: Lines


class Finish(Struct, frozen=True, tag=True):
    """There will be no more lines.  Answered by `Finished`, when all are answered."""


class Drop(Struct, frozen=True, tag=True):
    """Do not begin what has not begun.  Answered by `Dropped`."""


# -- reports --------------------------------------------------------------------------------------


class Ready(Struct, frozen=True, tag=True):
    """The model is there.  run: how a trace of this worker alone would begin."""

    run: RunEvent


class Checked(Struct, frozen=True, tag=True):
    """What the lines of one `Check` are, in their order.

    ids: of the requests, and those that bad lines give.  checksums: see Line.
    bad: by the place in the list, as are the others.  several: those with more than one result.
    arrivals: of all lines, where there is one that is not 0.  sessions: those of requests with one.
    """

    ids: list[str]
    checksums: list[int]
    bad: dict[int, Refused]
    several: dict[int, Several]
    arrivals: list[float]
    sessions: dict[int, str]


class Answered(Struct, frozen=True, tag=True):
    """Lines that have been answered since the last report, and how the worker stands.

    indexes: of the lines.  answers: their results as lines of the output, one after the other.
    lengths: how many bytes of them each line is answered with.
    num_failed: how many requests have failed.  first_failure: what the model did to the first.
    said: messages for people, in whole lines.
    events: since the last report, as the trace of the whole run has them, if they are wanted.
    constraints: how many were compiled since then, and how many were there before.
    num_steps: that were made.  now: when the next one starts, in seconds of the engine's clock.
    state: how the engine stands, if that is wanted.  num_begun: lines that are in the engine.
    """

    indexes: list[int]
    answers: bytes
    lengths: list[int]
    num_failed: int = 0
    first_failure: str = ""
    said: str = ""
    events: list[Event] = []
    constraints: tuple[int, int] = (0, 0)
    num_steps: int = 0
    now: float = 0.0
    state: EngineState | None = None
    num_begun: int = 0

    def by_line(self) -> Iterator[tuple[int, bytes]]:
        start = 0
        for index, length in zip(self.indexes, self.lengths, strict=True):
            yield index, self.answers[start : start + length]
            start += length


class Dropped(Struct, frozen=True, tag=True):
    """These lines will have no answer; indexes: of the lines."""

    indexes: list[int]


class Finished(Struct, frozen=True, tag=True):
    """All lines are answered, there will be no more, and all that has happened is reported."""


class Failed(Struct, frozen=True, tag=True):
    """The worker cannot go on, and no other one could: the run is over.

    traceback: of what the model's code raised, if that is why.  is_input: the input is at fault.
    """

    message: str
    traceback: str = ""
    is_input: bool = False


class StoppedByModel(Struct, frozen=True, tag=True):
    """The model has raised a KeyboardInterrupt, which stops the run."""


Instruction = Check | Decode | Finish | Drop
Report = Ready | Checked | Answered | Dropped | Finished | Failed | StoppedByModel

encode = msgspec.msgpack.Encoder().encode
decode_instruction = msgspec.msgpack.Decoder(Instruction).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


class Died(NamedTuple):
    """A worker has come to an end that the run did not ask for.

    how: in words.  reason, code: see RestartEvent.
    is_machine: its machine has, or the way there: that is held against no line.
    """

    how: str
    reason: RestartReason = "lost"
    code: int = 0
    is_machine: bool = False


Told = tuple[int, Report | Died]
"""The number of a worker, and what comes of it; after `Died` nothing does until it is started."""


class Transport(Protocol):
    """Starts workers, which are known by their numbers, and speaks to them."""

    def start(self, number: int, restart: RestartEvent | None = None) -> None:
        """Start the worker `number`, whose first report is `Ready`.

        restart: where it goes on, if it is in the place of one that has died.
        """

    def send(self, number: int, instruction: Instruction) -> None:
        """Send to a worker; never waits, and never fails: `receive` returns that it died."""

    def receive(self) -> list[Told]:
        """Wait until something has come of any worker, or `wake` is called; return what has."""

    def wake(self) -> None:
        """Let `receive` come back.  Any thread may call this."""


class Wanted(NamedTuple):
    """What is reported beside answers.

    events: all that happens, for whoever shows, counts or writes it.
    state: how the engine stands, for Prometheus, with every report.
    """

    events: bool
    state: bool

    @classmethod
    def by(cls, options: RunOptions) -> "Wanted":
        readers = (options.trace, options.report, options.otel, options.timeseries)
        is_read = any(each is not None for each in (*readers, options.summary_json))
        return cls(is_read or options.is_exposed or not options.quiet, options.is_exposed)


class Worker:
    """Answers lines with the engine that the options describe, which the first exchange makes.

    number: which worker it is, from 0: it has the slots from number * options.batch on.
    is_idle: it has nothing to do until it is told more.
    restart: where it goes on, if it is in the place of one that has died.
    """

    def __init__(
        self, options: RunOptions, number: int, restart: RestartEvent | None = None
    ) -> None:
        self._options, self._number, self._restart = options, number, restart
        self._batch, self._wanted = options.batch, Wanted.by(options)
        self._report = ProblemReport("")
        self._tracebacks = ModelTracebacks(self._report, is_quiet=options.quiet)
        self._order = AsTheyCome()
        self._has_started = False
        self._events: list[Event] = []  # that are not reported
        self._constraints = 0, 0  # that were
        self._num_failed = 0  # that were
        self._num_held = 0  # lines without an answer
        self.is_idle = False

    def _start(self) -> Ready:
        setup, restart = EngineSetup(self._options), self._restart
        if not isinstance(setup.engine, Engine):
            raise BatchdecodeError(
                f"--workers decode by themselves; {self._options.model} is a server's: "
                "--batch says how many requests it is sent at once"
            )
        self._engine = setup.engine
        if restart is not None:
            self._engine.go_on_from(restart.step, restart.time)
        self._parser = setup.parser(self._report.tell)
        self._source = GivenLines(LineParser(self._parser, Duplicates()))
        self._answers = Answers(setup.model.name, setup.bytes_of, order=self._order)
        self._loop = Loop(self._engine, self._source, self._answers, keep_going=True)
        self._has_started = True
        look_seldom()
        return Ready(self._engine.run_event())

    def exchange(self, instructions: Sequence[Instruction]) -> Iterator[Report]:
        """Do what is said, and go on for a while; yield what comes of it, first that it is ready.

        Raises:
            LostModelError: another worker may go on with what this one cannot.
            EOFError, ConnectionError: whoever takes the reports has gone.
        """
        self.is_idle = True  # unless it turns out to have more to do
        try:
            if not self._has_started:
                yield self._start()
            with self._tracebacks:
                for instruction in instructions:
                    match instruction:
                        case Check(numbers, texts):
                            yield self._check(numbers, texts)
                        case Decode(lines):
                            self._take_lines(lines)
                        case Finish():
                            self._source.is_closed = True
                        case Drop():
                            waiting = self._source.lines
                            yield Dropped([index for index, *_ in waiting])
                            self._num_held -= len(waiting)
                            waiting.clear()
                            self._source.remarks.clear()
                yield from self._decode()
        except LostModelError:
            raise
        except KeyboardInterrupt:
            yield from self._answered()
            yield StoppedByModel()
        except BatchdecodeError as error:
            yield from self._answered()
            said = ""
            if self._has_started and isinstance(error, RaisedError):
                said = error.raised.traceback
            yield Failed(str(error), said, is_input=isinstance(error, InputError))
        except Exception as error:  # noqa: BLE001 - it is told where the others are
            yield Failed(describe(error), traceback.format_exc())

    def _check(self, numbers: list[int], texts: list[bytes]) -> Checked:
        checked = Checked([], [], {}, {}, [], {})
        arrivals = []
        for place, (number, text) in enumerate(zip(numbers, texts, strict=True)):
            parsed = parse_line(self._parser, text, number)
            checked.checksums.append(checksum_of(text, parsed))
            if isinstance(parsed, BadLine):
                checked.bad[place] = parsed.id, parsed.problems, parsed.form
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

    def _take_lines(self, lines: Lines) -> None:
        """Take in lines to be answered; those that no worker has survived are so at once."""
        self._num_held += len(lines)
        if not lines.remarks:
            self._source.lines.extend(lines.rows())
            return
        for row in lines.rows():
            remark = lines.remarks.get(row[0])
            if remark is None or not remark.deaths:
                self._source.lines.append(row)
                if remark is not None:
                    self._source.remarks[row[0]] = remark
                continue
            parsed = self._source.parse(*row)
            if isinstance(parsed, ParsedLine):
                request, engine, name = parsed.request, self._engine, id_of(parsed)
                self._answers.open(request, parsed.form, row[0])
                error = ErrorInfo(DIED, remark.deaths)
                lost = [make_lost_result(request.id or "", i, error) for i in range(request.n)]
                self._answers.take(lost)
                self._loop.note_failure(name, remark.deaths)
                self._note_events([RejectEvent(engine.num_steps, engine.now, name, 0, DIED)])

    def _decode(self) -> Iterator[Report]:
        until, self.is_idle = time.monotonic() + REPORT_SECONDS, False
        try:
            for outcome in self._loop:
                self._take_outcome(outcome)
                if time.monotonic() > until:
                    break
            else:
                if self._loop.broken is not None:
                    raise self._loop.broken
                self.is_idle = True
                self._note_events([self._engine.end_event()])
                yield from self._answered()
                yield Finished()
                return
        except NothingGiven:
            self.is_idle = True
        yield from self._answered()

    def _take_outcome(self, outcome: StepOutcome) -> None:
        self._note_events(outcome.events)
        if self._number:
            for result in outcome.results:
                if result.slot is not None:
                    force_setattr(result, "slot", self._number * self._batch + result.slot)
        self._answers.take(outcome.results)

    def _note_events(self, events: Sequence[Event]) -> None:
        if self._wanted.events:
            self._events += [event_of_worker(e, self._number, self._batch) for e in events]

    def _answered(self) -> Iterator[Answered]:
        if not self._has_started:
            return
        loop, engine, said = self._loop, self._engine, self._report.take()
        indexes, answers = self._order.take()
        if not (indexes or said or self._events or self._wanted.state):
            return
        # If it dies after this, nothing is missing of the steps that were made by now.
        self._note_events(engine.tell_steps())
        events, self._events = self._events, []
        self._num_held -= len(indexes)
        # A request that has failed in part is decoded again if this worker dies before its end.
        num_failed = loop.num_failed - self._answers.num_failing
        num_failed, self._num_failed = num_failed - self._num_failed, num_failed
        (compiled, before), counts = self._constraints, engine.constraint_counts
        self._constraints = counts
        yield Answered(
            indexes,
            b"".join(answers),
            list(map(len, answers)),
            num_failed,
            loop.first_failure or "",
            said,
            events,
            (counts[0] - compiled, counts[1] - before),
            engine.num_steps,
            engine.now,
            state_of(engine) if self._wanted.state else None,
            self._num_held - len(self._source.lines) - loop.num_ahead,
        )


class GivenLines(Source):
    """The lines that a worker was given and has not begun.

    remarks: see Lines.  is_closed: there will be no more.
    """

    def __init__(self, parser: LineParser) -> None:
        self.lines: deque[Line] = deque()
        self.remarks: dict[int, Remark] = {}
        self.is_closed = False
        self._parser = parser

    def next(self) -> ParsedLine | BadLine | None:
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


class AsTheyCome(InputOrder):
    """Keeps what lines are answered with, as soon as all results of one are there, to be taken."""

    def __init__(self) -> None:
        super().__init__()
        self._indexes: list[int] = []
        self._answers: list[bytes] = []

    def put(self, index: int, lines: bytes) -> list[bytes]:
        self._indexes.append(index)
        self._answers.append(lines)
        return []

    def take(self) -> tuple[list[int], list[bytes]]:
        taken = self._indexes, self._answers
        self._indexes, self._answers = [], []
        return taken


# -- processes ------------------------------------------------------------------------------------

AnyMessage = TypeVar("AnyMessage")


def frame_of(message: Instruction | Report) -> bytes:
    encoded = encode(message)
    return _LENGTH.pack(len(encoded)) + encoded


class Inbox(Generic[AnyMessage]):
    """What has come of a stream of frames, in whatever pieces; decode: makes a message of bytes."""

    def __init__(self, decode: Callable[[memoryview], AnyMessage]) -> None:
        self._decode, self._buffer = decode, bytearray()

    def add(self, piece: bytes) -> None:
        self._buffer += piece

    def take(self) -> list[AnyMessage]:
        found, start = [], 0
        with memoryview(self._buffer) as buffer:
            while len(buffer) - start >= _LENGTH.size:
                first = start + _LENGTH.size
                end = first + _LENGTH.unpack_from(buffer, start)[0]
                if end > len(buffer):
                    break
                with buffer[first:end] as frame:
                    found.append(self._decode(frame))
                start = end
        del self._buffer[:start]
        return found


class Processes:
    """A Transport to processes; a context manager that ends them.

    waiting: entered while nothing comes.
    """

    def __init__(self, options: RunOptions, num_workers: int, waiting: Waiting) -> None:
        self._options, self._num_workers, self._waiting = options, num_workers, waiting
        _check_open_files(num_workers)
        # A server to fork from has imported what a worker needs, and has no threads.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([f"{__package__}.worker"])
        self._folder = get_temp_dir()  # of the server's socket; removed at the end, if not killed
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers.values():
            peer.process.kill()
        for peer in self._peers.values():
            peer.end()
        self._peers.clear()
        self._selector.close()

    def start(self, number: int, restart: RestartEvent | None = None) -> None:
        ours, theirs = socket.socketpair()
        process = self._context.Process(
            target=serve, args=(theirs, self._options, number, restart, self._folder)
        )
        try:
            with helpers_started(), threads_shared(self._num_workers):
                process.start()
        except (EOFError, ConnectionError) as error:
            raise BatchdecodeError(
                f"cannot start worker {number}: the process that forks workers has died, perhaps "
                "for want of memory"
            ) from error
        finally:
            theirs.close()
        os.set_blocking(ours.fileno(), False)
        self._peers[number] = _Peer(process, ours)
        self._selector.register(ours, selectors.EVENT_READ, number)

    def send(self, number: int, instruction: Instruction) -> None:
        peer = self._peers[number]
        peer.unsent.append(memoryview(frame_of(instruction)))
        peer.flush()
        self._watch(number, peer)

    def receive(self) -> list[Told]:
        """Wait until something has come; see Transport."""
        events: list[Told] = []
        with self._waiting():
            ready = self._selector.select()
        for key, mask in ready:
            if key.data is None:
                os.read(self._woken, CHUNK_BYTES)
                continue
            number, peer = key.data, self._peers[key.data]
            if mask & selectors.EVENT_WRITE:
                peer.flush()
                self._watch(number, peer)
            if mask & selectors.EVENT_READ:
                events += [(number, report) for report in peer.reports()]
                if peer.has_ended:
                    self._selector.unregister(peer.socket)
                    del self._peers[number]
                    events.append((number, peer.end()))
        return events

    def wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._waker, b"\0")

    def _watch(self, number: int, peer: "_Peer") -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.socket, events, number)


def _check_open_files(num_workers: int) -> None:
    """Make sure that `ulimit -n` allows the files of so many workers, here and where they fork."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = (
        len(list(Path("/proc/self/fd").iterdir())) + _OWN_FILES + _FILES_OF_WORKER * num_workers
    )
    if most != resource.RLIM_INFINITY and most < wanted:
        raise BatchdecodeError(
            f"--workers {num_workers} opens up to {wanted} files, and `ulimit -n` allows {most}"
        )


class _Peer:
    """A process, and this end of the socket to it.

    unsent: what it has not read yet.  has_ended: nothing more will come.
    """

    def __init__(self, process: BaseProcess, own_end: socket.socket) -> None:
        self.process, self.socket = process, own_end
        self.unsent: deque[memoryview] = deque()
        self.has_ended = False
        self._inbox = Inbox(decode_report)

    def flush(self) -> None:
        try:
            while self.unsent:
                rest = self.unsent[0]
                num_sent = self.socket.send(rest)
                if num_sent == len(rest):
                    self.unsent.popleft()
                else:
                    self.unsent[0] = rest[num_sent:]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()

    def reports(self) -> list[Report]:
        try:
            piece = self.socket.recv(CHUNK_BYTES)
            self._inbox.add(piece)
            self.has_ended = not piece
        except BlockingIOError:
            pass
        except OSError:
            self.has_ended = True
        return self._inbox.take()

    def end(self) -> Died:
        """Let go of a process that has ended, or is about to; return how it did."""
        self.socket.close()
        self.process.join(_GRACE)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            return Died("did not answer any more")
        if code < 0:
            how = f"was killed by signal {-code}, perhaps for want of memory"
            return Died(how, "killed", -code)
        return Died(f"left with exit status {code}", "exited", code)


def serve(
    own_end: socket.socket,
    options: RunOptions,
    number: int,
    restart: RestartEvent | None,
    folder: str,
) -> None:
    """Be the worker `number`; the main function of a process.

    folder: where the socket of the server is that has forked it.
    """
    become_helper(folder)
    inbox = Inbox(decode_instruction)

    def send(report: Report) -> None:  # waits until it is taken
        own_end.sendall(frame_of(report))

    def receive(*, is_waiting: bool) -> list[Instruction]:
        found = inbox.take()
        while not found and (is_waiting or select.select([own_end], [], [], 0)[0]):
            piece = own_end.recv(CHUNK_BYTES)
            if not piece:
                raise EOFError
            inbox.add(piece)
            found = inbox.take()
        return found

    worker = Worker(options, number, restart)
    with own_end, suppress(ConnectionError):
        try:
            while True:
                instructions = receive(is_waiting=worker.is_idle)
                for report in worker.exchange(instructions):
                    send(report)
        except (EOFError, ConnectionError):  # the parent was killed
            shutil.rmtree(folder, ignore_errors=True)
        except LostModelError as error:  # another worker's may be well
            sys.exit(str(error))
