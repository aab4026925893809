"""A run by workers: which of them decodes which lines, and what becomes of what they report.

Lines are read, checked by workers, then given out as workers get on with them, and again when one
dies.  Rule: each line is with one worker or none, and what a worker has not answered when it dies
is given out again, so that nothing is lost, and nothing written twice.

The run parses no request.  Workers report what lines are by themselves; what a line is beside those
before it (an id given twice, an arrival that goes back) is found out here.  The worker is a column
of the events that they report: trace, picture and numbers are those of one engine.
"""

import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.events import Event, RestartEvent, RunEvent
from batcher.metrics.summary import EngineState, RunMetrics
from batcher.request import NOTHING_UNREAD, Request, Unread
from batcher.requests.lines import BadLine, ParsedLine
from batcher.requests.results import decode_result_line
from batcher.trace.run import RequestFold, is_follower

from ..screen.terminal import printable_lines
from ..screen.view import GaugeReading, Gauges
from . import worker
from .input import (
    BLOCK_LINES,
    Block,
    IdRegistry,
    InputError,
    LineArrivals,
    OpenInput,
    ReadAhead,
    Waiting,
    arrival_goes_back,
    check_kind,
    id_given_before,
)
from .loop import RunOutcome
from .problems import InvalidInput, ProblemReport, say
from .results import InputOrder
from .resume import EarlierResults
from .run_options import RunOptions
from .worker import CheckedLine, Line

if TYPE_CHECKING:
    from batcher.metrics.prometheus import WorkersCollector

MAX_AHEAD = 4 * BLOCK_LINES  # lines of a pipe that no worker has
_MAX_KINDS = 5  # of what workers say
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


class LineBatch(NamedTuple):
    """Lines that are checked together, from the index `first` on; number: of the batch, from 0."""

    number: int
    first: int
    lines: list[tuple[int, bytes]]


