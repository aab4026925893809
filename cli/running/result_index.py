"""Where each result stands in a file, in memory that millions of them leave small.

Rule: what is found by a hash is only a candidate; whoever asks reads it and compares.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator


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
