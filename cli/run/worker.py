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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import msgspec
from msgspec import Struct

from batcher.engine import Engine
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
    InputError,
    LineParser,
    Source,
    Waiting,
    arrival_goes_back,
    checksum_of,
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


class Line(Struct, array_like=True, gc=False):
    """A line of the input, and what is odd about it beside others.

    number: from 1.  checksum: of a line that is known to be a request, see LineParser; 0 of one
    that is to be looked at.  first_number: which line has its id already; 0 if none has.
    last_arrival: that of the line before it, if this one goes back behind it.
    deaths: why the workers died that had it alone, if they were so many that it has failed.
    """

    index: int
    number: int
    text: bytes
    checksum: int
    first_number: int = 0
    last_arrival: float | None = None
    deaths: str = ""


class CheckedLine(Struct, array_like=True, gc=False):
    """What a line is by itself.

    id: of the request, or the one that a bad line has.  checksum: see Line.
    num_results, num_outputs: how many results it is answered with, and its best are chosen from.
    bad: the id, problems and form of a BadLine.
    """

    id: str
    checksum: int
    arrival: float = 0.0
    num_results: int = 1
    num_outputs: int = 1
    session: str | None = None
    bad: tuple[str, list[Problem], Form] | None = None


# -- instructions ---------------------------------------------------------------------------------


class Check(Struct, frozen=True, tag=True):
    """Find out what these lines are, with their numbers; they are not decoded yet."""

    lines: list[tuple[int, bytes]]


class Decode(Struct, frozen=True, tag=True):
    """Answer these lines, in whatever order; in steps of all that are there."""

    lines: list[Line]


class Finish(Struct, frozen=True, tag=True):
    """There will be no more lines.  Answered by `Finished`, when all are answered."""


class Drop(Struct, frozen=True, tag=True):
    """Do not begin what has not begun.  Answered by `Dropped`."""


# -- reports --------------------------------------------------------------------------------------


class Ready(Struct, frozen=True, tag=True):
    """The model is there.  run: how a trace of this worker alone would begin."""

    run: RunEvent


class Checked(Struct, frozen=True, tag=True):
    """What the lines of one `Check` are, in their order."""

    lines: list[CheckedLine]


class Answered(Struct, frozen=True, tag=True):
    """Lines that have been answered since the last report, and how the worker stands.

    indexes: of the lines.  answers: their results as lines of the output.
    num_failed: how many requests have failed.  first_failure: what the model did to the first.
    said: messages for people, in whole lines.
    events: since the last report, as the trace of the whole run has them, if they are wanted.
    constraints: how many were compiled since then, and how many were there before.
    num_steps: that were made.  now: when the next one starts, in seconds of the engine's clock.
    state: how the engine stands, if that is wanted.  num_begun: lines that are in the engine.
    """

    indexes: list[int]
    answers: list[bytes]
    num_failed: int = 0
    first_failure: str = ""
    said: str = ""
    events: list[Event] = []
    constraints: tuple[int, int] = (0, 0)
    num_steps: int = 0
    now: float = 0.0
    state: EngineState | None = None
    num_begun: int = 0


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


