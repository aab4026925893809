"""Requests in the order of their arrival, read from the input only as the run asks for them.

A file is surveyed first, whole: every problem in it is known before the first step.
"""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from batcher.events import ArriveReason
from batcher.request import NOTHING_UNREAD, Request, Unread, num_queued_as
from batcher.requests.lines import BadLine, ParsedLine, RequestParser

from .intake import InputError, LineReader, OpenInput, Waiting
from .problems import InvalidInput, ProblemReport, arrival_goes_back
from .reading import Line, LineParser, RequestReader, checksum_of

_MAX_AHEAD = 1024
_HEAD_BYTES = 2**22


class LineArrivals:
    """When the lines of a file arrive that a run has not taken, as the outputs that will wait.

    Lines are added in the order of their arrival, and taken in the same order: 16 bytes for each
    time.  A turn of a session after its first arrives when the turn before has ended.
    """

    def __init__(self) -> None:
        self._times, self._totals = array("d"), array("q")
        self._num_taken = self._num_turns = 0
        self._sessions = set[str]()  # of which a turn was taken

    def add(self, time: float, count: int, *, is_turn: bool = False) -> None:
        """Take note of a line; is_turn: it is not the first one of its session."""
        if is_turn:
            self._num_turns += count
        elif self._times and self._times[-1] == time:
            self._totals[-1] += count
        else:
            self._totals.append(count + self._totals[-1] if self._totals else count)
            self._times.append(time)

    def take(self, line: Line) -> None:
        """Take note that the run has the next line."""
        if not isinstance(line, ParsedLine):
            return
        session, count = line.request.session, num_queued_as(line.request)
        if session in self._sessions:
            self._num_turns -= count
            return
        self._num_taken += count
        if session is not None:
            self._sessions.add(session)

    def left(self, now: float) -> Unread:
        """Return what is still to be taken."""
        place = bisect_right(self._times, now)
        queued = max((self._totals[place - 1] if place else 0) - self._num_taken, 0)
        total = self._totals[-1] if self._totals else 0
        return Unread(queued, total - self._num_taken - queued + self._num_turns)


class Source:
    """Where the run gets its requests.

    has_ended: next() has no more to give.  input_index: of the line that it has given last.
    reason: why its requests arrive when they do.  total: how many lines there are, if known.
    arrivals: of all lines, if known.
    """

    has_ended, input_index = False, -1
    reason: ArriveReason = "input"
    total: int | None = None
    arrivals: LineArrivals | None = None

    def upcoming(self, now: float) -> str | None:  # noqa: ARG002 - see FileSource
        """Return the id of the request that next() will give, if it is known to have arrived."""
        return None

    def took(self, line: Line) -> None:
        """Take note that the run has a line that next() gave."""
        if self.arrivals is not None:
            self.arrivals.take(line)

    def backlog(self, now: float) -> Unread:
        """Return what the run has not taken, by what has arrived by `now`; of a pipe, nothing."""
        return NOTHING_UNREAD if self.arrivals is None else self.arrivals.left(now)

    def find(self, text: str) -> str | None:  # noqa: ARG002 - see FileSource
        """Return the id of a request that next() will give, of those in memory.

        One that is `text`, or else the first that has it in it; None if there is none.
        """
        return None

    @property
    def is_in_memory(self) -> bool:
        """Whether `find` knows all that next() will give."""
        return self.has_ended

    def next(self) -> Line | None:
        """Return the next line; None at the end, and while one that could come has not come yet."""
        raise NotImplementedError

    def wait(self) -> None:
        """Come back when next() has something to give, or the input has ended: it may wait, too."""


class SessionArrivals:
    """When requests arrive at the earliest: a turn of a session not before the turns before it."""

    def __init__(self) -> None:
        self._sessions: dict[str, float] = {}

    def is_turn(self, request: Request) -> bool:
        """Return whether `request` goes on from one that was asked for before."""
        return request.session in self._sessions

    def time_of(self, request: Request) -> float:
        """Return when `request` arrives, after all that were asked for before."""
        if request.session is None:
            return request.arrival_time
        time = max(request.arrival_time, self._sessions.get(request.session, 0.0))
        self._sessions[request.session] = time
        return time


