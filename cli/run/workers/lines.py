"""The lines of an input as the driver knows them: read, checked by workers, then given out.

Rule: the driver reads no request.  Workers tell it what lines are by themselves; what a line is
beside those before it (an id given twice, an arrival that goes back) is found out here.
"""

import queue
import threading
from array import array
from collections.abc import Callable
from itertools import starmap
from operator import lt
from typing import NamedTuple

from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.request import Request
from batcher.requests.ids import IdRegistry
from batcher.requests.lines import BadLine, ParsedLine
from batcher.requests.results import decode_result_line

from ..earlier_results import EarlierResults
from ..intake import Block, InputError, OpenInput
from ..problems import InvalidInput, ProblemReport, arrival_goes_back, id_given_before
from ..reading import Duplicates, check_kind
from ..sources import LineArrivals
from .messages import Checked, Line, Lines, Remark, Several

BATCH_LINES = 1024
MAX_AHEAD = 4 * BATCH_LINES  # lines of a pipe that no worker has
_ONE = Several(1, 1)


class LineBatch(NamedTuple):
    """Lines that are checked together, from the index `first` on; number: of the batch, from 0."""

    number: int
    first: int
    lines: Block


class InputLines:
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
        self._early: dict[int, tuple[LineBatch, Checked]] = {}
        self._ids, self._last_arrival = IdRegistry(), 0.0
        self.arrivals = LineArrivals()

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

    def next_batch(self) -> LineBatch | None:
        """Return lines that are to be checked; None while there are none.

        Raises:
            InputError: the input is damaged or gone.
        """
        raise NotImplementedError

    def next_lines(self, most: int) -> Lines:
        """Return lines that are to be answered, up to so many; less while there are no more.

        Raises:
            InputError: the input is damaged or gone, or shorter than it was.
        """
        raise NotImplementedError

    def take(self, batch: LineBatch, checked: Checked) -> None:
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

    def _new_batch(self, lines: Block) -> LineBatch:
        """Return a batch of the lines that come next."""
        batch = LineBatch(self._num_batches, self._num_lines, lines)
        self._num_lines += len(lines.texts)
        self._num_batches += 1
        return batch

    def _look_at(self, batch: LineBatch, checked: Checked) -> None:
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
        lines = Lines(list(indexes), list(numbers), texts, checked.checksums)
        times = checked.arrivals or [0.0]
        is_late = times[0] < self._last_arrival or any(map(lt, times[1:], times))
        if not (checked.bad or is_late) and self._ids.add_new(checked.ids, numbers):
            self.num_read += len(lines)
            self._last_arrival = times[-1]
            for time in checked.arrivals:
                self.arrivals.add(time, 1)
            if not checked.arrivals:
                self.arrivals.add(0.0, len(lines))
            self._keep(lines, checked.ids, checked.several)
        else:
            self._look_at_each(lines, checked)

    def _look_at_each(self, lines: Lines, checked: Checked) -> None:
        """Find out what each of these lines is beside those before it."""
        add, ids, bad = self._ids.add, checked.ids, checked.bad
        several, arrivals = checked.several, checked.arrivals
        for place, line in enumerate(starmap(Line, lines.rows())):
            if self._is_closed:
                return
            self.num_read += 1
            if place in bad:
                self._take_bad(line, BadLine(*bad[place]))
                continue
            first = add(ids[place], line.number)
            if first is not None:
                parsed = ParsedLine(Request(id=ids[place], prompt=""))
                twice = id_given_before(parsed, line.text, line.number, first)
                self._take_bad(line, twice, Remark(first))
                continue
            arrival = arrivals[place] if arrivals else 0.0
            if arrival < self._last_arrival:
                self._take_late(line, ids[place], arrival)
            else:
                self._last_arrival = arrival
                self.arrivals.add(arrival, 1)
                known = Lines()
                known.append(line)
                self._keep(known, [ids[place]], {0: several.get(place, _ONE)})

    def _take_bad(self, line: Line, bad: BadLine, remark: Remark | None = None) -> None:
        """Take in a line that is no request."""
        if not line.index:
            check_kind(line.text, self._requests.name)
        self.num_bad += 1
        self._report.add(bad)
        self._keep_bad(replace(line, checksum=0), bad.id, remark)

    def _take_late(self, line: Line, request_id: str, arrival: float) -> None:
        """Take in a request that arrives before the one before it."""
        raise NotImplementedError

    def _keep(self, lines: Lines, ids: list[str], several: dict[int, Several]) -> None:
        """Take in requests with these ids; several: see Checked."""
        raise NotImplementedError

    def _keep_bad(self, line: Line, request_id: str, remark: Remark | None) -> None:
        """Take in a line that is no request, or not one beside others."""
        raise NotImplementedError


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
        self._num_read_again, self._ahead = 0, Lines()

    @property
    def num_to_answer(self) -> int | None:
        """How many there are that no earlier run has answered, if that is known."""
        return None if self.total is None else self.total - sum(self._is_answered)

    @property
    def has_ended(self) -> bool:
        """Whether no more lines will be given out."""
        return self._is_closed or (self._num_read_again == self.total and not self._ahead)

    def next_batch(self) -> LineBatch | None:
        """Return lines that are to be checked; see InputLines."""
        if self._has_read_all:
            return None
        lines = self._reader.read_block(BATCH_LINES)
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

    def next_lines(self, most: int) -> Lines:
        """Return lines that are to be answered; see InputLines."""
        found = self._ahead.take(most)
        while len(found) < most and not self.has_ended:
            self._read_again()
            found.extend(self._ahead.take(most - len(found)))
        return found

    def close(self) -> None:
        """Read no more, and give out no more."""
        super().close()
        self._ahead = Lines()

    def _read_again(self) -> None:
        """Read the lines that come next, without those that are answered.

        Raises:
            InputError: there are none, where some were when they were checked.
        """
        first = self._num_read_again
        numbers, texts = self._reader.read_block(BATCH_LINES)
        if not texts:
            raise InputError("the input has become shorter while it was read")
        checksums = self._checksums[first : first + len(texts)].tolist()
        count = len(checksums)  # what was added since then is left out
        indexes = range(first, first + count)
        self._num_read_again = indexes.stop
        lines = Lines(list(indexes), list(numbers[:count]), texts[:count], checksums)
        if 0 not in checksums and not self._is_answered:
            self._ahead = lines
            return
        for line in starmap(Line, lines.rows()):
            if not (self._is_answered and self._is_answered[line.index]):
                number = None if line.checksum else self._duplicates.first_number(line.index)
                self._ahead.append(line, None if number is None else Remark(number))

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

    def _keep(self, lines: Lines, ids: list[str], several: dict[int, Several]) -> None:
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

    def _keep_bad(self, line: Line, request_id: str, remark: Remark | None) -> None:
        self._checksums.append(0)
        if remark is not None:
            self._duplicates.add(line.index, remark.first_number)
        if self._earlier is not None:
            self._is_answered.append(self._earlier.has_rejected(request_id, line.number))


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
        self._read: queue.Queue[Block | Exception | None] = queue.Queue(1)
        self._ready = Lines()
        threading.Thread(target=self._read_all, daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether no more lines will be given out."""
        return not self._ready and (self._is_closed or self.is_checked)

    def next_batch(self) -> LineBatch | None:
        """Return lines that are to be checked; see InputLines."""
        num_ahead = self._num_lines - self.num_read + len(self._ready)
        is_full = num_ahead > MAX_AHEAD - BATCH_LINES
        if self._has_read_all or is_full or self._read.empty():
            return None
        item = self._read.get()
        if isinstance(item, Block):
            return self._new_batch(item)
        self._has_read_all = True  # or as much of it as can be
        if item is not None:
            if not isinstance(item, InputError) or not self._num_lines:
                raise item
            self.broken = item
        return None

    def next_lines(self, most: int) -> Lines:
        """Return lines that are to be answered; see InputLines."""
        return self._ready.take(most)

    def close(self) -> None:
        """Read no more, and give out no more."""
        super().close()
        self._ready = Lines()

    def _take_late(self, line: Line, request_id: str, arrival: float) -> None:
        request = Request(id=request_id, prompt="", arrival_time=arrival)
        last, text = self._last_arrival, line.text
        bad = arrival_goes_back(ParsedLine(request), text, line.number, last)
        self._take_bad(line, bad, Remark(last_arrival=last))

    def _keep(self, lines: Lines, ids: list[str], several: dict[int, Several]) -> None:  # noqa: ARG002 - see InputLines
        self._ready.extend(lines)

    def _keep_bad(self, line: Line, request_id: str, remark: Remark | None) -> None:  # noqa: ARG002 - see InputLines
        if self._keep_going:
            self._ready.append(line, remark)
        else:
            self.has_refused = self._is_closed = self._has_read_all = True

    def _read_all(self) -> None:
        """Put all lines into the queue, then None, or the exception that ended the reading."""
        item: Block | Exception | None
        lines = self._requests.lines()
        try:
            while (block := lines.read_block(BATCH_LINES)).texts:
                self._read.put(block)
                self._wake()
            item = None
        except Exception as error:  # it is raised again where the others are: # noqa: BLE001
            item = error
        self._read.put(item)
        self._wake()
