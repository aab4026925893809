"""A run by workers: who decodes which lines, and what becomes of what they report.

Lines are read, checked by workers, then given out as workers get on with them, and again when one
dies.  Rule: each line is with one worker or none, and what a worker has not answered when it dies
is given out again, so that nothing is lost, and nothing written twice.

The run parses no request.  Workers report what lines are by themselves; what a line is beside those
before it (an id given twice, an arrival that goes back) is found out here.  The worker is a column
of the events that they report: trace, picture and numbers are those of one engine.
"""

import time
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from operator import itemgetter, lt
from typing import NamedTuple

from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.events import Event, RestartEvent, RunEvent
from batcher.garbage import look_seldom
from batcher.metrics.summary import EngineState, RunMetrics
from batcher.request import NOTHING_UNREAD, Request, Unread
from batcher.requests.lines import BadLine, ParsedLine
from batcher.requests.results import decode_result_line
from batcher.trace.run import RequestFold, is_follower

from ..errors import WriteError
from ..screen.progress import open_view
from ..screen.terminal import counted, is_pipe, is_same_terminal, printable_lines
from ..screen.view import GaugeReading, Gauges, RunPlan
from ..signals import Interrupted, StopSignals, stdout_descriptor
from . import recording, worker
from .input import (
    BLOCK_LINES,
    Block,
    Duplicates,
    IdRegistry,
    InputError,
    LineArrivals,
    OpenInput,
    ReadAhead,
    arrival_goes_back,
    check_kind,
    id_given_before,
)
from .problems import InvalidInput, ProblemReport, say
from .results import InputOrder
from .resume import EarlierResults, Resumption, conclude_finished, parser_for_any_model
from .run_options import RunOptions

MAX_AHEAD = 4 * BLOCK_LINES  # lines of a pipe that no worker has
_MAX_KINDS = 5  # of what workers say
_ONE = worker.Several(1, 1)
DEATHS_TOGETHER = 2
"""After so many a line is suspected of them, and decoded by itself."""
DEATHS_ALONE = 3
"""After so many by itself, a line has failed."""
MAX_FAILED_STARTS = 3  # with no worker ready in between
MAX_FUTILE_DEATHS = 30  # of workers with lines, with none decoded in between
MAX_BATCHES = 2  # that a worker has to check
AHEAD_SECONDS = 0.2  # for which a worker has lines beside those in its slots
MAX_AHEAD_LINES, MAX_AHEAD_BYTES = 4096, 4 * 2**20
_NEWEST = 0.3  # how much of a rate is what was measured last
_text_of = itemgetter(2)  # of a Line


class LineBatch(NamedTuple):
    """Lines that are checked together, from the index `first` on; number: of the batch, from 0."""

    number: int
    first: int
    lines: Block