class Survey:
    """What one pass over a file finds out, so that it can be read in the order of arrival.

    head: the first lines as they were parsed, which need not be parsed again.
    rest: the offset and the number of the first line after them.
    checksums: of the lines after them, to see whether they are still the same; 0 of a bad one.
    arrivals: of all lines, if they are in order.
    """

    def __init__(self) -> None:
        self.arrivals = LineArrivals()
        self.num_lines = self.num_bad = 0
        self.is_in_order = True
        self.head: deque[Line] = deque()
        self.rest = (0, 0)
        self.checksums = array("I")
        self._times, self._last_arrival = SessionArrivals(), 0.0

    def add(self, parsed: Line, reader: RequestReader) -> None:
        """Take note of the line that `reader` has just read."""
        self.num_lines += 1
        if isinstance(parsed, ParsedLine):
            request, times = parsed.request, self._times
            is_turn, arrival = times.is_turn(request), times.time_of(request)
            self.is_in_order &= arrival >= self._last_arrival
            if self.is_in_order:
                self.arrivals.add(arrival, num_queued_as(request), is_turn=is_turn)
            self._last_arrival = arrival
        else:
            self.num_bad += 1
        lines = reader.lines
        if lines.start < _HEAD_BYTES:
            self.head.append(parsed)
        else:
            if not self.checksums:
                self.rest = (lines.start, lines.number)
            self.checksums.append(checksum_of(reader.line, parsed))


class FileSource(Source):
    """A file whose requests arrive in the order they stand in."""

    def __init__(self, lines: LineReader, parser: LineParser, survey: Survey) -> None:
        self.total = survey.num_lines
        self._lines, self._parser = lines, parser
        self._head, self._checksums = survey.head, iter(survey.checksums)
        self.arrivals = survey.arrivals
        self._fits_in_memory = not survey.checksums
        if survey.checksums:
            lines.go_to(*survey.rest)

    @property
    def is_in_memory(self) -> bool:
        """See Source."""
        return self._fits_in_memory or self.has_ended

    def upcoming(self, now: float) -> str | None:
        """Return the id of the next request, as long as it is one of those in memory."""
        has_arrived = self._head and self.backlog(now).queued
        return name_of(self._head[0], self.input_index + 1) if has_arrived else None

    def find(self, text: str) -> str | None:
        """Return the id of a request to come; see Source."""
        first = self.input_index + 1
        names = [name_of(line, index) for index, line in enumerate(list(self._head), first)]
        return text if text in names else next((name for name in names if text in name), None)

    def next(self) -> Line | None:
        """Return the next line; see Source."""
        index = self.input_index + 1
        if index == self.total:
            self.has_ended = True
            return None
        self.input_index = index
        if self._head:
            return self._head.popleft()
        line = self._lines.read()
        if line is None:
            raise InputError("the input has become shorter while it was read")
        return self._parser.parse_again(line, self._lines.number, index, next(self._checksums))


class IndexedSource(Source):
    """A file whose requests stand in another order than they arrive in: each is looked up.

    A pass over the file finds out where each line is: 52 bytes for each, while they are sorted.
    """

    def __init__(self, lines: LineReader, parser: LineParser) -> None:
        self._lines, self._parser = lines, parser
        self._starts, self._numbers, self._checksums = array("q"), array("q"), array("I")
        self._order = iter(self._index())
        self.total = len(self._starts)

    def next(self) -> Line | None:
        """Return the next line; see Source."""
        index = next(self._order, None)
        if index is None:
            self.has_ended = True
            return None
        self.input_index = index
        line = self._lines.read_at(self._starts[index])
        number, checksum = self._numbers[index], self._checksums[index]
        return self._parser.parse_again(line, number, index, checksum)

    def _index(self) -> "array[int]":
        """Note where each line is, and return the lines by arrival time.

        Of one time, as they stand; a bad line arrives with the one before it.
        """
        import numpy as np  # noqa: PLC0415 - only for a file that is out of order

        lines, arrivals, arrival = self._lines, array("d"), 0.0
        times, counts = SessionArrivals(), array("q")  # less than 0 for turns
        while (line := lines.read()) is not None:
            parsed = self._parser.parse(line, lines.number, len(arrivals))
            counts.append(0)
            if isinstance(parsed, ParsedLine):
                sign = -1 if times.is_turn(parsed.request) else 1
                counts[-1] = sign * num_queued_as(parsed.request)
                arrival = times.time_of(parsed.request)
            arrivals.append(arrival)
            self._starts.append(lines.start)
            self._numbers.append(lines.number)
            self._checksums.append(checksum_of(line, parsed))
        found = np.argsort(np.frombuffer(arrivals), kind="stable")
        order = array("q", found.astype(np.int64).tobytes())
        known = self.arrivals = LineArrivals()
        for index in order:
            known.add(arrivals[index], abs(counts[index]), is_turn=counts[index] < 0)
        return order


