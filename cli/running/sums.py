"""Checksums of results, line by line, in a file beside them: a line without one is not of a run."""

from hashlib import blake2b

from .output import Sink, open_sink

SUM_BYTES = 8  # of a checksum


class SummedSink:
    """Passes results on to another sink, and the checksum of each line to a file before that.

    So a line without a sum was changed, or put there by others.
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
        whole = lines.split(b"\n")[:-1]  # splitlines() takes three times as long
        self._sums.write(b"".join([sum_of(line + b"\n") for line in whole]))
        self._results.write(lines)

    def close(self) -> None:
        """End both files."""
        self._sums.close()
        self._results.close()


def sums_path(output: str) -> str:
    """Return where the sums of the results in `output` are."""
    return f"{output}.run.sums"


def sum_of(line: bytes) -> bytes:
    """Return the checksum of a line of results."""
    return blake2b(line, digest_size=SUM_BYTES).digest()
