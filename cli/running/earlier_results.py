"""The results that an earlier run has left in a file: found, mended and looked up where they are.

Of each result only where it stands is held in memory.
"""

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from batcher.errors import BatchdecodeError
from batcher.formats.requests import ParsedLine
from batcher.formats.results import decode_result_line
from batcher.request import Request, Result
from cli.running.output import OutputError, open_sink
from cli.running.result_index import ResultIndex

_CHUNK_BYTES = 2**20


class ResumeError(BatchdecodeError):
    """What is there cannot be continued."""


class Expected(NamedTuple):
    """A line of the input: its number, and the request it holds, None if it holds none."""

    number: int
    parsed: ParsedLine | None


class EarlierResults:
    """The results of an earlier run, left in their file and looked up there.

    end: the offset behind the last line that is kept.  num_complete: if they are in the order of
    the input, how many of its lines have all their results.
    """

    def __init__(self, lines: BinaryIO, num_slots: int) -> None:
        self.end = self.num_complete = 0
        self._lines, self._num_slots = lines, num_slots
        self._index = ResultIndex()

    def close(self) -> None:
        """Close the file; there is nothing to get any more."""
        self._lines.close()

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

    def scan(self) -> None:
        """Find every whole line.

        Raises:
            ResumeError: a line is not a result, or has one that another line has.
        """
        for line, results in self._whole_lines():
            self._keep(line, results)
        self._finish_scan()

    def scan_in_order(self, expected: Iterable[Expected]) -> None:
        """Find the lines that answer `expected` one after the other, up to the first gap.

        Raises:
            ResumeError: a line is not a result, or has one that another line has.
        """
        lines = self._whole_lines()
        for wanted in expected:
            group = list(islice(lines, 1))
            group += islice(lines, _num_more_lines(group[0][1], wanted)) if group else ()
            if not _is_answered(wanted, group):
                break
            for line, results in group:
                self._keep(line, results)
            self.num_complete += 1
        self._finish_scan()

    def _whole_lines(self) -> Iterator[tuple[bytes, list[Result]]]:
        """Yield each line that is whole, and the results in it."""
        self._lines.seek(0)
        for number, line in enumerate(self._lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                results = decode_result_line(line)
                for result in results:
                    self._check(result)
            except (BatchdecodeError, RecursionError) as error:
                raise ResumeError(f"line {number}: {error}") from error
            yield line, results

    def _keep(self, line: bytes, results: list[Result]) -> None:
        for result in results:
            self._index.add(result.id, _number_of(result), self.end)
        self.end += len(line)

    def _finish_scan(self) -> None:
        """Sort what was found.

        Raises:
            ResumeError: two results are the same one.
        """
        self._index.sort()
        for starts in self._index.alike():
            seen = set()
            for start in dict.fromkeys(starts):
                for result in self._read(start):
                    key = result.id, _number_of(result)
                    if key in seen:
                        raise ResumeError(f"two results {result.index} of request {result.id!r}")
                    seen.add(key)

    def _get(self, request_id: str, number: int) -> Result | None:
        for start in self._index.find(request_id, number):
            for result in self._read(start):
                if result.id == request_id and _number_of(result) == number:
                    return result
        return None

    def _read(self, start: int) -> list[Result]:
        self._lines.seek(start)
        return decode_result_line(self._lines.readline())

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


def _number_of(result: Result) -> int:
    """Return what tells `result` from others with its id: its index or, below 0, its bad line.

    An id given twice is that of a request and of the bad lines that have it, too.
    """
    line = result.error.line if result.error is not None else None
    return result.index if line is None else -line


def _num_more_lines(results: list[Result], wanted: Expected) -> int:
    """Return how many lines of the answer to `wanted` come after the first, which has `results`."""
    parsed = wanted.parsed
    if parsed is None or parsed.form != "result" or _number_of(results[0]) < 0:
        return 0
    return parsed.request.n - 1


def _is_answered(wanted: Expected, group: list[tuple[bytes, list[Result]]]) -> bool:
    """Return whether the lines of `group` are all of the answer to `wanted`."""
    results = [result for _, results in group for result in results]
    if not results:
        return False
    if _number_of(results[0]) == -wanted.number:
        return True
    if wanted.parsed is None or len(results) < wanted.parsed.request.n:
        return False
    request_id = wanted.parsed.request.id
    return all(result.id == request_id and _number_of(result) >= 0 for result in results)


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


def take_over(
    output: str, *, num_slots: int, expected: Iterable[Expected] | None = None
) -> EarlierResults:
    """Return the results in the file `output` and repair its end, so that it can be appended to.

    num_slots: of the batch.  expected: the lines of the input, if the results are in their order.

    Raises:
        ResumeError: the file holds something else.
        OutputError: it cannot be repaired.
    """
    try:
        with ExitStack() as on_failure:
            is_whole, lines = _open(output)
            earlier = on_failure.enter_context(closing(EarlierResults(lines, num_slots)))
            if expected is None:
                earlier.scan()
            else:
                earlier.scan_in_order(expected)
            is_whole &= earlier.end == lines.seek(0, os.SEEK_END)
            lines.truncate(earlier.end)
            if output.endswith(".gz") and not is_whole:
                _pack(lines, output)
            on_failure.pop_all()
    except ResumeError as error:
        raise ResumeError(f"cannot resume {output}: {error}") from error
    except OSError as error:
        raise OutputError(f"cannot continue {output}: {error.strerror}") from error
    return earlier


def _open(output: str) -> tuple[bool, BinaryIO]:
    """Return whether `output` can be read to its end, and what can be read of it, unpacked."""
    if not output.endswith(".gz"):
        return True, Path(output).open("r+b")
    import tempfile  # noqa: PLC0415 - only to resume a .gz file

    lines = tempfile.TemporaryFile()  # noqa: SIM115 - read from as long as the run goes on
    with Path(output).open("rb") as packed:
        return _unpack(packed, lines), lines


def _unpack(packed: BinaryIO, lines: BinaryIO) -> bool:
    """Write to `lines` what `packed` holds before any damage; return whether there is none."""
    decompressor = zlib.decompressobj(wbits=31)
    is_whole = True
    while chunk := packed.read(_CHUNK_BYTES):
        while chunk:
            if decompressor.eof:  # a run that was resumed has left more than one stream
                decompressor = zlib.decompressobj(wbits=31)
            try:
                lines.write(decompressor.decompress(chunk))
            except zlib.error:
                return False
            chunk = decompressor.unused_data
        is_whole = decompressor.eof
    return is_whole


def _pack(lines: BinaryIO, output: str) -> None:
    """Replace the .gz file `output` by one that holds `lines`, at once."""
    lines.seek(0)
    sink = open_sink(f"{output}.new.gz")
    while chunk := lines.read(_CHUNK_BYTES):
        sink.write(chunk)
    sink.close()
    Path(f"{output}.new.gz").replace(output)
