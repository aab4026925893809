"""The results that an earlier run has left in a file: read back, and looked up where they are.

Of each result only where it stands is held in memory.  Rule: what is found by a hash is only a
candidate; whoever asks reads it and compares.
"""

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from batcher.errors import RUN_ERROR_CODES, BatchdecodeError
from batcher.request import Request
from batcher.requests.results import decode_result_line
from batcher.result import Result

from .output import ResumeError
from .sums import SUM_BYTES, sums_of, sums_path

REPAIR = "--resume=repair drops such lines, and decodes again what they were for"


class ResultLine(NamedTuple):
    """A line, and the results in it."""

    line: bytes
    results: list[Result]

    @property
    def id(self) -> str:
        """The id of the request that it answers."""
        return self.results[0].id

    @property
    def has_failed(self) -> bool:
        """Whether one of its results failed in the run; a bad line stays one."""
        return any(
            result.error is not None and result.error.code in RUN_ERROR_CODES
            for result in self.results
        )


class ResultLines:
    """Reads lines up to the first that is torn.

    num_slots: of the batch.  was_written: tells whether a run has written a line.
    is_repairing: what no run has written is left out, not refused.
    """

    def __init__(
        self, num_slots: int, was_written: Callable[[bytes], bool], *, is_repairing: bool = False
    ) -> None:
        self._num_slots, self._was_written = num_slots, was_written
        self._is_repairing = is_repairing

    def read(self, file: BinaryIO) -> Iterator[ResultLine]:
        """Yield each line, from the first one on.

        Raises:
            ResumeError: one is no result of the run.
        """
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                results = self._results_in(line)
            except (BatchdecodeError, RecursionError) as error:
                if self._is_repairing:
                    continue
                raise ResumeError(f"line {number}: {error}; {REPAIR}") from error
            yield ResultLine(line, results)

    def _results_in(self, line: bytes) -> list[Result]:
        """Return the results of `line`.

        Raises:
            BatchdecodeError: it is not what a run wrote.
        """
        if line.isspace():
            raise ResumeError("it is blank")
        results = decode_result_line(line)
        for result in results:
            self._check(result)
        if not self._was_written(line):
            raise ResumeError(
                f"the result of {results[0].id!r} is not what the run has written: "
                "it was changed, or put there"
            )
        return results

    def _check(self, result: Result) -> None:
        """Make sure that `result` can be one of this run.

        Raises:
            ResumeError: it cannot.
        """
        slot, admitted, finished = result.slot, result.steps.admitted, result.steps.finished
        if slot is None and admitted is None:
            return
        if slot is None or admitted is None or finished is None:
            raise ResumeError("some of slot, admitted and finished are null")
        if not 0 <= slot < self._num_slots:
            raise ResumeError(f"slot {slot}, but there are {self._num_slots}")
        if not 0 <= admitted <= finished:
            raise ResumeError(f"it cannot have held a slot from step {admitted} to {finished}")


def written_lines(output: str, name: str) -> Callable[[bytes], bool]:
    """Return a function that tells whether runs have written a line to `output`.

    name: as messages call that.

    Raises:
        ResumeError: there are no sums of its lines.
    """
    import numpy as np  # noqa: PLC0415 - only to resume a run

    path = sums_path(output)
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise ResumeError(
            f"cannot resume {name}: {sums_path(name)} is missing, so nothing says which lines the "
            f"run has written. To go on, put it back; to keep {name}, give it another name. "
            "--force starts over."
        ) from None
    data = data[: len(data) - len(data) % SUM_BYTES]
    sums = array("q", np.sort(np.frombuffer(data, np.int64)).tobytes())

    def was_written(line: bytes) -> bool:
        wanted = int.from_bytes(sums_of([line]), sys.byteorder, signed=True)
        place = bisect_left(sums, wanted)
        return place < len(sums) and sums[place] == wanted

    return was_written


class ResultIndex:
    """Offsets of lines by the id of a request and a number: 16 bytes each, once they are sorted."""

    def __init__(self) -> None:
        self._hashes, self._starts = array("q"), array("q")

    def add(self, request_id: str, number: int, start: int) -> None:
        """Take note that what has this id and number is in the line that begins at `start`."""
        self._hashes.append(hash((request_id, number)))
        self._starts.append(start)

    def sort(self) -> None:
        """Make everything that was added ready to be found."""
        import numpy as np  # noqa: PLC0415 - only to resume a run

        hashes = np.frombuffer(self._hashes, np.int64)
        order = np.argsort(hashes)
        self._hashes = array("q", hashes[order].tobytes())
        self._starts = array("q", np.frombuffer(self._starts, np.int64)[order].tobytes())

    def find(self, request_id: str, number: int) -> Iterator[int]:
        """Yield the offsets at which it may be: nearly always one, if it is there."""
        return self._starts_of(hash((request_id, number)))

    def alike(self) -> Iterator[list[int]]:
        """Yield the offsets of two or more that `find` does not tell apart, and so for others."""
        import numpy as np  # noqa: PLC0415 - as above

        hashes = np.frombuffer(self._hashes, np.int64)
        for wanted in np.unique(hashes[1:][hashes[1:] == hashes[:-1]]).tolist():
            yield list(self._starts_of(wanted))

    def _starts_of(self, wanted: int) -> Iterator[int]:
        """Yield the offsets of those that have the hash `wanted`."""
        place = bisect_left(self._hashes, wanted)
        while place < len(self._hashes) and self._hashes[place] == wanted:
            yield self._starts[place]
            place += 1