def wants_events(options: RunOptions) -> bool:
    """Return whether anybody shows, counts or writes what happens."""
    readers = (options.trace, options.report, options.otel, options.timeseries)
    is_read = any(each is not None for each in (*readers, options.summary_json))
    return is_read or options.is_exposed or not options.quiet


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
        self._report = ProblemReport("")
        self._tracebacks = ModelTracebacks(self._report, is_quiet=options.quiet)
        self._order = AsTheyCome()
        self._has_started = self.is_idle = False
        self._wants_events = wants_events(options)
        self._events: list[Event] = []  # that are not reported
        self._constraints = 0, 0  # that were
        self._num_failed = 0  # that were
        self._num_held = 0  # lines without an answer

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
        self._source = GivenLines(LineParser(self._parser))
        first_slot = self._number * self._options.batch
        self._answers = Answers(
            setup.model.name, setup.bytes_of, order=self._order, first_slot=first_slot
        )
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
                        case Check(lines):
                            yield Checked([self._check(*line) for line in lines])
                        case Decode(lines):
                            self._take_lines(lines)
                        case Finish():
                            self._source.is_closed = True
                        case Drop():
                            waiting = self._source.lines
                            yield Dropped([line.index for line in waiting])
                            self._num_held -= len(waiting)
                            waiting.clear()
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

    def _check(self, number: int, text: bytes) -> CheckedLine:
        parsed = parse_line(self._parser, text, number)
        checksum = checksum_of(text, parsed)
        if isinstance(parsed, BadLine):
            return CheckedLine(parsed.id, checksum, bad=(parsed.id, parsed.problems, parsed.form))
        request, numbers = parsed.request, (1, 1)
        if parsed.form == "result":
            numbers = request.n, request.best_of or request.n
        return CheckedLine(id_of(parsed), checksum, request.arrival_time, *numbers, request.session)

    def _take_lines(self, lines: list[Line]) -> None:
        """Take in lines to be answered; those that no worker has survived are so at once."""
        self._num_held += len(lines)
        for line in lines:
            if not line.deaths:
                self._source.lines.append(line)
                continue
            parsed = self._source.parse(line)
            if isinstance(parsed, ParsedLine):
                request, engine, name = parsed.request, self._engine, id_of(parsed)
                self._answers.open(request, parsed.form, line.index)
                error = ErrorInfo(DIED, line.deaths)
                lost = [make_lost_result(request.id or "", i, error) for i in range(request.n)]
                self._answers.take(lost)
                self._loop.note_failure(name, line.deaths)
                self._note_events([RejectEvent(engine.num_steps, engine.now, name, 0, DIED)])

    def _decode(self) -> Iterator[Report]:
        until, self.is_idle = time.monotonic() + REPORT_SECONDS, False
        try:
            for outcome in self._loop:
                self._note_events(outcome.events)
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

    def _note_events(self, events: Sequence[Event]) -> None:
        if self._wants_events:
            batch = self._options.batch
            self._events += [event_of_worker(e, self._number, batch) for e in events]

    def _answered(self) -> Iterator[Answered]:
        if not self._has_started:
            return
        loop, engine, is_watched = self._loop, self._engine, self._options.is_exposed
        said, answers = self._report.take(), self._order.take()
        if not (answers or said or self._events or is_watched):
            return
        # If it dies after this, nothing is missing of the steps that were made by now.
        self._note_events(engine.tell_steps())
        events, self._events = self._events, []
        self._num_held -= len(answers)
        # A request that has failed in part is decoded again if this worker dies before its end.
        num_failed = loop.num_failed - self._answers.num_failing
        num_failed, self._num_failed = num_failed - self._num_failed, num_failed
        (compiled, before), counts = self._constraints, engine.constraint_counts
        self._constraints = counts
        yield Answered(
            [index for index, _ in answers],
            [lines for _, lines in answers],
            num_failed,
            loop.first_failure or "",
            said,
            events,
            (counts[0] - compiled, counts[1] - before),
            engine.num_steps,
            engine.now,
            state_of(engine) if is_watched else None,
            self._num_held - len(self._source.lines) - loop.num_ahead,
        )


class NothingGiven(Exception):  # noqa: N818 - it is none
    """An engine is idle, and no line is there for it."""


class GivenLines(Source):
    """The lines that a worker was given and has not begun; is_closed: there will be no more."""

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
        """Return what a line is, beside the lines before it.

        Raises:
            InputError: it is not what it was when it was checked.
        """
        number, text = line.number, line.text
        parsed = self._parser.parse_again(text, number, line.checksum, line.first_number)
        if isinstance(parsed, ParsedLine) and line.last_arrival is not None:
            return arrival_goes_back(parsed, text, number, line.last_arrival)
        return parsed

    def wait(self) -> None:
        """Leave the loop, which goes on when there is more.

        Raises:
            NothingGiven: always.
        """
        raise NothingGiven


