"""The lines of an input as the driver knows them: read, checked by workers, then given out.

Rule: the driver reads no request.  Workers tell it what lines are by themselves; what a line is
beside those before it (an id given twice, an arrival that goes back) is found out here.
"""

import queue
import threading
from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.formats.ids import IdRegistry
from batcher.formats.requests import BadLine, ParsedLine
from batcher.formats.results import decode_result_line, is_result
from batcher.request import Request

from ..earlier_results import EarlierResults
from ..intake import InputError, OpenInput
from ..problems import InvalidInput, ProblemReport, arrival_goes_back, id_given_before
from ..reading import Duplicates
from .messages import Checked, Line, Several

BATCH_LINES, BATCH_BYTES = 1024, 2**20
MAX_AHEAD = 4 * BATCH_LINES  # lines of a pipe that no worker has
_ONE = Several(1, 1)


class Batch(NamedTuple):
    """Lines that are checked together; number: of the batch, from 0."""

    number: int
    lines: list[Line]


class InputLines:
    """Lines on their way to workers, which are checked in batches and given out one by one.

    num_read: how many were checked.  num_bad: of them, those that are no requests.
    total: how many there are, if that is known.
    has_refused: a bad line has ended the reading.  broken: why it could not be read on.
    keep_going: bad lines are answered, and do not end the reading.
    """

    total: int | None = None

    def __init__(self, requests: OpenInput, report: ProblemReport, *, keep_going: bool) -> None:
        self.num_read = self.num_bad = 0
        self.has_refused = False
        self.broken: InputError | None = None
        self._requests, self._report, self._keep_going = requests, report, keep_going
        self._has_read_all = self._is_closed = False
        self._num_batches = self._num_taken = self._num_lines = 0
        self._early: dict[int, tuple[Batch, Checked]] = {}
        self._ids, self._last_arrival = IdRegistry(), 0.0

    @property
    def is_checked(self) -> bool:
        """Whether there is nothing left to be checked."""
        return self._has_read_all and self._num_taken == self._num_batches

    @property
    def num_to_answer(self) -> int | None:
        """How many there are that no earlier run has answered, if that is known."""
        return None

    @property
    def has_ended(self) -> bool:
        """Whether no more lines will be given out."""
        raise NotImplementedError

    def next_batch(self) -> Batch | None:
        """Return lines that are to be checked; None while there are none.

        Raises:
            InputError: the input is damaged or gone.
        """
        raise NotImplementedError

    def next_line(self) -> Line | None:
        """Return a line that is to be answered; None while there is none.

        Raises:
            InputError: the input is damaged or gone, or shorter than it was.
        """
        raise NotImplementedError

    def take(self, batch: Batch, checked: Checked) -> None:
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
        """Read no more, and give out no more."""
        self._is_closed = self._has_read_all = True

    def lacking(self, index: int, answer: bytes) -> bytes:  # noqa: ARG002 - see FileLines
        """Return what of the answer to a line is to be written."""
        return answer

    def _new_batch(self, found: list[tuple[int, bytes]]) -> Batch | None:
        """Return a batch of the lines that come next, each with its number; None if none do."""
        if not found:
            return None
        lines = [Line(index, *each) for index, each in enumerate(found, self._num_lines)]
        self._num_lines += len(lines)
        self._num_batches += 1
        return Batch(self._num_batches - 1, lines)

    def _look_at(self, batch: Batch, checked: Checked) -> None:
        """Find out what each line of a batch is beside those before it."""
        if checked.sessions:
            place, session = min(checked.sessions.items())
            raise BatchdecodeError(
                f"line {batch.lines[place].number} is a turn of session {session!r}: turns go on "
                "from one another in one engine, so run these requests without --workers"
            )
        add, ids, checksums, bad = self._ids.add, checked.ids, checked.checksums, checked.bad
        several, arrivals = checked.several, checked.arrivals
        for place, line in enumerate(batch.lines):
            if self._is_closed:
                return
            self.num_read += 1
            if place in bad:
                self._take_bad(line, BadLine(*bad[place]))
                continue
            first = add(ids[place], line.number)
            if first is not None:
                self._take_bad(*_with_id_of(line, ids[place], first))
                continue
            arrival = arrivals[place] if arrivals else 0.0
            if arrival < self._last_arrival:
                self._take_late(line, ids[place], arrival)
            else:
                self._last_arrival = arrival
                known = Line(line.index, line.number, line.text, checksums[place])
                self._keep(known, ids[place], several.get(place, _ONE))

    def _take_bad(self, line: Line, bad: BadLine) -> None:
        """Take in a line that is no request."""
        if not line.index and is_result(line.text):
            raise InputError(
                f"{self._requests.name} holds the results of a run, and no requests: "
                "give the requests that the run has read"
            )
        self.num_bad += 1
        self._report.add(bad)
        self._keep(line, bad.id, None)

    def _take_late(self, line: Line, request_id: str, arrival: float) -> None:
        """Take in a request that arrives before the one before it."""
        raise NotImplementedError

    def _keep(self, line: Line, request_id: str, several: Several | None) -> None:
        """Take in a line that is known; several: None of a bad one."""
        raise NotImplementedError


