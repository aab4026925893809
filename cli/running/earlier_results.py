"""The results that an earlier run has left in a file, looked up where they are.

Of each result only where it stands is held in memory.
"""

from collections.abc import Iterator, Mapping
from typing import BinaryIO

from batcher.formats.results import decode_result_line
from batcher.request import Request
from batcher.result import Result

from .output import ResumeError
from .result_index import ResultIndex
from .result_lines import REPAIR, ResultLine


class EarlierResults:
    """The results of an earlier run, in `lines`.

    end: the offset behind the last line that is known.  num_complete: if they are in the order of
    the input, how many of its lines have all their results, from the first one on.
    """

    def __init__(self, lines: BinaryIO) -> None:
        self.end = self.num_complete = 0
        self._lines = lines
        self._index = ResultIndex()
        self._held: list[tuple[int, int, int]] = []

    def close(self) -> None:
        """Close the file; there is nothing to get any more."""
        self._lines.close()

    def move_to(self, lines: BinaryIO) -> None:
        """Read what is known from here on from `lines`, which have it at the same places."""
        self._lines = lines

    def reads(self, lines: BinaryIO) -> bool:
        """Return whether that is where it is read from."""
        return self._lines is lines

    def add(self, known: ResultLine) -> None:
        """Take note of the line that stands at `end`."""
        for result in known.results:
            self._index.add(result.id, number_of(result), self.end)
        self.end += len(known.line)

    def hold(self, place: int, start: int) -> None:
        """Take note that what stands from `start` to `end` answers the line of the input there.

        It follows a gap, so its turn comes when that is closed.
        """
        self._held.append((place, start, self.end))

    def held(self) -> Iterator[tuple[int, bytes]]:
        """Yield what is held: its place in the input, and its lines."""
        for place, start, end in self._held:
            self._lines.seek(start)
            yield place, self._lines.read(end - start)

    def finish(self) -> None:
        """Make what was added ready to be found.

        Raises:
            ResumeError: two results are the same one.
        """
        self._index.sort()
        for starts in self._index.alike():
            seen = set()
            for start in sorted(set(starts)):
                for result in self._read(start):
                    key = result.id, number_of(result)
                    if key in seen:
                        self._lines.seek(0)
                        number = self._lines.read(start).count(b"\n") + 1
                        raise ResumeError(
                            f"line {number}: it is one of two results {result.index} "
                            f"of request {result.id!r}; {REPAIR}"
                        )
                    seen.add(key)

    def results_of(self, request: Request, /) -> dict[int, Result]:
        """Return the results that `request` has in the file, by their index."""
        request_id: str = request.id  # type: ignore[assignment]  # its parser has set it
        found = {}
        for index in range(max(request.n, request.best_of or 0)):
            result = self._get(request_id, index)
            if result is not None:
                found[index] = result
        return found

    def check_replay(self, request: Request, known: Mapping[int, Result], /) -> None:
        """Make sure that `known` results of `request` can be replayed.

        Raises:
            ResumeError: one took more steps than it can have taken.
        """
        for result in known.values():
            _check_duration(result, request.max_tokens)

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
        self._lines.seek(start)
        return decode_result_line(self._lines.readline())


def number_of(result: Result) -> int:
    """Return what tells `result` from others with its id: its index or, below 0, its bad line.

    An id given twice is that of a request and of the bad lines that have it, too.
    """
    line = result.error.line if result.error is not None else None
    return result.index if line is None else -line


def _check_duration(result: Result, max_tokens: int) -> None:
    """Make sure that `result` held its slot no longer than `max_tokens` allows.

    Raises:
        ResumeError: it did.
    """
    admitted, finished = result.steps.admitted, result.steps.finished
    if admitted is None or finished is None:
        return
    num_steps = finished - admitted + 1
    if num_steps > max_tokens:
        raise ResumeError(
            f"cannot resume: result {result.index} of request {result.id!r} took {num_steps} "
            f"steps, but max_tokens is {max_tokens}"
        )