class InputLines:
    """Lines on their way to workers, which are checked in batches, and given out.

    A file is checked whole before a line is given out, and read again for that: of a line 4 bytes
    are held in memory, with earlier results 5.  A pipe is read by a thread, and its lines are given
    out as they are checked.

    num_read: how many were checked.  num_bad: of them, those that are no requests.
    total, num_to_answer: how many there are, and are without an earlier result, once it is known.
    has_refused: a bad line has ended the reading.  broken: why it could not be read on.
    arrivals: of all that were checked, a line counting as one.
    wake: called, by the thread, whenever more has come.  keep_going: bad lines are answered, and do
    not end the reading.
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
        self.num_read = self.num_bad = 0
        self.total: int | None = None
        self.num_to_answer: int | None = None
        self.has_refused = False
        self.broken: InputError | None = None
        self.arrivals = LineArrivals()
        self._requests, self._report, self._keep_going = requests, report, keep_going
        self._earlier, self._reader = earlier, requests.lines()
        self._ahead: ReadAhead[Block] | None = None
        if not requests.is_file:
            read = self._reader.read_block
            blocks = iter(lambda: read(BLOCK_LINES), Block([], []))
            self._ahead = ReadAhead(blocks, wake)
        self._has_read_all = self._is_closed = False
        self._num_batches = self._num_taken = self._num_lines = 0
        self._early: dict[int, tuple[LineBatch, list[CheckedLine]]] = {}
        self._ids, self._last_arrival = IdRegistry(), 0.0
        self._ready: deque[Line] = deque()
        # Of a file:
        self._checksums, self._duplicates = array("I"), dict[int, int]()
        self._is_answered = bytearray()  # of each line, if there are earlier results
        self._found: dict[int, set[int]] = {}
        self._num_read_again = 0

    @property
    def is_checked(self) -> bool:
        return self._has_read_all and self._num_taken == self._num_batches

    @property
    def has_ended(self) -> bool:
        """Whether no more lines will be given out."""
        if self._ready or self._is_closed:
            return not self._ready
        return self.is_checked if self._ahead else self._num_read_again == self.total

    def next_batch(self) -> LineBatch | None:
        """Return lines that are to be checked; None while there are none.

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
            self._has_read_all = True  # or as much of it as can be
            return None
        batch = LineBatch(self._num_batches, self._num_lines, list(zip(*block, strict=True)))
        self._num_lines += len(batch.lines)
        self._num_batches += 1
        return batch

    def take(self, batch: LineBatch, checked: list[CheckedLine]) -> None:
        """Take in what the lines of a batch are, whichever was checked first.

        Raises:
            BatchdecodeError: the input cannot be decoded by several workers.
            InputError: it holds something else than requests.
        """
        self._early[batch.number] = batch, checked
        while (found := self._early.pop(self._num_taken, None)) is not None:
            self._num_taken += 1
            batch, checked = found
            for index, (line, one) in enumerate(
                zip(batch.lines, checked, strict=True), batch.first
            ):
                if not self._is_closed:
                    self._take_line(Line(index, *line, one.checksum), one)

    def _take_line(self, line: Line, checked: CheckedLine) -> None:
        """Take in what a line is, and find out what it is beside those before it."""
        number, text, arrival = line.number, line.text, checked.arrival
        self.num_read += 1
        bad = None if checked.bad is None else BadLine(*checked.bad)
        if bad is None:
            if checked.session is not None:
                raise BatchdecodeError(
                    f"line {number} is a turn of session {checked.session!r}: turns go on "
                    "from one another in one engine, so run these requests without --workers"
                )
            first = self._ids.add(checked.id, number)
            if first is not None:
                line.first_number = first
                parsed = ParsedLine(Request(id=checked.id, prompt=""))
                bad = id_given_before(parsed, text, number, first)
            elif arrival < (last := self._last_arrival):
                if self._ahead is None:
                    raise BatchdecodeError(
                        f"line {number}: arrival_time goes back from {last:g} to {arrival:g}: "
                        "workers are given lines as they stand, so sort them by arrival_time, "
                        "or run them without --workers"
                    )
                line.last_arrival = last
                request = Request(id=checked.id, prompt="", arrival_time=arrival)
                bad = arrival_goes_back(ParsedLine(request), text, number, last)
        if bad is None:
            self._last_arrival = arrival
            self.arrivals.add(arrival, 1)
        else:
            if not line.index:
                check_kind(text, self._requests.name)
            self.num_bad += 1
            self._report.add(bad)
            line.checksum = 0
        if self._ahead is not None:
            if bad is None or self._keep_going:
                self._ready.append(line)
            else:
                self.has_refused = self._is_closed = self._has_read_all = True
            return
        self._checksums.append(line.checksum)
        if line.first_number:
            self._duplicates[line.index] = line.first_number
        earlier = self._earlier
        if earlier is None:
            return
        if bad is not None:
            self._is_answered.append(earlier.has_rejected(number))
            return
        found = set(earlier.find(checked.id, checked.num_outputs))
        is_answered = len(found) >= checked.num_results
        if found and not is_answered:
            self._found[line.index] = found
        self._is_answered.append(is_answered)

    def begin(self) -> None:
        """Give out the lines of a file from here on.

        Raises:
            InvalidInput: there are bad lines, and they are not to be skipped.
        """
        if self.num_bad and not self._keep_going:
            what_now = "nothing decoded. --keep-going to skip them."
            raise InvalidInput(self._report, self.num_read, what_now)
        self.total = self.num_read
        self.num_to_answer = self.total - sum(self._is_answered)
        self._reader = self._requests.lines()

    def next_lines(self, most: int) -> list[Line]:
        """Return lines that are to be answered, up to so many; less while there are no more.

        Raises:
            InputError: the input is damaged or gone, or shorter than it was.
        """
        while self._ahead is None and len(self._ready) < most and not self._is_closed:
            if self._num_read_again == self.total:
                break
            self._read_again()
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    def _read_again(self) -> None:
        """Read the lines that come next, without those that are answered."""
        first = self._num_read_again
        numbers, texts = self._reader.read_block(BLOCK_LINES)
        if not texts:
            raise InputError("the input has become shorter while it was read")
        checksums = self._checksums[first : first + len(texts)]  # what was added since is left out
        self._num_read_again += len(checksums)
        for index, number, text, checksum in zip(
            range(first, self._num_read_again), numbers, texts, checksums, strict=False
        ):
            if not (self._is_answered and self._is_answered[index]):
                first_number = self._duplicates.get(index, 0)
                self._ready.append(Line(index, number, text, checksum, first_number))

    def close(self) -> None:
        self._is_closed = self._has_read_all = True
        self._ready.clear()

    def lacking(self, index: int, answer: bytes) -> bytes:
        """Return what of the answer to a line an earlier run has not given."""
        found = self._found.pop(index, None)
        if found is None:
            return answer
        lines = answer.splitlines(keepends=True)
        left = [line for line in lines if decode_result_line(line)[0].index not in found]
        return b"".join(left[: len(lines) - len(found)])