class AsTheyCome(InputOrder):
    """Keeps what lines are answered with, as soon as all results of one are there, to be taken."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: list[tuple[int, bytes]] = []

    def put(self, index: int, lines: bytes) -> list[bytes]:
        self._answers.append((index, lines))
        return []

    def take(self) -> list[tuple[int, bytes]]:
        taken, self._answers = self._answers, []
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

    def take(self, piece: bytes) -> list[AnyMessage]:
        """Take in the next piece; return the messages that are whole by that."""
        self._buffer += piece
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


class _Peer(NamedTuple):
    """A process, and this end of the socket to it; unsent: what it has not read yet."""

    process: BaseProcess
    socket: socket.socket
    unsent: bytearray
    inbox: Inbox[Report]


class Processes:
    """A Transport to processes; a context manager that ends them.

    waiting: entered while nothing comes.
    """

    def __init__(self, options: RunOptions, num_workers: int, waiting: Waiting) -> None:
        self._options, self._num_workers, self._waiting = options, num_workers, waiting
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        num_open = len(list(Path("/proc/self/fd").iterdir()))
        wanted = num_open + _OWN_FILES + _FILES_OF_WORKER * num_workers
        if most != resource.RLIM_INFINITY and most < wanted:
            raise BatchdecodeError(
                f"--workers {num_workers} opens up to {wanted} files, and `ulimit -n` allows {most}"
            )
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
        for number in list(self._peers):
            self._end(number)
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
        self._peers[number] = _Peer(process, ours, bytearray(), Inbox(decode_report))
        self._selector.register(ours, selectors.EVENT_READ, number)

    def send(self, number: int, instruction: Instruction) -> None:
        self._peers[number].unsent.extend(frame_of(instruction))
        self._flush(number)

    def receive(self) -> list[Told]:
        """Wait until something has come; see Transport."""
        told: list[Told] = []
        with self._waiting():
            ready = self._selector.select()
        for key, mask in ready:
            if key.data is None:
                os.read(self._woken, CHUNK_BYTES)
                continue
            number, peer = key.data, self._peers[key.data]
            if mask & selectors.EVENT_WRITE:
                self._flush(number)
            if mask & selectors.EVENT_READ:
                try:
                    piece = peer.socket.recv(CHUNK_BYTES)
                except BlockingIOError:
                    continue
                except OSError:
                    piece = b""
                told += [(number, report) for report in peer.inbox.take(piece)]
                if not piece:
                    told.append((number, self._end(number)))
        return told

    def wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._waker, b"\0")

    def _flush(self, number: int) -> None:
        """Send a worker what it can take now, and be told when it can take more."""
        peer = self._peers[number]
        try:
            while peer.unsent:
                del peer.unsent[: peer.socket.send(peer.unsent[:CHUNK_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            peer.unsent.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.socket, events, number)

    def _end(self, number: int) -> Died:
        """Let go of a process that has ended, or is about to; return how it did."""
        peer = self._peers.pop(number)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        peer.process.join(_GRACE)
        code = peer.process.exitcode
        if code is None:
            peer.process.kill()
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
    worker, inbox = Worker(options, number, restart), Inbox(decode_instruction)
    with own_end:
        try:
            while True:
                given: list[Instruction] = []
                while not given and (worker.is_idle or select.select([own_end], [], [], 0)[0]):
                    piece = own_end.recv(CHUNK_BYTES)
                    if not piece:  # the parent was killed
                        shutil.rmtree(folder, ignore_errors=True)
                        return
                    given = inbox.take(piece)
                for report in worker.exchange(given):
                    own_end.sendall(frame_of(report))  # waits until it is taken
        except ConnectionError:  # as above
            shutil.rmtree(folder, ignore_errors=True)
        except LostModelError as error:  # another worker's may be well
            sys.exit(str(error))
