"""A run by workers: checks lines, hands them out, and hands them out again when a worker dies.

All lines of a file are checked by workers before the first one is decoded; those of a pipe as they
come.  The run itself parses no request: it finds duplicate ids and arrival times that go back.

Each line is with at most one worker.  What a worker has not answered when it dies goes to others,
so no result is lost and none is written twice.  A line that was with DEATHS_TOGETHER workers that
died is a suspect: it is decoded alone, and fails after DEATHS_ALONE further deaths.  So one request
that kills workers fails, and its neighbours do not.

A worker that replaces another one continues at the step and time of its predecessor's last report.
Events carry the number of their worker; trace, views and numbers treat all as one run.
"""

import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.events import Event, RestartEvent, RunEvent
from batcher.metrics.summary import EngineState, RunMetrics
from batcher.processes import helpers_started, threads_shared
from batcher.request import NOTHING_UNREAD, Request, Unread
from batcher.requests.lines import BadLine, ParsedLine
from batcher.requests.results import decode_result_line
from batcher.trace.run import RequestFold, is_follower

from ..screen.terminal import printable_lines
from ..screen.view import GaugeReading, Gauges
from .input import BLOCK_LINES, Block, InputError, OpenInput, ReadAhead, Survey, Waiting
from .loop import RunOutcome
from .problems import InvalidInput, ProblemReport, say
from .results import InputOrder
from .resume import EarlierResults
from .run_options import RunOptions
from .worker import (
    CheckedLine,
    Died,
    Instruction,
    Line,
    Report,
    Told,
    decode_report,
    encode,
    serve,
    wants_events,
)

if TYPE_CHECKING:
    from batcher.metrics.prometheus import WorkersCollector

MAX_AHEAD = 4 * BLOCK_LINES  # lines of a pipe that no worker has
MAX_BATCHES = 2  # that a worker checks or has to check
DEATHS_TOGETHER, DEATHS_ALONE = 2, 3
MAX_FAILED_STARTS = 3  # in a row
MAX_FUTILE_DEATHS = 30  # in a row, of workers with lines that answered none
AHEAD_SECONDS = 0.2  # of work for a worker, in addition to the lines in its slots
MAX_AHEAD_LINES, MAX_AHEAD_BYTES = 4096, 4 * 2**20
_NEWEST = 0.3  # weight of the newest measurement in a rate
_MAX_KINDS = 5  # of messages for people
_OWN_FILES, _FILES_OF_WORKER = 16, 4  # open at the same time
_EXIT_SECONDS = 5.0  # for a process to exit after it closed its connection


class Transport(Protocol):
    """Starts workers, which have numbers, and exchanges messages with them."""

    def start(self, number: int, restart: RestartEvent | None = None) -> None:
        """Start a worker; restart: where its predecessor died."""

    def send(self, number: int, instruction: Instruction) -> None:
        """Send without blocking; if the worker is dead, `receive` returns Died."""

    def receive(self) -> list[Told]:
        """Wait for messages, or for `wake`."""

    def wake(self) -> None:
        """Make `receive` return, from any thread."""


class _Process(NamedTuple):
    """A worker, and the threads that read from it and write to it."""

    process: BaseProcess
    connection: Connection
    instructions: SimpleQueue[Instruction | None]
    threads: list[Thread]