class PipeSource(Source):
    """A pipe: next() waits for the line that comes next, so the run is the same as for a file."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader
        self._arrivals, self._last_arrival = SessionArrivals(), 0.0

    def next(self) -> Line | None:
        """Return the next line; see Source."""
        reader = self._reader
        parsed = reader.read()
        if parsed is None:
            self.has_ended = True
            return None
        self.input_index += 1
        if isinstance(parsed, ParsedLine):
            arrival, last = self._arrivals.time_of(parsed.request), self._last_arrival
            if arrival < last:
                return arrival_goes_back(parsed, reader.line, reader.lines.number, last)
            self._last_arrival = arrival
        return parsed


class FollowSource(Source):
    """A pipe that a thread reads: next() gives what has come, and never waits for more.

    wake: called, by the thread, whenever more has come.
    """

    reason: ArriveReason = "follow"

    def __init__(self, reader: RequestReader, waiting: Waiting, wake: Callable[[], None]) -> None:
        import queue  # noqa: PLC0415 - only for --follow, as is the next
        import threading  # noqa: PLC0415 - as above

        self._waiting, self._wake = waiting, wake
        self._ahead: deque[Line | Exception | None] = deque()
        self._queue: queue.Queue[Line | Exception | None] = queue.Queue(_MAX_AHEAD)
        threading.Thread(target=self._read_all, args=(reader,), daemon=True).start()

    def next(self) -> Line | None:
        """Return the next line; see Source."""
        if not self._ahead:
            if self._queue.empty():
                return None
            self._ahead.append(self._queue.get())
        item = self._ahead.popleft()
        if isinstance(item, Line):
            self.input_index += 1
            return item
        if item is not None:
            raise item
        self.has_ended = True
        return None

    def wait(self) -> None:
        """Wait for a line, or for the end."""
        with self._waiting():
            self._ahead.append(self._queue.get())

    def _read_all(self, reader: RequestReader) -> None:
        """Put all lines into the queue, then None, or the exception that ended the reading."""
        item: Line | Exception | None
        try:
            while (item := reader.read()) is not None:
                self._queue.put(item)
                self._wake()
        except Exception as error:  # it is raised again where the others are: # noqa: BLE001
            item = error
        self._queue.put(item)
        self._wake()


def name_of(line: Line, input_index: int) -> str:
    """Return what a request will be called, the number of its place if it has no id."""
    found = line.request.id if isinstance(line, ParsedLine) else line.id
    return str(input_index + 1) if found is None else found


def open_source(
    requests: OpenInput,
    parser: RequestParser,
    report: ProblemReport,
    *,
    keep_going: bool,
    follow: bool,
    waiting: Waiting,
    wake: Callable[[], None],
) -> Source:
    """Return the source that suits the input; a file is surveyed, and its problems reported.

    wake: called, by another thread, when more of what is followed has come.

    Raises:
        InputError: the file cannot be read.
        InvalidInput: the file has bad lines, and they are not to be skipped.
    """
    if follow:
        return FollowSource(RequestReader(requests.lines(), parser), waiting, wake)
    if not requests.is_file:
        return PipeSource(RequestReader(requests.lines(waiting), parser))
    with waiting():
        reader, survey = RequestReader(requests.lines(), parser), Survey()
        while (line := reader.read()) is not None:
            survey.add(line, reader)
            if isinstance(line, BadLine):
                report.add(line)
        if survey.num_bad and not keep_going:
            what_now = "nothing decoded. --keep-going to skip them."
            raise InvalidInput(report, survey.num_lines, what_now)
        line_parser = LineParser(parser, reader.duplicates)
        if survey.is_in_order:
            return FileSource(requests.lines(), line_parser, survey)
        return IndexedSource(requests.seekable_lines(), line_parser)