class FileLines(InputLines):
    """Those of a file, which is checked whole before a line is given out.

    earlier: the results that are there.  Of a line 5 bytes are held in memory.
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
        self._is_answered = bytearray()
        self._found: dict[int, set[int]] = {}
        self._num_given = 0

    @property
    def num_to_answer(self) -> int | None:
        """How many there are that no earlier run has answered, if that is known."""
        return None if self.total is None else self.total - sum(self._is_answered)

    @property
    def has_ended(self) -> bool:
        """Whether no more lines will be given out."""
        return self._is_closed or (self.total is not None and self._num_given == self.total)

    def next_batch(self) -> Batch | None:
        """Return lines that are to be checked; see InputLines."""
        found: list[tuple[int, bytes]] = []
        num_bytes, reader = 0, self._reader
        while not self._has_read_all and len(found) < BATCH_LINES and num_bytes < BATCH_BYTES:
            text = reader.read()
            if text is None:
                self._has_read_all = True
            else:
                found.append((reader.number, text))
                num_bytes += len(text)
        return self._new_batch(found)

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

    def next_line(self) -> Line | None:
        """Return a line that is to be answered; see InputLines."""
        while not self.has_ended:
            index, text = self._num_given, self._reader.read()
            if text is None:
                raise InputError("the input has become shorter while it was read")
            self._num_given += 1
            if not self._is_answered[index]:
                checksum = self._checksums[index]
                first = 0 if checksum else self._duplicates.first_number(index) or 0
                return Line(index, self._reader.number, text, checksum, first)
        return None

    def lacking(self, index: int, answer: bytes) -> bytes:
        """Return what of the answer to a line is to be written; see InputLines."""
        found = self._found.pop(index, None)
        if found is None:
            return answer
        lines = answer.splitlines(keepends=True)
        left = [line for line in lines if decode_result_line(line)[0].index not in found]
        return b"".join(left[: len(lines) - len(found)])

    def _take_late(self, line: Line, request_id: str, arrival: float) -> None:  # noqa: ARG002 - see InputLines
        raise BatchdecodeError(
            f"line {line.number}: arrival_time goes back from {self._last_arrival:g} to "
            f"{arrival:g}: workers are given lines as they stand, so sort them by arrival_time, "
            "or run them without --workers"
        )

    def _keep(self, line: Line, request_id: str, several: Several | None) -> None:
        self._checksums.append(line.checksum)
        if line.first_number:
            self._duplicates.add(line.index, line.first_number)
        is_answered, earlier = False, self._earlier
        if earlier is not None and several is None:
            is_answered = earlier.has_rejected(request_id, line.number)
        elif earlier is not None and several is not None:
            found = set(earlier.find(request_id, several.num_outputs))
            is_answered = len(found) >= several.num_results
            if found and not is_answered:
                self._found[line.index] = found
        self._is_answered.append(is_answered)


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
        self._wake = wake
        self._read: queue.Queue[tuple[int, bytes] | Exception | None] = queue.Queue(BATCH_LINES)
        self._ready: deque[Line] = deque()
        threading.Thread(target=self._read_all, daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether no more lines will be given out."""
        return not self._ready and (self._is_closed or self.is_checked)

    def next_batch(self) -> Batch | None:
        """Return lines that are to be checked; see InputLines."""
        found: list[tuple[int, bytes]] = []
        num_bytes, num_ahead = 0, self._num_lines - self.num_read + len(self._ready)
        while not self._has_read_all and num_ahead + len(found) < MAX_AHEAD:
            if len(found) == BATCH_LINES or num_bytes >= BATCH_BYTES or self._read.empty():
                break
            item = self._read.get()
            if isinstance(item, tuple):
                found.append(item)
                num_bytes += len(item[1])
            else:
                self._end_reading(item)
        return self._new_batch(found)

    def next_line(self) -> Line | None:
        """Return a line that is to be answered; see InputLines."""
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Read no more, and give out no more."""
        super().close()
        self._ready.clear()

    def _end_reading(self, error: Exception | None) -> None:
        """Read no more: the pipe is at its end, or broken."""
        self._has_read_all = True
        if error is None:
            return
        if not isinstance(error, InputError) or not self._num_lines:
            raise error
        self.broken = error

    def _take_late(self, line: Line, request_id: str, arrival: float) -> None:
        request = Request(id=request_id, prompt="", arrival_time=arrival)
        last, text = self._last_arrival, line.text
        bad = arrival_goes_back(ParsedLine(request), text, line.number, last)
        self._take_bad(replace(line, last_arrival=last), bad)

    def _keep(self, line: Line, request_id: str, several: Several | None) -> None:  # noqa: ARG002 - see InputLines
        if several is not None or self._keep_going:
            self._ready.append(line)
        else:
            self.has_refused = self._is_closed = self._has_read_all = True

    def _read_all(self) -> None:
        """Put all lines into the queue, then None, or the exception that ended the reading."""
        item: tuple[int, bytes] | Exception | None
        lines = self._requests.lines()
        try:
            while (text := lines.read()) is not None:
                self._read.put((lines.number, text))
                self._wake()
            item = None
        except Exception as error:  # it is raised again where the others are: # noqa: BLE001
            item = error
        self._read.put(item)
        self._wake()


def _with_id_of(line: Line, request_id: str, first_number: int) -> tuple[Line, BadLine]:
    """Return a line whose id the line `first_number` has already, and what is wrong with it."""
    parsed = ParsedLine(Request(id=request_id, prompt=""))
    bad = id_given_before(parsed, line.text, line.number, first_number)
    return replace(line, first_number=first_number), bad