class Processes(AbstractContextManager["Processes"]):
    """A Transport to processes of this machine; a context manager that kills them at the end.

    Threads read and write, so that the run never blocks on a worker.
    waiting: entered while no message comes.

    Raises:
        BatchdecodeError: the limit on open files is too low.
    """

    def __init__(self, options: RunOptions, num_workers: int, waiting: Waiting) -> None:
        self._options, self._num_workers, self._waiting = options, num_workers, waiting
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        num_open = len(list(Path("/proc/self/fd").iterdir()))
        wanted = num_open + _OWN_FILES + _FILES_OF_WORKER * num_workers
        if most != resource.RLIM_INFINITY and most < wanted:
            raise BatchdecodeError(
                f"--workers {num_workers} opens up to {wanted} files, but `ulimit -n` is {most}: "
                "raise it or use fewer workers"
            )
        # The server that forks workers has imported what they need, and has no threads.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([f"{__package__}.worker"])
        self._workers: dict[int, _Process] = {}
        self._told: SimpleQueue[tuple[int, Report | None] | None] = SimpleQueue()

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.process.kill()
        for number in list(self._workers):
            self._end(number)

    def start(self, number: int, restart: RestartEvent | None = None) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(theirs, self._options, number, restart, get_temp_dir())
        )
        try:
            with helpers_started(), threads_shared(self._num_workers):
                process.start()
        except (EOFError, ConnectionError) as error:
            raise BatchdecodeError(
                f"cannot start worker {number}: the process that forks workers has died, perhaps "
                "out of memory"
            ) from error
        finally:
            theirs.close()
        instructions: SimpleQueue[Instruction | None] = SimpleQueue()

        def read() -> None:
            with suppress(EOFError, OSError):
                while True:
                    self._told.put((number, decode_report(ours.recv_bytes())))
            self._told.put((number, None))

        def write() -> None:
            with suppress(OSError):
                while (instruction := instructions.get()) is not None:
                    ours.send_bytes(encode(instruction))

        threads = [Thread(target=target, daemon=True) for target in (read, write)]
        self._workers[number] = _Process(process, ours, instructions, threads)
        for thread in threads:
            thread.start()

    def send(self, number: int, instruction: Instruction) -> None:
        self._workers[number].instructions.put(instruction)

    def receive(self) -> list[Told]:
        with self._waiting():
            found = [self._told.get()]
        while not self._told.empty():
            found.append(self._told.get())
        told = filter(None, found)
        return [(n, self._end(n) if report is None else report) for n, report in told]

    def wake(self) -> None:
        self._told.put(None)

    def _end(self, number: int) -> Died:
        """Forget a process that has closed its connection or was killed."""
        process, connection, instructions, threads = self._workers.pop(number)
        process.join(_EXIT_SECONDS)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        instructions.put(None)
        for thread in threads:
            thread.join()
        connection.close()
        if code is None:
            return Died("stopped responding")
        if code < 0:
            return Died(f"was killed by signal {-code}, perhaps out of memory", "killed", -code)
        return Died(f"exited with status {code}", "exited", code)


# -- lines of the input ---------------------------------------------------------------------------


class LineBatch(Struct):
    """Lines that are checked together, from the index `first` on.

    lines: with their numbers.  checked: what they are, once it is known.
    num_deaths: workers that died while they checked it.
    """

    first: int
    lines: list[tuple[int, bytes]]
    checked: list[CheckedLine] | None = None
    num_deaths: int = 0


