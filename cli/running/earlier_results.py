"""The results that an earlier run has left in a file: found, mended and looked up where they are.

Of each result only its place is held in memory.
"""

import os
import zlib
from array import array
from contextlib import ExitStack, closing
from pathlib import Path
from typing import BinaryIO

from batcher.errors import BatchdecodeError
from batcher.formats.results import decode_result_line
from batcher.request import Result
from cli.running.output import OutputError, open_sink

_CHUNK_BYTES = 2**20


class ResumeError(BatchdecodeError):
    """What is there cannot be continued."""


class EarlierResults:
    """The results of an earlier run, left in their file and looked up there by index.

    end: the offset behind the last line that is kept.  num_kept: how many there are.
    """

    def __init__(self, lines: BinaryIO, num_lines: int, num_slots: int) -> None:
        self.end = self.num_kept = 0
        self._lines, self._num_slots = lines, num_slots
        self._starts = array("q", [-1]) * num_lines

    def close(self) -> None:
        """Close the file; there is nothing to get any more."""
        self._lines.close()

    def get(self, index: int, /) -> Result | None:
        """Return the result of the line with this index, None if it has none yet."""
        start = self._starts[index]
        if start < 0:
            return None
        self._lines.seek(start)
        return decode_result_line(self._lines.readline())

    def scan(self, name: str, *, keep_order: bool) -> None:
        """Find every whole line; with `keep_order` only up to the first gap in the indexes.

        Raises:
            ResumeError: a line is not a result.
        """
        self._lines.seek(0)
        for number, line in enumerate(self._lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                result = decode_result_line(line)
                self._check(result)
            except (BatchdecodeError, RecursionError) as error:
                raise ResumeError(f"cannot resume {name}: line {number}: {error}") from error
            if keep_order and result.index != self.num_kept:
                return
            self._starts[result.index] = self.end
            self.num_kept += 1
            self.end += len(line)

    def _check(self, result: Result) -> None:
        """Make sure that `result` can be one of this run.

        Raises:
            ResumeError: it cannot.
        """
        if not 0 <= result.index < len(self._starts):
            raise ResumeError(f"index {result.index}, but the input has {len(self._starts)} lines")
        if self._starts[result.index] >= 0:
            raise ResumeError(f"a second result with the index {result.index}")
        slot, admitted, finished = result.slot, result.steps.admitted, result.steps.finished
        if slot is None and admitted is None:
            return
        if slot is None or admitted is None or finished is None:
            raise ResumeError("some of slot, admitted and finished are null")
        if not 0 <= slot < self._num_slots:
            raise ResumeError(f"slot {slot}, but there are {self._num_slots}")
        num_calls = len(result.tokens) + (result.error is not None)  # one that fails gives no token
        if admitted < 0 or finished - admitted + 1 != num_calls:
            raise ResumeError(
                f"{len(result.tokens)} tokens cannot take the steps {admitted} to {finished}"
            )


def take_over(output: str, *, num_lines: int, num_slots: int, keep_order: bool) -> EarlierResults:
    """Return the results in the file `output` and repair its end, so that it can be appended to.

    num_lines: of the input.  num_slots: of the batch.

    Raises:
        ResumeError: the file holds something else.
        OutputError: it cannot be repaired.
    """
    try:
        with ExitStack() as on_failure:
            is_whole, lines = _open(output)
            earlier = on_failure.enter_context(closing(EarlierResults(lines, num_lines, num_slots)))
            earlier.scan(output, keep_order=keep_order)
            is_whole &= earlier.end == lines.seek(0, os.SEEK_END)
            lines.truncate(earlier.end)
            if output.endswith(".gz") and not is_whole:
                _pack(lines, output)
            on_failure.pop_all()
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