class _Member:
    """A worker as the run knows it.

    held: the lines that it has not answered, by index.  batches: what it has to check, in order.
    is_alone: it has one line that is suspected, and is given no other one.
    num_steps, now: how many steps were made in its place, and when the next one starts.
    """

    def __init__(self, num_steps: int = 0, now: float = 0.0) -> None:
        self.num_steps, self.now, self.num_begun = num_steps, now, 0
        self.is_ready = self.is_alone = False
        self.held: dict[int, Line] = {}
        self.batches: deque[LineBatch] = deque()
        self._num_bytes = 0
        self._rate, self._last = 0.0, time.monotonic()

    def hold(self, lines: list[Line]) -> None:
        for line in lines:
            self.held[line.index] = line
            self._num_bytes += len(line.text)

    def release(self, indexes: list[int]) -> None:
        for index in indexes:
            self._num_bytes -= len(self.held.pop(index).text)

    def note_answered(self, indexes: list[int]) -> None:
        self.release(indexes)
        now = time.monotonic()
        rate = len(indexes) / max(now - self._last, 1e-3)
        self._rate += _NEWEST * (rate - self._rate)
        self._last = now
        self.is_alone = self.is_alone and bool(self.held)

    def num_wanted(self, num_slots: int) -> int:
        if self._num_bytes > MAX_AHEAD_BYTES:
            return max(0, num_slots - len(self.held))
        ahead = min(max(num_slots // 2, int(self._rate * AHEAD_SECONDS)), MAX_AHEAD_LINES)
        wanted = num_slots + ahead - len(self.held)
        return wanted if wanted > ahead // 2 else 0


class Workers(Gauges):
    """Workers as a run sees them: an engine and its Loop, which yields what they have answered.

    states: how each engine stands, for Prometheus.  num_restarts: how many took others' places.
    fold, metrics: of the run, which sets them.  num_unread: of the input, which nobody counts.
    See Loop for the others.

    Raises, in all but its constructor:
        BatchdecodeError: a worker cannot go on, or they die whatever they do.
        KeyboardInterrupt: a model has raised one.
        InputError: the input is damaged or gone, or not what workers can decode.
    """

    lines: InputLines  # from `loop` on
    num_unread = None

    def __init__(
        self, options: RunOptions, requests: OpenInput, transport: worker.Transport
    ) -> None:
        self.options, self.requests = options, requests
        num_workers = self.num_workers = options.workers or 1
        self.report = ProblemReport(requests.name, options.color)
        self.num_restarts = self.num_failed = 0
        self.first_failure: str | None = None
        self.is_complete = False
        self.states = [EngineState(options.batch)] * num_workers
        self.fold: RequestFold | None = None
        self.metrics: RunMetrics | None = None
        self._transport, self._num_slots = transport, options.batch
        self._run: RunEvent | None = None
        self._order: InputOrder | None = None
        self._is_resumed = self._has_begun = False
        self._members = [_Member() for _ in range(num_workers)]
        self._num_answered = self._num_failed_starts = self._num_futile_deaths = 0
        self._unchecked: deque[LineBatch] = deque()  # with workers that died
        self._again: deque[Line] = deque()
        self._suspects: deque[Line] = deque()
        self._deaths: dict[int, int] = {}  # of lines, by index, as long as they have no answer
        self._failed_checks: Counter[int] = Counter()  # by batch
        self._said: set[str] = set()

    def run_event(self) -> RunEvent:
        """Return how the trace begins, once a worker is ready."""
        if self._run is None:
            for number in range(self.num_workers):
                self._transport.start(number)
            while self._run is None:
                for number, report in self._transport.receive():
                    self._take(number, report)
        return self._run

    def loop(self, earlier: EarlierResults | None) -> "Workers":
        """Return this, ready to be iterated over; the lines of a file are checked by then.

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
                while not lines.is_checked:
                    self._give_batches()
                    if not lines.is_checked:
                        for number, report in self._transport.receive():
                            self._take(number, report)
                lines.begin()
            finally:
                say(requests.take_notes() + self.report.closing())
        self._has_begun = True
        return self

    def __iter__(self) -> Iterator[RunOutcome]:
        lines, transport = self.lines, self._transport
        while True:
            self._give_batches()
            self._give_lines()
            is_busy = self._again or self._suspects or any(m.held for m in self._members)
            if lines.has_ended and not is_busy:
                break
            for number, report in transport.receive():
                outcome = self._take(number, report)
                if outcome is not None:
                    yield outcome
        # The engines come to their end as well; one that dies now has none.
        left = set[int]()
        if worker.wants_events(self.options):
            left = {number for number, member in enumerate(self._members) if member.is_ready}
        for number in left:
            transport.send(number, worker.Finish())
        while left:
            for number, report in transport.receive():
                if isinstance(report, worker.Finished | worker.Died):
                    left.discard(number)
                elif isinstance(report, worker.Answered):
                    yield self._take_answered(number, report)
        self.is_complete = not (self.has_given_up or lines.has_refused or lines.broken)

    def _take(self, number: int, report: worker.Report | worker.Died) -> RunOutcome | None:
        """Take in what has come of a worker; return what the run is to know of it."""
        member = self._members[number]
        match report:
            case worker.Answered():
                return self._take_answered(number, report)
            case worker.Checked(checked):
                self.lines.take(member.batches.popleft(), checked)
            case worker.Ready(run):
                member.is_ready, self._num_failed_starts = True, 0
                self._run = replace(run, workers=self.num_workers)
            case worker.Dropped(indexes):
                member.release(indexes)
            case worker.Failed(message, traceback, is_input):
                (self.report.tell if self._has_begun else say)(printable_lines(traceback))
                raise InputError(message) if is_input else BatchdecodeError(message)
            case worker.StoppedByModel():
                raise KeyboardInterrupt
            case worker.Died():
                return RunOutcome(self._for_run([self._replace(number, report)]))
            case _:
                pass
        return None

    def _take_answered(self, number: int, told: worker.Answered) -> RunOutcome:
        member, indexes = self._members[number], told.indexes
        if not all(member.held[index].deaths for index in indexes):
            self._num_futile_deaths = 0
        member.num_steps, member.now = told.num_steps, told.now
        member.num_begun = told.num_begun
        member.note_answered(indexes)
        for index in indexes if self._deaths else ():
            self._deaths.pop(index, None)
        self._num_answered += len(indexes)
        if told.state is not None:
            self.states[number] = told.state
        if self.metrics is not None:
            own = self.metrics.workers[number]
            own.note_steps(told.num_steps)
            own.note_constraints(*told.constraints)
        lines = told.answers
        if self._is_resumed or self._order is not None:
            lines = []
            for index, answer in zip(indexes, told.answers, strict=True):
                lines += self.put_back(index, self.lines.lacking(index, answer))
        had_given_up = self.has_given_up
        self.num_failed += told.num_failed
        if self.has_given_up and not had_given_up:
            self._give_up()
        self.first_failure = self.first_failure or told.first_failure or None
        if told.said and told.said not in self._said and len(self._said) < _MAX_KINDS:
            self._said.add(told.said)
            self.report.tell(told.said)
        return RunOutcome(self._for_run(told.events), lines)

    def _for_run(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return events as the run tells of them: those of one worker alone have no number."""
        if self.num_workers > 1:
            return events
        return [replace(event, worker=None) for event in events]

    def _give_up(self) -> None:
        self.lines.close()
        self._again.clear()
        self._suspects.clear()
        for number, member in enumerate(self._members):
            if member.held:
                self._transport.send(number, worker.Drop())

    def _give_batches(self) -> None:
        for number, member in enumerate(self._members):
            while member.is_ready and len(member.batches) < MAX_BATCHES:
                batch = self._unchecked.popleft() if self._unchecked else self.lines.next_batch()
                if batch is None:
                    return
                member.batches.append(batch)
                self._transport.send(number, worker.Check(batch.lines))

    def _give_lines(self) -> None:
        """Give lines to be decoded to workers that have few: to several of them in turn.

        So few that are left are spread, and those that arrive together.
        """
        wanting: list[tuple[int, int]] = []
        for number, member in enumerate(self._members):
            if not member.is_ready or member.is_alone:
                continue
            if self._suspects and not member.held:
                member.is_alone = True
                self._give(number, [self._suspects.popleft()])
            elif wanted := member.num_wanted(self._num_slots):
                wanting.append((number, wanted))
        given: dict[int, list[Line]] = {number: [] for number, _ in wanting}
        while wanting:
            left = []
            share = max(1, self._num_slots // 4) if len(wanting) > 1 else wanting[0][1]
            for number, wanted in wanting:
                most, again = min(wanted, share), self._again  # of a worker that died
                portion = [again.popleft() for _ in range(min(most, len(again)))]
                portion += self.lines.next_lines(most - len(portion))
                given[number] += portion
                if len(portion) == share < wanted:
                    left.append((number, wanted - share))
            wanting = left
        for number, portion in given.items():
            if portion:
                self._give(number, portion)

    def _give(self, number: int, lines: list[Line]) -> None:
        self._members[number].hold(lines)
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
        self.states[number] = EngineState(self._num_slots)
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
                first, last = batch.lines[0][0], batch.lines[-1][0]
                raise BatchdecodeError(
                    f"each worker died that was to read lines {first} to {last}; the last {how}"
                )
        for index, line in member.held.items():
            num_deaths = self._deaths[index] = self._deaths.get(index, 0) + num_faults
            if num_deaths < DEATHS_TOGETHER:
                self._again.append(line)
            elif num_deaths < DEATHS_TOGETHER + DEATHS_ALONE or not member.is_alone:
                self._suspects.append(line)
            else:
                why = f"{DEATHS_ALONE} workers died that decoded nothing else; the last {how}"
                self._again.append(replace(line, deaths=why))
        self.num_restarts += 1
        restart = RestartEvent(
            step=member.num_steps, time=member.now, reason=died.reason, code=died.code
        )
        self._transport.start(number, restart)
        return replace(restart, worker=number)

    # -- what a run asks besides ---------------------------------------------------------------

    @property
    def total(self) -> int | None:
        return self.lines.total

    @property
    def has_given_up(self) -> bool:
        return self.num_failed >= (self.options.max_errors or float("inf"))

    @property
    def num_steps(self) -> list[int]:
        return [member.num_steps for member in self._members]

    @property
    def num_all_steps(self) -> int:
        return sum(self.num_steps)

    def put_back(self, index: int, lines: bytes) -> list[bytes]:
        return [lines] if self._order is None else self._order.put(index, lines)

    def rest(self) -> Iterator[bytes]:
        return iter(()) if self._order is None else self._order.rest()

    def close(self) -> None:
        if self._order is not None:
            self._order.close()

    def arrived(self) -> list[Event]:
        return []

    end_events = arrived  # each engine has told of its own

    def collector(self, metrics: RunMetrics) -> "WorkersCollector":
        from batcher.metrics.prometheus import WorkersCollector  # noqa: PLC0415 - an extra

        return WorkersCollector(metrics, self.options.model, self.states, lambda: self.backlog)

    @property
    def backlog(self) -> Unread:
        """The lines that no engine has begun, by the worker whose clock is furthest."""
        if self.lines.num_to_answer is None:
            return NOTHING_UNREAD
        members, num_answered = self._members, self._num_answered
        num_left = self.lines.num_to_answer - num_answered - sum(m.num_begun for m in members)
        now = max(member.now for member in members)
        coming = min(num_left, self.lines.arrivals.left(now).coming)
        return Unread(num_left - coming, coming)

    def read_gauges(self) -> GaugeReading:
        queued, coming = self.backlog
        waiting = [] if self.fold is None else self.fold.open
        own = [found for found in waiting if not is_follower(found)]
        queued += sum(found.admission is None for found in own)
        num_begun = sum(member.num_begun for member in self._members)
        coming += max(num_begun - sum(not found.index for found in own), 0)
        return GaugeReading(0.0, 0, None, None, queued, coming)


def transport_of(options: RunOptions, waiting: Waiting) -> AbstractContextManager[worker.Transport]:
    """Return what starts the workers of a run: as processes, or as --on says."""
    number = options.workers or 1
    if options.on is None:
        return worker.Processes(options, number, waiting)
    from .ray_workers import Actors  # noqa: PLC0415 - with it comes Ray

    return Actors(options, number, options.on.partition(":")[2], waiting)