class InputLines:
    """The lines of the input, which are checked in batches and then handed out.

    A file is checked whole, then read again to be handed out; 4 bytes per line are held meanwhile,
    5 with earlier results.  A thread reads a pipe.

    num_read, num_bad: of the lines that are checked.
    total, num_to_answer: all lines of a file, and those without an earlier result, once known.
    has_refused: a bad line has ended the reading.  broken: why a pipe cannot be read to its end.
    survey: of all checked lines.
    wake: called by the thread when more has come.
    keep_going: whether bad lines are answered and do not end the reading.
    """

    def __init__(
        self,
        requests: OpenInput,
        report: ProblemReport,
        earlier: EarlierResults | None,
        wake: Callable[[], None],
        *,
        keep_going: bool,
    ) -> None:
        self.num_bad = 0
        self.total: int | None = None
        self.num_to_answer: int | None = None
        self.has_refused = False
        self.broken: InputError | None = None
        self.survey = Survey(requests.place_of, "file" if requests.is_file else "pipe")
        self._requests, self._report, self._keep_going = requests, report, keep_going
        self._earlier, self._reader = earlier, requests.lines()
        self._ahead: ReadAhead[Block] | None = None
        if not requests.is_file:
            read = self._reader.read_block
            self._ahead = ReadAhead(iter(lambda: read(BLOCK_LINES), Block([], [])), wake)
        self._has_read_all = self._is_closed = False
        self._num_lines = 0
        self._batches: deque[LineBatch] = deque()  # without those before them checked
        self._ready: deque[Line] = deque()
        # Of a file:
        self._is_answered = bytearray()  # of each line, if there are earlier results
        self._found: dict[int, set[int]] = {}  # results of an incomplete earlier answer
        self._again = self.survey.read_again(self._reader)
        self._num_read_again = 0

    @property
    def num_read(self) -> int:
        return self.survey.num_read

    @property
    def is_checked(self) -> bool:
        return self._has_read_all and not self._batches

    @property
    def has_ended(self) -> bool:
        """Whether no more lines will be handed out."""
        if self._ready or self._is_closed:
            return not self._ready
        return self.is_checked if self._ahead else self._num_read_again == self.total

    def next_batch(self) -> LineBatch | None:
        """Return lines to be checked; None if there are none now.

        Raises:
            InputError: the input is damaged or gone.
        """
        if self._has_read_all:
            return None
        if self._ahead is None:
            block: Block | None = self._reader.read_block(BLOCK_LINES)
        else:
            num_ahead = self._num_lines - self.num_read + len(self._ready)
            if num_ahead > MAX_AHEAD - BLOCK_LINES or not self._ahead.is_ready:
                return None
            try:
                block = self._ahead.take()
            except InputError as error:
                if not self._num_lines:
                    raise
                block, self.broken = None, error
        if block is None or not block.texts:
            self._has_read_all = True
            return None
        batch = LineBatch(self._num_lines, list(zip(*block, strict=True)))
        self._num_lines += len(batch.lines)
        self._batches.append(batch)
        return batch

    def note_checked(self) -> None:
        """Process the batches that are checked, in the order of the input.

        Raises:
            BatchdecodeError: workers cannot decode this input.
            InputError: it contains something else than requests.
        """
        while self._batches and self._batches[0].checked is not None:
            batch = self._batches.popleft()
            lines = zip(batch.lines, batch.checked or (), strict=True)
            for index, (line, checked) in enumerate(lines, batch.first):
                if not self._is_closed:
                    self._add(Line(index, *line, checked.checksum), checked)

    def _add(self, line: Line, checked: CheckedLine) -> None:
        """Compare a line with those before it."""
        number, survey = line.number, self.survey
        if checked.session is not None:
            raise BatchdecodeError(
                f"line {number} is a turn of session {checked.session!r}: the turns of a "
                "session need one engine, so run these requests without --workers"
            )
        request = Request(id=checked.id, prompt="", arrival_time=checked.arrival)
        parsed = ParsedLine(request) if checked.bad is None else BadLine(*checked.bad)
        last = survey.last_arrival
        found = survey.add(number, line.text, parsed)
        if not survey.is_in_order:
            raise BatchdecodeError(
                f"line {number}: arrival_time goes back from {last:g} to {checked.arrival:g}: "
                "sort the requests by arrival_time, or run them without --workers"
            )
        bad = found if isinstance(found, BadLine) else None
        if bad is not None:
            self.num_bad += 1
            self._report.add(bad)
            line.checksum = 0
            line.first_number = survey.duplicates.get(line.index, 0)
            if checked.bad is None and not line.first_number:
                line.last_arrival = last
        if self._ahead is not None:
            if bad is None or self._keep_going:
                self._ready.append(line)
            else:
                self.has_refused = self._is_closed = self._has_read_all = True
            return
        if self._earlier is not None and bad is not None:
            self._is_answered.append(self._earlier.has_rejected(number))
        elif self._earlier is not None:
            results = set(self._earlier.find(checked.id, checked.num_outputs))
            is_answered = len(results) >= checked.num_results
            if results and not is_answered:
                self._found[line.index] = results
            self._is_answered.append(is_answered)

    def begin(self) -> None:
        """Start handing out the lines of a file.

        Raises:
            InvalidInput: there are bad lines, and they are not to be skipped.
        """
        if self.num_bad and not self._keep_going:
            what_now = "nothing decoded. --keep-going to skip them."
            raise InvalidInput(self._report, self.num_read, what_now)
        self.survey.end()
        self.total = self.num_read
        self.num_to_answer = self.total - sum(self._is_answered)
        self._again = self.survey.read_again(self._requests.lines())

    def next_lines(self, most: int) -> list[Line]:
        """Return up to `most` lines to be answered.

        Raises:
            InputError: the input is damaged or gone, or shorter than before.
        """
        ready = self._ready
        while (
            self._ahead is None
            and len(ready) < most
            and not self._is_closed
            and self._num_read_again != self.total
        ):
            line = Line(*next(self._again))
            self._num_read_again += 1
            if not (self._is_answered and self._is_answered[line.index]):
                ready.append(line)
        return [ready.popleft() for _ in range(min(most, len(ready)))]

    def close(self) -> None:
        self._is_closed = self._has_read_all = True
        self._ready.clear()

    def lacking(self, index: int, answer: bytes) -> bytes:
        """Return the part of an answer that the earlier run has not given."""
        found = self._found.pop(index, None)
        if found is None:
            return answer
        lines = answer.splitlines(keepends=True)
        left = [line for line in lines if decode_result_line(line)[0].index not in found]
        return b"".join(left[: len(lines) - len(found)])