class EarlierResults:
    """The results of an earlier run, in `lines`, which others may put elsewhere as they are.

    end: the offset behind the last line that is known.  num_complete: if they are in the order of
    the input, how many of its lines have all their results, from the first one on.
    num_results, num_answered: once finished, how many there are, and of how many lines of it.
    """

    def __init__(self, lines: BinaryIO) -> None:
        self.end = self.num_complete = self.num_results = self.num_answered = 0
        self._answered = array("q")
        self.lines = lines
        self._index = ResultIndex()
        self._kept: list[tuple[int, int, int]] = []

    def close(self) -> None:
        """Close the file; there is nothing to get any more."""
        self.lines.close()

    def add(self, found: ResultLine) -> None:
        """Take note of the line that stands at `end`."""
        for result in found.results:
            number = number_of(result)
            self._index.add(result.id, number, self.end)
            self._answered.append(hash((result.id, min(number, 0))))
        self.end += len(found.line)

    def keep(self, input_index: int, start: int) -> None:
        """Take note that what stands from `start` to `end` answers the line of the input there.

        It follows a gap, so its turn comes when that is closed.
        """
        self._kept.append((input_index, start, self.end))

    def kept(self) -> Iterator[tuple[int, bytes]]:
        """Yield what is kept for its turn: its input index, and its lines."""
        for input_index, start, end in self._kept:
            self.lines.seek(start)
            yield input_index, self.lines.read(end - start)

    def finish(self) -> None:
        """Make what was added ready to be found.

        Raises:
            ResumeError: two results are the same one.
        """
        import numpy as np  # noqa: PLC0415 - only to resume a run

        self.num_results = len(self._answered)
        self.num_answered = np.unique(np.frombuffer(self._answered, np.int64)).size
        del self._answered
        self._index.sort()
        for starts in self._index.alike():
            seen = set()
            for start in sorted(set(starts)):
                for result in self._read(start):
                    key = result.id, number_of(result)
                    if key in seen:
                        self.lines.seek(0)
                        number = self.lines.read(start).count(b"\n") + 1
                        raise ResumeError(
                            f"line {number}: it is one of two results {result.index} "
                            f"of request {result.id!r}; {REPAIR}"
                        )
                    seen.add(key)

    def results_of(self, request: Request, /) -> dict[int, Result]:
        """Return the results that `request` has in the file, by their index."""
        request_id: str = request.id  # type: ignore[assignment]  # its parser has set it
        return self.find(request_id, max(request.n, request.best_of or 0))

    def find(self, request_id: str, num_outputs: int) -> dict[int, Result]:
        """Return the results, by their index, of a request that has so many outputs."""
        found = {}
        for index in range(num_outputs):
            result = self._get(request_id, index)
            if result is not None:
                found[index] = result
        return found

    def check_replay(self, request: Request, replayed: Mapping[int, Result], /) -> None:
        """Make sure that `replayed`, results of `request`, can be.

        Raises:
            ResumeError: one took more steps than it can have taken.
        """
        for result in replayed.values():
            admitted, finished = result.steps.admitted, result.steps.finished
            if admitted is None or finished is None:
                continue
            num_steps = finished - admitted + 1
            if num_steps > request.output_limit:
                raise ResumeError(
                    f"cannot resume: result {result.index} of request {result.id!r} took "
                    f"{num_steps} steps, but max_tokens is {request.output_limit}"
                )

    def has_rejected(self, request_id: str, line_number: int, /) -> bool:
        """Return whether the file has the result of a bad line: the id it gave and its number."""
        return self._get(request_id, -line_number) is not None

    def _get(self, request_id: str, number: int) -> Result | None:
        for start in self._index.find(request_id, number):
            for result in self._read(start):
                if result.id == request_id and number_of(result) == number:
                    return result
        return None

    def _read(self, start: int) -> list[Result]:
        self.lines.seek(start)
        return decode_result_line(self.lines.readline())


def number_of(result: Result) -> int:
    """Return what tells `result` from others with its id: its index or, below 0, its bad line.

    An id given twice is that of a request and of the bad lines that have it, too.
    """
    line = result.error.line if result.error is not None else None
    return result.index if line is None else -line