class InputLines(ABC):
    """Lines on their way to workers, which are checked in batches, and given out.

    num_read: how many were checked.  num_bad: of them, those that are no requests.
    total: how many there are, if that is known.
    has_refused: a bad line has ended the reading.  broken: why it could not be read on.
    keep_going: bad lines are answered, and do not end the reading.
    arrivals: of all that were checked, a line counting as one.
    """

    total: int | None = None

    def __init__(self, requests: OpenInput, report: ProblemReport, *, keep_going: bool) -> None:
        self.num_read = self.num_bad = 0
        self.has_refused = False
        self.broken: InputError | None = None
        self._requests, self._report, self._keep_going = requests, report, keep_going
        self._has_read_all = self._is_closed = False
        self._num_batches = self._num_taken = self._num_lines = 0
        self._early: dict[int, tuple[LineBatch, worker.Checked]] = {}
        self._ids, self._last_arrival = IdRegistry(), 0.0
        self.arrivals = LineArrivals()

    @property
    def is_checked(self) -> bool:
        return self._has_read_all and self._num_taken == self._num_batches

    @property
    def num_to_answer(self) -> int | None:
        return None

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether no more lines will be given out."""

    @abstractmethod
    def next_batch(self) -> LineBatch | None:
        """Return lines that are to be checked; None while there are none.

        Raises:
            InputError: the input is damaged or gone.
        """

    @abstractmethod
    def next_lines(self, most: int) -> worker.Lines:
        """Return lines that are to be answered, up to so many; less while there are no more.

        Raises:
            InputError: the input is damaged or gone, or shorter than it was.
        """

    def take(self, batch: LineBatch, checked: worker.Checked) -> None:
        """Take in what the lines of a batch are, whichever was checked first.

        Raises:
            BatchdecodeError: the input cannot be decoded by several workers.
            InputError: it holds something else than requests.
        """
        self._early[batch.number] = batch, checked
        while (found := self._early.pop(self._num_taken, None)) is not None:
            self._num_taken += 1
            self._look_at(*found)

    def close(self) -> None:
        self._is_closed = self._has_read_all = True

    def lacking(self, index: int, answer: bytes) -> bytes:  # noqa: ARG002 - see FileLines
        return answer

    def _new_batch(self, lines: Block) -> LineBatch:
        batch = LineBatch(self._num_batches, self._num_lines, lines)
        self._num_lines += len(lines.texts)
        self._num_batches += 1
        return batch

    def _look_at(self, batch: LineBatch, checked: worker.Checked) -> None:
        """Find out what the lines of a batch are beside those before them.

        Most are requests with new ids, in the order of their arrival: that is seen at a glance.
        """
        numbers, texts = batch.lines
        indexes = range(batch.first, batch.first + len(texts))
        if checked.sessions:
            place, session = min(checked.sessions.items())
            raise BatchdecodeError(
                f"line {numbers[place]} is a turn of session {session!r}: turns go on "
                "from one another in one engine, so run these requests without --workers"
            )
        if self._is_closed:
            return
        lines = worker.Lines(list(indexes), list(numbers), texts, checked.checksums)
        times = checked.arrivals or [0.0]
        is_late = times[0] < self._last_arrival or any(map(lt, times[1:], times))
        if not (checked.bad or is_late) and self._ids.add_new(checked.ids, numbers):
            self.num_read += len(lines)
            self._last_arrival = times[-1]
            for arrival in checked.arrivals:
                self.arrivals.add(arrival, 1)
            if not checked.arrivals:
                self.arrivals.add(0.0, len(lines))
            self._keep(lines, checked.ids, checked.several)
        else:
            self._look_at_each(lines, checked)

    def _look_at_each(self, lines: worker.Lines, checked: worker.Checked) -> None:
        """Find out what each of these lines is beside those before it."""
        for place, (line, request_id) in enumerate(zip(lines.rows(), checked.ids, strict=True)):
            if self._is_closed:
                return
            self.num_read += 1
            _, number, text, _ = line
            if place in checked.bad:
                self._take_bad(line, BadLine(*checked.bad[place]))
                continue
            first = self._ids.add(request_id, number)
            if first is not None:
                parsed = ParsedLine(Request(id=request_id, prompt=""))
                self._take_bad(
                    line, id_given_before(parsed, text, number, first), worker.Remark(first)
                )
                continue
            arrival = checked.arrivals[place] if checked.arrivals else 0.0
            if arrival < self._last_arrival:
                self._take_late(line, request_id, arrival)
            else:
                self._last_arrival = arrival
                self.arrivals.add(arrival, 1)
                known = worker.Lines()
                known.append_line(line)
                self._keep(known, [request_id], {0: checked.several.get(place, _ONE)})

    def _take_bad(
        self, line: worker.Line, bad: BadLine, remark: worker.Remark | None = None
    ) -> None:
        index, number, text, _ = line
        if not index:
            check_kind(text, self._requests.name)
        self.num_bad += 1
        self._report.add(bad)
        self._keep_bad((index, number, text, 0), bad.id, remark)

    @abstractmethod
    def _take_late(self, line: worker.Line, request_id: str, arrival: float) -> None:
        """Take in a request that arrives before the one before it."""

    @abstractmethod
    def _keep(
        self, lines: worker.Lines, ids: list[str], several: dict[int, worker.Several]
    ) -> None:
        """Take in requests with these ids; several: see Checked."""

    @abstractmethod
    def _keep_bad(self, line: worker.Line, request_id: str, remark: worker.Remark | None) -> None:
        """Take in a line that is no request, or not one beside others."""


class FileLines(InputLines):
    """Those of a file, which is checked whole before a line is given out.

    earlier: the results that are there.  Of a line 4 bytes are held in memory, with those 5.
    """

    def __init__(
        self,
        requests: OpenInput,
        report: ProblemReport,
        earlier: EarlierResults | None,
        *,
        keep_going: bool,
    ) -> None:
        super().__init__(requests, report, keep_going=keep_going)
        self._earlier = earlier
        self._reader = requests.lines()
        self._checksums, self._duplicates = array("I"), Duplicates()
        self._is_answered = bytearray()  # of each line, if there are earlier results
        self._found: dict[int, set[int]] = {}
        self._num_read_again, self._ahead = 0, worker.Lines()

    @property
    def num_to_answer(self) -> int | None:
        return None if self.total is None else self.total - sum(self._is_answered)

    @property
    def has_ended(self) -> bool:
        return self._is_closed or (self._num_read_again == self.total and not self._ahead)

    def next_batch(self) -> LineBatch | None:
        if self._has_read_all:
            return None
        lines = self._reader.read_block(BLOCK_LINES)
        self._has_read_all = not lines.texts
        return self._new_batch(lines) if lines.texts else None

    def begin(self) -> None:
        """Give out from here on what was checked.

        Raises:
            InvalidInput: there are bad lines, and they are not to be skipped.
        """
        if self.num_bad and not self._keep_going:
            what_now = "nothing decoded. --keep-going to skip them."
            raise InvalidInput(self._report, self.num_read, what_now)
        self.total = self.num_read
        self._reader = self._requests.lines()

    def next_lines(self, most: int) -> worker.Lines:
        found = self._ahead.take_first(most)
        while len(found) < most and not self.has_ended:
            self._read_again()
            found.extend(self._ahead.take_first(most - len(found)))
        return found

    def close(self) -> None:
        super().close()
        self._ahead = worker.Lines()

    def _read_again(self) -> None:
        """Read the lines that come next, without those that are answered."""
        first = self._num_read_again
        numbers, texts = self._reader.read_block(BLOCK_LINES)
        if not texts:
            raise InputError("the input has become shorter while it was read")
        checksums = self._checksums[first : first + len(texts)].tolist()
        count = len(checksums)  # what was added since then is left out
        indexes = range(first, first + count)
        self._num_read_again = indexes.stop
        lines = worker.Lines(list(indexes), list(numbers[:count]), texts[:count], checksums)
        if 0 not in checksums and not self._is_answered:
            self._ahead = lines
            return
        for line in lines.rows():
            index, _, _, checksum = line
            if not (self._is_answered and self._is_answered[index]):
                number = None if checksum else self._duplicates.first_number(index)
                self._ahead.append_line(line, None if number is None else worker.Remark(number))

    def lacking(self, index: int, answer: bytes) -> bytes:
        found = self._found.pop(index, None)
        if found is None:
            return answer
        lines = answer.splitlines(keepends=True)
        left = [line for line in lines if decode_result_line(line)[0].index not in found]
        return b"".join(left[: len(lines) - len(found)])

    def _take_late(self, line: worker.Line, request_id: str, arrival: float) -> None:  # noqa: ARG002 - see InputLines
        raise BatchdecodeError(
            f"line {line[1]}: arrival_time goes back from {self._last_arrival:g} to "
            f"{arrival:g}: workers are given lines as they stand, so sort them by arrival_time, "
            "or run them without --workers"
        )

    def _keep(
        self, lines: worker.Lines, ids: list[str], several: dict[int, worker.Several]
    ) -> None:
        self._checksums.extend(lines.checksums)
        earlier = self._earlier
        if earlier is None:
            return
        for place, (index, request_id) in enumerate(zip(lines.indexes, ids, strict=True)):
            num_results, num_outputs = several.get(place, _ONE)
            found = set(earlier.find(request_id, num_outputs))
            is_answered = len(found) >= num_results
            if found and not is_answered:
                self._found[index] = found
            self._is_answered.append(is_answered)

    def _keep_bad(self, line: worker.Line, request_id: str, remark: worker.Remark | None) -> None:
        self._checksums.append(0)
        if remark is not None:
            self._duplicates.add(line[0], remark.first_number)
        if self._earlier is not None:
            self._is_answered.append(self._earlier.has_rejected(request_id, line[1]))


class PipeLines(InputLines):
    """Those of a pipe, which a thread reads; they are checked as they come.

    wake: called, by the thread, whenever more has come.
    """

    def __init__(
        self,
        requests: OpenInput,
        report: ProblemReport,
        wake: Callable[[], None],
        *,
        keep_going: bool,
    ) -> None:
        super().__init__(requests, report, keep_going=keep_going)
        lines = requests.lines()
        blocks = iter(lambda: lines.read_block(BLOCK_LINES), Block([], []))
        self._read_ahead = ReadAhead(blocks, wake)
        self._ready = worker.Lines()

    @property
    def has_ended(self) -> bool:
        return not self._ready and (self._is_closed or self.is_checked)

    def next_batch(self) -> LineBatch | None:
        num_ahead = self._num_lines - self.num_read + len(self._ready)
        is_full = num_ahead > MAX_AHEAD - BLOCK_LINES
        if self._has_read_all or is_full or not self._read_ahead.is_ready:
            return None
        try:
            block = self._read_ahead.take()
        except InputError as error:
            if not self._num_lines:
                raise
            block, self.broken = None, error
        self._has_read_all = block is None  # or as much of it as can be
        return None if block is None else self._new_batch(block)

    def next_lines(self, most: int) -> worker.Lines:
        return self._ready.take_first(most)

    def close(self) -> None:
        super().close()
        self._ready = worker.Lines()

    def _take_late(self, line: worker.Line, request_id: str, arrival: float) -> None:
        request = Request(id=request_id, prompt="", arrival_time=arrival)
        last, (_, number, text, _) = self._last_arrival, line
        bad = arrival_goes_back(ParsedLine(request), text, number, last)
        self._take_bad(line, bad, worker.Remark(last_arrival=last))

    def _keep(self, lines: worker.Lines, *_: object) -> None:
        self._ready.extend(lines)

    def _keep_bad(self, line: worker.Line, request_id: str, remark: worker.Remark | None) -> None:  # noqa: ARG002 - see InputLines
        if self._keep_going:
            self._ready.append_line(line, remark)
        else:
            self.has_refused = self._is_closed = self._has_read_all = True


class FailedWorkerError(BatchdecodeError):
    """What happened to a worker would happen to every other one."""

    def __init__(self, failed: worker.Failed) -> None:
        super().__init__(failed.message)
        self.traceback, self.is_input = failed.traceback, failed.is_input


class _Member:
    """A worker as the driver knows it.

    held: the lines that it has not answered, by index.  remarks: see Lines.
    batches: what it has to check, in order.
    is_alone: it has one line that is suspected, and is given no other one.
    num_steps, now: how many steps were made in its place, and when the next one starts.
    """

    def __init__(self, num_steps: int = 0, now: float = 0.0) -> None:
        self.num_steps, self.now = num_steps, now
        self.is_ready = self.is_alone = False
        self.held: dict[int, worker.Line] = {}
        self.remarks: dict[int, worker.Remark] = {}
        self.batches: deque[LineBatch] = deque()
        self.num_bytes = 0
        self._rate, self._last = 0.0, time.monotonic()

    def note_answered(self, indexes: list[int]) -> None:
        self.release(indexes)
        now = time.monotonic()
        rate = len(indexes) / max(now - self._last, 1e-3)
        self._rate += _NEWEST * (rate - self._rate)
        self._last = now
        self.is_alone = self.is_alone and bool(self.held)

    def release(self, indexes: list[int]) -> None:
        self.num_bytes -= sum(map(len, map(_text_of, map(self.held.pop, indexes))))
        if self.remarks:
            for index in indexes:
                self.remarks.pop(index, None)

    def num_wanted(self, num_slots: int) -> int:
        if self.num_bytes > MAX_AHEAD_BYTES:
            return max(0, num_slots - len(self.held))
        ahead = min(max(num_slots // 2, int(self._rate * AHEAD_SECONDS)), MAX_AHEAD_LINES)
        wanted = num_slots + ahead - len(self.held)
        return wanted if wanted > ahead // 2 else 0


class Driver:
    """Has workers check and decode the lines of an input; iterates over what is answered.

    num_slots: of each worker.  run: how the trace of one would begin, once one is ready.
    num_restarts: how many workers were started in place of others.

    Raises, in all but its constructor:
        FailedWorkerError: a worker has told that it cannot go on.
        BatchdecodeError: workers die before they have done anything, or whatever they do.
        KeyboardInterrupt: a model has raised one.
        InputError: the input is damaged or gone.
    """

    def __init__(self, transport: worker.Transport, num_workers: int, num_slots: int) -> None:
        self.run: RunEvent | None = None
        self.num_restarts = 0
        self._transport, self._num_slots = transport, num_slots
        self.num_workers = num_workers
        self._members = [_Member() for _ in range(num_workers)]
        self._num_failed_starts = self._num_futile_deaths = 0
        self._unchecked: deque[LineBatch] = deque()  # with workers that died
        self._again, self._suspects = worker.Lines(), worker.Lines()
        self._deaths: dict[int, int] = {}  # of lines, by index, as long as they have no answer
        self._failed_checks: Counter[int] = Counter()  # by batch

    def start(self) -> RunEvent:
        for number in range(len(self._members)):
            self._transport.start(number)
        while self.run is None:
            for number, report in self._transport.receive():
                self._take(number, report)
        return self.run

    def check(self, lines: InputLines) -> None:
        while not lines.is_checked:
            self._give_batches(lines)
            if not lines.is_checked:
                for number, report in self._transport.receive():
                    self._take(number, report, lines)

    def decode(self, lines: InputLines) -> Iterator[tuple[int, worker.Answered | RestartEvent]]:
        """Have all lines decoded; yield what is answered, each line once, and who is replaced."""
        while True:
            self._give_batches(lines)
            self._give_lines(lines)
            is_busy = self._again or self._suspects or any(m.held for m in self._members)
            if lines.has_ended and not is_busy:
                return
            for number, report in self._transport.receive():
                restart = self._take(number, report, lines)
                if restart is not None:
                    yield number, restart
                elif isinstance(report, worker.Answered):
                    yield number, report

    def give_up(self, lines: InputLines) -> None:
        lines.close()
        self._again, self._suspects = worker.Lines(), worker.Lines()
        for number, member in enumerate(self._members):
            if member.held:
                self._transport.send(number, worker.Drop())

    def finish(self) -> Iterator[tuple[int, worker.Answered]]:
        """Let the runs of workers that have nothing to do come to their end; yield what they tell.

        One that dies now has no end.
        """
        left = {number for number, member in enumerate(self._members) if member.is_ready}
        for number in left:
            self._transport.send(number, worker.Finish())
        while left:
            for number, report in self._transport.receive():
                if isinstance(report, worker.Finished | worker.Died):
                    left.discard(number)
                elif isinstance(report, worker.Answered):
                    yield number, report

    def _take(
        self, number: int, report: worker.Report | worker.Died, lines: InputLines | None = None
    ) -> RestartEvent | None:
        """Take in what has come of a worker; return how it was replaced if it has died."""
        member = self._members[number]
        match report:
            case worker.Answered(indexes):
                member.num_steps, member.now = report.num_steps, report.now
                lost = {index for index, remark in member.remarks.items() if remark.deaths}
                if not lost.issuperset(indexes):
                    self._num_futile_deaths = 0
                member.note_answered(indexes)
                for index in indexes if self._deaths else ():
                    self._deaths.pop(index, None)
            case worker.Checked() if lines is not None:
                lines.take(member.batches.popleft(), report)
            case worker.Ready():
                member.is_ready, self.run = True, report.run
                self._num_failed_starts = 0
            case worker.Dropped(indexes):
                member.release(indexes)
            case worker.Failed():
                raise FailedWorkerError(report)
            case worker.StoppedByModel():
                raise KeyboardInterrupt
            case worker.Died():
                return self._replace(number, report)
            case _:
                pass
        return None

    def _give_batches(self, lines: InputLines) -> None:
        for number, member in enumerate(self._members):
            while member.is_ready and len(member.batches) < MAX_BATCHES:
                batch = self._unchecked.popleft() if self._unchecked else lines.next_batch()
                if batch is None:
                    return
                member.batches.append(batch)
                numbers, texts = batch.lines
                self._transport.send(number, worker.Check(list(numbers), texts))

    def _give_lines(self, lines: InputLines) -> None:
        """Give lines to be decoded to workers that have few: to several of them in turn.

        So few that are left are spread, and those that arrive together.
        """
        wanting: list[tuple[int, int]] = []
        for number, member in enumerate(self._members):
            if not member.is_ready or member.is_alone:
                continue
            if self._suspects and not member.held:
                member.is_alone = True
                self._give(number, self._suspects.take_first(1))
            elif wanted := member.num_wanted(self._num_slots):
                wanting.append((number, wanted))
        given = {number: worker.Lines() for number, _ in wanting}
        while wanting:
            left = []
            share = max(1, self._num_slots // 4) if len(wanting) > 1 else wanting[0][1]
            for number, wanted in wanting:
                portion = self._again.take_first(min(wanted, share))  # of a worker that died
                portion.extend(lines.next_lines(min(wanted, share) - len(portion)))
                given[number].extend(portion)
                if len(portion) == share < wanted:
                    left.append((number, wanted - share))
            wanting = left
        for number, portion in given.items():
            if portion:
                self._give(number, portion)

    def _give(self, number: int, lines: worker.Lines) -> None:
        member = self._members[number]
        member.held.update(zip(lines.indexes, lines.rows(), strict=True))
        member.remarks |= lines.remarks
        member.num_bytes += sum(map(len, lines.texts))
        self._transport.send(number, worker.Decode(lines))

    def _replace(self, number: int, died: worker.Died) -> RestartEvent:
        """Start a worker in place of one that has died, and give out again what that had.

        It goes on where the one before it was when it told something last: so the steps in its
        place are one line, for the trace, the numbers and the results alike.

        A line that was with so many that died is decoded by itself: so one that is the cause is
        found, and its neighbours are not taken for it.  What dies with its machine tells nothing of
        lines.
        """
        member, how, num_faults = self._members[number], died.how, int(not died.is_machine)
        self._members[number] = _Member(member.num_steps, member.now)
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
                    f"{MAX_FUTILE_DEATHS} workers in a row died, and none has answered anything; "
                    f"the last {how}"
                )
        self._unchecked.extend(member.batches)
        if member.batches and num_faults:
            batch = member.batches[0]
            self._failed_checks[batch.number] += 1
            if self._failed_checks[batch.number] == DEATHS_TOGETHER + DEATHS_ALONE:
                first, last = batch.lines.numbers[0], batch.lines.numbers[-1]
                raise BatchdecodeError(
                    f"each worker died that was to read lines {first} to {last}; the last {how}"
                )
        for index, line in member.held.items():
            remark = member.remarks.get(index)
            num_deaths = self._deaths[index] = self._deaths.get(index, 0) + num_faults
            if num_deaths < DEATHS_TOGETHER:
                self._again.append_line(line, remark)
            elif num_deaths < DEATHS_TOGETHER + DEATHS_ALONE or not member.is_alone:
                self._suspects.append_line(line, remark)
            else:
                why = f"{DEATHS_ALONE} workers died that decoded nothing else; the last {how}"
                self._again.append_line(line, replace(remark or worker.Remark(), deaths=why))
        self.num_restarts += 1
        restart = RestartEvent(
            worker=number,
            step=member.num_steps,
            time=member.now,
            reason=died.reason,
            code=died.code,
        )
        self._transport.start(number, replace(restart, worker=None))
        return restart


def run_by_workers(
    options: RunOptions,
    num_workers: int,
    stop: StopSignals,
    command: str,
    workers: AbstractContextManager[worker.Transport] | None = None,
) -> int:
    """Carry out `batchdecode run --workers N`; return its exit status.

    command: what continues this run if it ends early.
    workers: leads to as many, which are started when it is asked; None for what the options say.

    Raises:
        BatchdecodeError: the input, an option or a file is not right.
        BrokenPipeError: whoever reads the output has gone.
        Interrupted: a signal came before the first line was decoded.
    """
    with recording.opened_run(options, stop, num_workers) as opened:
        options, requests = opened.options, opened.requests
        if workers is None and options.on is None:
            workers = worker.Processes(options, num_workers, stop.waiting)
        elif workers is None:
            from .ray_workers import Actors  # noqa: PLC0415 - with it comes Ray

            address = (options.on or "").partition(":")[2]
            workers = Actors(options, num_workers, address, stop.waiting)
        with workers as transport:
            driver = Driver(transport, num_workers, options.batch)
            try:
                start = driver.start()
                with opened.resumption.prepare(options, requests, start) as resumption:
                    if resumption.has_finished:
                        parser = parser_for_any_model()
                        status = conclude_finished(
                            resumption, requests, parser, options, stop.waiting
                        )
                        if status is not None:
                            return status
                    report = ProblemReport(requests.name, options.color)
                    keep_going = options.keep_going or options.max_errors is not None
                    lines: InputLines
                    if requests.is_file:
                        lines = FileLines(
                            requests, report, resumption.earlier, keep_going=keep_going
                        )
                        try:
                            driver.check(lines)
                            lines.begin()
                        finally:
                            say(requests.take_notes() + report.closing())
                    else:
                        lines = PipeLines(requests, report, transport.wake, keep_going=keep_going)
                    try:
                        run = WorkersRun(opened, start, driver, lines, report, resumption)
                        return run.carry_out(stop, command)
                    except Interrupted:  # before the first line, or after the last one
                        now = f"stopped by {stop.name}", f"continue with: {command}"
                        recording.tell_ending(opened, None, resumption, *now)
                        return stop.exit_status
            except FailedWorkerError as error:
                say(printable_lines(error.traceback))
                raise


class WorkersRun(Gauges):
    """A run whose workers are ready: what they report goes to its results, trace, view and numbers.

    run: how the trace of a worker begins.
    """

    def __init__(
        self,
        opened: recording.OpenRun,
        run: RunEvent,
        driver: Driver,
        lines: InputLines,
        report: ProblemReport,
        resumption: Resumption,
    ) -> None:
        look_seldom()
        options, exposition, num_workers = opened.options, opened.exposition, driver.num_workers
        title = opened.requests.name.rpartition("/")[2]
        self._opened, self._options, self._driver = opened, options, driver
        self._report, self._resumption = report, resumption
        self._run = run if num_workers == 1 else replace(run, workers=num_workers)
        self._lines, self._num_to_answer = lines, lines.num_to_answer
        self._has_readers = any((options.trace, options.report, options.timeseries, opened.spans))
        # By worker: how each stands, when its next step starts, and lines in the engine.
        self._states = [EngineState(run.batch)] * num_workers
        self._times, self._num_begun = [0.0] * num_workers, [0] * num_workers
        self._num_answered = 0
        self._num_steps = [0] * num_workers
        readers = self._readers = recording.EventReaders(opened, num_workers)
        all_series = [None] * num_workers if readers.series is None else readers.series.all_series
        self._lock: AbstractContextManager[object] = nullcontext()
        if exposition is not None:
            from batcher.metrics.prometheus import WorkersCollector  # noqa: PLC0415 - an extra

            readers.metrics = watched = RunMetrics(
                options.limits, is_watched=True, worker_series=all_series
            )
            collector = WorkersCollector(watched, options.model, self._states, self.backlog)
            self._lock = collector.lock
        elif worker.Wanted.by(options).events:
            readers.metrics = RunMetrics(options.limits, worker_series=all_series)
        readers.observer = self._metrics = readers.metrics
        plan = RunPlan(
            title,
            run.policy,
            num_workers * options.batch,
            lines.total,
            is_timed=bool(run.step_time),
            num_workers=num_workers,
        )
        self._fold: RequestFold | None = None  # before there is a view
        self.view = open_view(
            plan,
            self,
            live=options.live,
            is_quiet=options.quiet,
            color=options.color,
            is_piped=options.output is None and is_pipe(stdout_descriptor()),
            has_others=options.output is None and is_same_terminal(stdout_descriptor(), 2),
        )
        self._fold = self.view.fold
        self._note_events([self._run])
        if exposition is not None:
            exposition.tell(collector)
        self._started = time.monotonic()
        if not options.quiet:
            say(printable_lines(resumption.describe(lines.total)))
        earlier, output = resumption.earlier, options.output
        first = earlier.num_complete if earlier else 0
        self._order = InputOrder(first) if options.keep_order else None
        sink = (
            recording.stdout_beside(self.view)
            if output is None
            else resumption.open_results(output)
        )
        self._results = recording.ResultWriter(sink)
        self._num_failed, self._first_failure = 0, ""
        self._said: set[str] = set()

    def take_answered(self, number: int, told: worker.Answered) -> None:
        self._num_answered += len(told.indexes)
        self._times[number], self._num_begun[number] = told.now, told.num_begun
        self._num_steps[number] = told.num_steps
        with self._lock:
            if told.state is not None:
                self._states[number] = told.state
            self._note_events(told.events)
            if self._metrics is not None:
                own = self._metrics.workers[number]
                own.counted.num_steps = max(own.counted.num_steps, told.num_steps)
                own.counted.num_compiled += told.constraints[0]
                own.counted.num_compiled_before += told.constraints[1]
        if self.view.is_watched:
            with self.view.lock:
                self.view.paces[number] = max(told.num_steps - 1, 0)
            self.view.after_step(max(self._num_steps) - 1)

    def take_restart(self, number: int, restart: RestartEvent) -> None:
        self._num_begun[number] = 0
        with self._lock:
            self._states[number] = EngineState(self._run.batch)
            self._note_events([restart])

    def _note_events(self, events: list[Event]) -> None:
        """Pass events on to all that read them; those of one worker alone have no number."""
        if not events:
            return
        if len(self._num_steps) == 1:
            events = [
                event if isinstance(event, RunEvent) else replace(event, worker=None)
                for event in events
            ]
        self._readers.take(events)
        if self._fold is not None:
            with self.view.lock:
                for event in events:
                    self._fold.take(event)

    def backlog(self) -> Unread:
        """Return the lines that no engine has begun, by the worker whose clock is furthest."""
        if self._num_to_answer is None:
            return NOTHING_UNREAD
        num_left = self._num_to_answer - self._num_answered - sum(self._num_begun)
        coming = min(num_left, self._lines.arrivals.left(max(self._times)).coming)
        return Unread(num_left - coming, coming)

    def read_gauges(self) -> GaugeReading:
        queued, coming = self.backlog()
        waiting = [] if self._fold is None else self._fold.open
        own = [found for found in waiting if not is_follower(found)]
        queued += sum(found.admission is None for found in own)
        coming += max(sum(self._num_begun) - sum(not found.index for found in own), 0)
        return GaugeReading(0.0, 0, None, None, queued, coming)

    def carry_out(self, stop: StopSignals, command: str) -> int:
        """Run to the end, and say how that went; return the exit status."""
        lines, resumption = self._lines, self._resumption
        status, remark, is_over = 0, "", False  # is_over: more was done than was written
        is_complete = False
        try:
            try:
                resumption.begin()
                self._decode(stop)
            finally:
                stop.before_wait = None
                with ExitStack() as ending:
                    ending.callback(self._readers.close, 0)
                    ending.callback(self.view.close)
                    self._write_rest()
            recording.settle_files(self._opened)
            if not (self._has_given_up or lines.has_refused or lines.broken):
                is_complete = True
                resumption.finish()
        except (KeyboardInterrupt, WriteError, BatchdecodeError) as error:
            status, remark, is_over = recording.how_it_ended(error, stop)
            if isinstance(error, FailedWorkerError):
                say(printable_lines(error.traceback))
                status = recording.BAD_INPUT if error.is_input else 1
        say(self._report.closing())
        if not is_over:
            if self._metrics is not None:
                timeline = self._readers.timeline
                recording.tell_summary(
                    self._opened,
                    self._metrics.summary(),
                    self._run,
                    None if timeline is None else timeline.workers,
                    elapsed=time.monotonic() - self._started,
                    is_complete=is_complete,
                )
            recording.close_spans(self._opened.spans, self._num_steps, is_quiet=self._options.quiet)
        num_restarts = self._driver.num_restarts
        if num_restarts and not self._options.quiet:
            say(f"  {counted(num_restarts, 'worker')} replaced, which had died\n")
        if self._first_failure:
            say(printable_lines(f"first failure: {self._first_failure}\n"))
        recording.refuse_rest(self._report, self._lines)
        what_now = f"continue with: {command}"
        if not remark and self._has_given_up:
            remark = f"stopped after {counted(self._num_failed, 'failed request')}"
            what_now = "to go on, add --resume and raise --max-errors"
        if remark:
            recording.tell_ending(self._opened, self._results, self._resumption, remark, what_now)
        return status or (1 if self._num_failed else 0)

    @property
    def _has_given_up(self) -> bool:
        return self._num_failed >= (self._options.max_errors or float("inf"))

    def _decode(self, stop: StopSignals) -> None:
        """Have all lines decoded, and write what they are answered with."""
        earlier, order = self._resumption.earlier, self._order
        if earlier is not None and order is not None:
            for index, answer in earlier.kept():
                self._results.write(order.put(index, answer))
        stop.before_wait, stop.before_pause = self._show_all, self.view.step_aside
        has_given_up = False
        for number, told in self._driver.decode(self._lines):
            if isinstance(told, RestartEvent):
                self.take_restart(number, told)
                continue
            self.take_answered(number, told)
            self._write(told)
            if self._has_given_up and not has_given_up:
                has_given_up = True
                self._driver.give_up(self._lines)
            if stop.received is not None:
                raise Interrupted
        for number, told in self._driver.finish() if self._has_readers else ():
            self.take_answered(number, told)

    def _show_all(self) -> float:
        self._results.flush()
        self._readers.flush()
        return self.view.refresh()

    def _write(self, answered: worker.Answered) -> None:
        """Write what is answered, and say what is to be said."""
        results, lines, order = self._results, self._lines, self._order
        if order is None and self._resumption.earlier is None:
            results.write([answered.answers])
        else:
            for index, answer in answered.by_line():
                lacking = lines.lacking(index, answer)
                results.write([lacking] if order is None else order.put(index, lacking))
        self._num_failed += answered.num_failed
        self._first_failure = self._first_failure or answered.first_failure
        said = answered.said
        if said and said not in self._said and len(self._said) < _MAX_KINDS:
            self._said.add(said)
            self._report.tell(said)
        if self._report.news:
            self.view.write_message(self._report.take())

    def _write_rest(self) -> None:
        try:
            for answer in () if self._order is None else self._order.rest():
                self._results.write([answer])
        finally:
            if self._order is not None:
                self._order.close()
            self._results.close()