# -- workers --------------------------------------------------------------------------------------


class _Member:
    """A worker as the run knows it.

    num_steps, now: of all engines in its place.  held: its lines without an answer, by index.
    batches: what it checks, in order.  is_alone: it decodes a suspect, and nothing else.
    """

    def __init__(self, num_steps: int = 0, now: float = 0.0) -> None:
        self.num_steps, self.now, self.num_begun = num_steps, now, 0
        self.is_ready = self.is_alone = False
        self.held: dict[int, Line] = {}
        self.batches: deque[LineBatch] = deque()
        self._num_bytes = 0
        self._rate, self._last = 0.0, time.monotonic()

    def hold(self, lines: list[Line]) -> None:
        self.held |= {line.index: line for line in lines}
        self._num_bytes += sum(len(line.text) for line in lines)

    def release(self, indexes: list[int]) -> list[Line]:
        lines = [self.held.pop(index) for index in indexes]
        self._num_bytes -= sum(len(line.text) for line in lines)
        now = time.monotonic()
        rate = len(lines) / max(now - self._last, 1e-3)
        self._rate += _NEWEST * (rate - self._rate)
        self._last = now
        self.is_alone = self.is_alone and bool(self.held)
        return lines

    def num_wanted(self, num_slots: int) -> int:
        if self._num_bytes > MAX_AHEAD_BYTES:
            return max(0, num_slots - len(self.held))
        ahead = min(max(num_slots // 2, int(self._rate * AHEAD_SECONDS)), MAX_AHEAD_LINES)
        wanted = num_slots + ahead - len(self.held)
        return wanted if wanted > ahead // 2 else 0


class Workers(Gauges):
    """The workers of a run in place of its engine and its Loop, which see for other attributes.

    num_restarts: how many workers replaced another one.  metrics, fold: of the run, if it has some.

    Raises, in all but its constructor:
        BatchdecodeError: a worker failed, or workers keep dying.
        KeyboardInterrupt: a model raised one.
        InputError: the input is damaged or gone, or workers cannot decode it.
    """

    lines: InputLines  # after `loop` is called
    num_unread, model, replaying = None, None, None

    def __init__(self, options: RunOptions, requests: OpenInput, transport: Transport) -> None:
        self.options, self.requests = options, requests
        num_workers = self.num_workers = options.workers or 1
        self.report = ProblemReport(requests.name, options.color, requests.place_of)
        self.num_restarts = self.num_failed = 0
        self.first_failure: str | None = None
        self.is_complete = False
        self._states = [EngineState(options.batch)] * num_workers
        self.fold: RequestFold | None = None
        self.metrics: RunMetrics | None = None
        self._transport, self._num_slots = transport, options.batch
        self._run: RunEvent | None = None
        self._order: InputOrder | None = None
        self._is_resumed = False
        self._tell: Callable[[str], object] = say
        self._members = [_Member() for _ in range(num_workers)]
        self._num_answered = self._num_failed_starts = self._num_futile_deaths = 0
        self._unchecked: deque[LineBatch] = deque()  # of workers that died
        self._again: deque[Line] = deque()
        self._suspects: deque[Line] = deque()
        self._said: set[str] = set()

    def run_event(self) -> RunEvent:
        """Return the first event of the trace, once a worker is ready."""
        if self._run is None:
            for number in range(self.num_workers):
                self._transport.start(number)
            while self._run is None:
                for _ in self._receive():
                    pass
        return self._run

    def loop(self, earlier: EarlierResults | None) -> "Workers":
        """Return this, ready to be iterated over, after all lines of a file are checked.

        Raises:
            InvalidInput: the file has bad lines, and they are not to be skipped.
        """
        options, requests = self.options, self.requests
        keep_going = options.keep_going or options.max_errors is not None
        wake = self._transport.wake
        lines = InputLines(requests, self.report, earlier, wake, keep_going=keep_going)
        self.lines, self._is_resumed = lines, earlier is not None
        if options.keep_order and earlier is None:
            self._order = InputOrder()
        if requests.is_file:
            try:
                while self._give_batches() or not lines.is_checked:
                    for _ in self._receive():
                        pass
                lines.begin()
            finally:
                say(requests.take_notes() + self.report.closing())
        self._tell = self.report.tell
        return self

    def __iter__(self) -> Iterator[RunOutcome]:
        lines, transport = self.lines, self._transport
        while True:
            self._give_batches()
            self._give_lines()
            is_busy = self._again or self._suspects or any(m.held for m in self._members)
            if lines.has_ended and not is_busy:
                break
            yield from self._receive()
        self.is_complete = not (self.has_given_up or lines.has_refused or lines.broken)
        if wants_events(self.options):  # those at the end of an engine, unless it dies now
            left = {number for number, member in enumerate(self._members) if member.is_ready}
            for number in left:
                transport.send(number, Instruction(is_last=True))
            while left:
                for number, report in transport.receive():
                    if isinstance(report, Report):
                        yield self._take(number, report)
                    if isinstance(report, Died) or report.is_finished or report.failure:
                        left.discard(number)

    def _receive(self) -> Iterator[RunOutcome]:
        for number, report in self._transport.receive():
            if isinstance(report, Died):
                yield RunOutcome(self._for_run([self._replace(number, report)]))
                continue
            yield self._take(number, report)
            if (failure := report.failure) is not None:
                if failure.traceback:
                    self._tell(printable_lines(failure.traceback))
                if failure.cause == "interrupt":
                    raise KeyboardInterrupt
                raise (InputError if failure.cause == "input" else BatchdecodeError)(
                    failure.message
                )

    def _take(self, number: int, report: Report) -> RunOutcome:
        """Note a report; return what it means for the run."""
        member, indexes, lines = self._members[number], report.indexes, report.answers
        if report.run is not None:
            member.is_ready, self._num_failed_starts = True, 0
            self._run = replace(report.run, workers=self.num_workers)
            return RunOutcome(())
        for checked in report.checked:
            member.batches.popleft().checked = checked
        if report.checked:
            self.lines.note_checked()
        member.num_steps, member.now = report.num_steps, report.now
        member.num_begun = report.num_begun
        if not all(line.failure for line in member.release(indexes)):
            self._num_futile_deaths = 0
        self._num_answered += sum(map(bool, lines))
        if report.state is not None:
            self._states[number] = report.state
        if self.metrics is not None:
            own = self.metrics.workers[number]
            own.note_steps(report.num_steps)
            own.note_constraints(*report.constraints)
        if self._is_resumed or self._order is not None:
            lines = []
            for index, answer in zip(indexes, report.answers, strict=True):
                left = self.lines.lacking(index, answer)
                lines += [left] if self._order is None else self._order.put(index, left)
        had_given_up = self.has_given_up
        self.num_failed += report.num_failed
        if self.has_given_up and not had_given_up:
            self.lines.close()
            self._again.clear()
            self._suspects.clear()
            for other, its in enumerate(self._members):
                if its.held:
                    self._transport.send(other, Instruction(drops=True))
        self.first_failure = self.first_failure or report.first_failure or None
        if report.said and report.said not in self._said and len(self._said) < _MAX_KINDS:
            self._said.add(report.said)
            self.report.tell(report.said)
        return RunOutcome(self._for_run(report.events), lines)

    def _for_run(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return events as the trace has them: without a number if there is one worker."""
        if self.num_workers > 1:
            return events
        return [replace(event, worker=None) for event in events]

    def _give_batches(self) -> bool:
        """Hand out lines to check; return whether any are being checked."""
        for number, member in enumerate(self._members):
            while member.is_ready and len(member.batches) < MAX_BATCHES:
                batch = self._unchecked.popleft() if self._unchecked else self.lines.next_batch()
                if batch is None:
                    break
                member.batches.append(batch)
                self._transport.send(number, Instruction(check=batch.lines))
        return any(member.batches for member in self._members)

    def _give_lines(self) -> None:
        """Hand out lines to decode, in turn to the workers that have few.

        So the last lines are spread over workers, and so are those that arrive together.
        """
        wanted: dict[int, int] = {}
        for number, member in enumerate(self._members):
            if not member.is_ready or member.is_alone:
                continue
            if self._suspects and not member.held:
                member.is_alone = True
                self._give(number, [self._suspects.popleft()])
            elif most := member.num_wanted(self._num_slots):
                wanted[number] = most
        given: dict[int, list[Line]] = {number: [] for number in wanted}
        while wanted:
            share = max(1, self._num_slots // 4) if len(wanted) > 1 else max(wanted.values())
            for number, left in list(wanted.items()):
                most, again = min(left, share), self._again
                portion = [again.popleft() for _ in range(min(most, len(again)))]
                portion += self.lines.next_lines(most - len(portion))
                given[number] += portion
                wanted[number] -= most
                if len(portion) < most or left == most:
                    del wanted[number]
        for number, lines in given.items():
            if lines:
                self._give(number, lines)

    def _give(self, number: int, lines: list[Line]) -> None:
        self._members[number].hold(lines)
        self._transport.send(number, Instruction(decode=lines))

    def _replace(self, number: int, died: Died) -> RestartEvent:
        """Start another worker in place of one that died, and hand out its lines again.

        Raises:
            BatchdecodeError: workers keep dying.
        """
        member, how, num_faults = self._members[number], died.how, int(not died.is_machine)
        self._members[number] = _Member(member.num_steps, member.now)
        self._states[number] = EngineState(self._num_slots)
        if not member.is_ready:
            self._num_failed_starts += num_faults
            if self._num_failed_starts == MAX_FAILED_STARTS:
                raise BatchdecodeError(
                    f"{MAX_FAILED_STARTS} workers in a row died while they started; the last {how}"
                )
        if member.held:
            self._num_futile_deaths += num_faults
            if self._num_futile_deaths == MAX_FUTILE_DEATHS:
                raise BatchdecodeError(
                    f"{MAX_FUTILE_DEATHS} workers in a row died without an answer; the last {how}"
                )
        self._unchecked.extend(member.batches)
        if member.batches:
            batch = member.batches[0]
            batch.num_deaths += num_faults
            if batch.num_deaths == DEATHS_TOGETHER + DEATHS_ALONE:
                first, last = batch.lines[0][0], batch.lines[-1][0]
                raise BatchdecodeError(
                    f"{batch.num_deaths} workers died while they checked lines {first} to {last}; "
                    f"the last {how}"
                )
        for line in member.held.values():
            line.num_deaths += num_faults
            if line.num_deaths < DEATHS_TOGETHER:
                self._again.append(line)
            elif line.num_deaths < DEATHS_TOGETHER + DEATHS_ALONE or not member.is_alone:
                self._suspects.append(line)
            else:
                line.failure = (
                    f"{DEATHS_ALONE} workers died that decoded nothing else; the last {how}"
                )
                self._again.append(line)
        self.num_restarts += 1
        restart = RestartEvent(
            step=member.num_steps, time=member.now, reason=died.reason, code=died.code
        )
        self._transport.start(number, restart)
        return replace(restart, worker=number)

    # -- other attributes of a Loop --------------------------------------------------------------

    @property
    def total(self) -> int | None:
        return self.lines.total

    @property
    def has_given_up(self) -> bool:
        return self.num_failed >= (self.options.max_errors or float("inf"))

    @property
    def num_steps(self) -> list[int]:
        return [member.num_steps for member in self._members]

    def rest(self) -> Iterator[bytes]:
        return iter(()) if self._order is None else self._order.rest()

    def close(self) -> None:
        if self._order is not None:
            self._order.close()

    def arrived(self) -> list[Event]:
        return []

    end_events = arrived  # each worker reports its own

    def collector(self, metrics: RunMetrics, model: str) -> "WorkersCollector":
        from batcher.metrics.prometheus import WorkersCollector  # noqa: PLC0415 - an extra

        return WorkersCollector(metrics, model, self._states, lambda: self.backlog)

    @property
    def backlog(self) -> Unread:
        """The lines in no engine, by the clock of the worker that is furthest."""
        if self.lines.num_to_answer is None:
            return NOTHING_UNREAD
        members, num_answered = self._members, self._num_answered
        num_left = self.lines.num_to_answer - num_answered - sum(m.num_begun for m in members)
        now = max(member.now for member in members)
        coming = min(num_left, self.lines.survey.arrivals.left(now).coming)
        return Unread(num_left - coming, coming)

    def read_gauges(self) -> GaugeReading:
        queued, coming = self.backlog
        waiting = [] if self.fold is None else self.fold.open
        own = [found for found in waiting if not is_follower(found)]
        queued += sum(found.admission is None for found in own)
        num_begun = sum(member.num_begun for member in self._members)
        coming += max(num_begun - sum(not found.index for found in own), 0)
        return GaugeReading(0.0, 0, None, None, queued, coming)


def transport_of(options: RunOptions, waiting: Waiting) -> AbstractContextManager[Transport]:
    number = options.workers or 1
    if options.on is None:
        return Processes(options, number, waiting)
    from .ray_workers import Actors  # noqa: PLC0415 - an extra

    return Actors(options, number, options.on.partition(":")[2], waiting)
