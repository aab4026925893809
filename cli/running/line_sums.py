"""Checksums of the lines that runs have written to a file of results, in a file beside it.

Rule: a sum is written before its line, so a line without one was changed, or put there by others.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from .output import ResumeError, Sink, open_sink

_NUM_BYTES = 8


def sums_path(output: str) -> str:
    """Return where the sums of the results in `output` are."""
    return f"{output}.run.sums"


class SummedSink:
    """Passes results on to another sink, and the sum of each line to a file before that.

    append: whether the results before these are kept.

    Raises:
        OutputError: the file of sums cannot be opened.
    """

    def __init__(self, results: Sink, output: str, *, append: bool) -> None:
        self._results = results
        self._sums = open_sink(sums_path(output), append=append)
        self.is_file = results.is_file

    def write(self, lines: bytes) -> None:
        """Write the sums of `lines`, then `lines`."""
        self._sums.write(b"".join(map(_sum_of, lines.splitlines(keepends=True))))
        self._results.write(lines)

    def close(self) -> None:
        """End both files."""
        self._sums.close()
        self._results.close()


def written_lines(output: str) -> Callable[[bytes], bool]:
    """Return a function that tells whether runs have written a line to `output`.

    Raises:
        ResumeError: there are no sums of its lines.
    """
    import numpy as np  # noqa: PLC0415 - only to resume a run

    path = sums_path(output)
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise ResumeError(
            f"cannot resume {output}: {path} is missing, so nothing says which lines the run "
            "has written; --force starts over"
        ) from None
    data = data[: len(data) - len(data) % _NUM_BYTES]
    sums = array("q", np.sort(np.frombuffer(data, np.int64)).tobytes())

    def was_written(line: bytes) -> bool:
        wanted = int.from_bytes(_sum_of(line), "little", signed=True)
        place = bisect_left(sums, wanted)
        return place < len(sums) and sums[place] == wanted

    return was_written


def _sum_of(line: bytes) -> bytes:
    return blake2b(line, digest_size=_NUM_BYTES).digest()
