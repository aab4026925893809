"""Answers in the order of their requests: each is held back until all before it are written.

Memory is bounded: what is held back beyond a limit goes to a temporary file, in sorted runs that
are merged when their turn comes.
"""

import struct
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from typing import BinaryIO, NamedTuple

from batcher.errors import InvariantError

HELD_BYTES = 32 * 2**20
_HEADER = struct.Struct("<qq")  # place, length of the lines


class _Run(NamedTuple):
    """Lines in the temporary file from `start` to `end`, ascending from `first_place` on."""

    first_place: int
    start: int
    end: int


class InputOrder:
    """Puts lines back into the order of their places, from `first` on."""

    def __init__(self, first: int = 0, max_held_bytes: int = HELD_BYTES) -> None:
        self._next = first
        self._max_held_bytes, self._num_held_bytes = max_held_bytes, 0
        self._held: dict[int, bytes] = {}
        self._runs: list[_Run] = []  # a heap
        self._file: BinaryIO | None = None

    def put(self, place: int, line: bytes) -> list[bytes]:
        """Take in the line of `place`, or its lines; return those whose turn has come."""
        self._held[place] = line
        self._num_held_bytes += len(line)
        if place != self._next:
            if self._num_held_bytes > self._max_held_bytes:
                self._spill()
            return []
        ready = []
        while (line_now := self._take(self._next)) is not None:
            ready.append(line_now)
            self._next += 1
        return ready

    def rest(self) -> Iterator[bytes]:
        """Yield the lines still held back, in order; those missing between them will not come."""
        if self._held:
            self._spill()
        while self._runs:
            yield self._take_spilled()

    def close(self) -> None:
        """Forget all that is held back."""
        if self._file is not None:
            self._file.close()

    def _take(self, place: int) -> bytes | None:
        """Return what was put at `place` and forget it; None if it is not here."""
        line = self._held.pop(place, None)
        if line is not None:
            self._num_held_bytes -= len(line)
            return line
        if self._runs and self._runs[0].first_place == place:
            return self._take_spilled()
        return None

    def _spill(self) -> None:
        """Move all lines in memory to the temporary file, as one more run."""
        if self._file is None:
            import tempfile  # noqa: PLC0415 - hardly any run comes here

            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - gone with the process
        start = self._file.seek(0, 2)
        for place, line in sorted(self._held.items()):
            self._file.write(_HEADER.pack(place, len(line)) + line)
        heappush(self._runs, _Run(min(self._held), start, self._file.tell()))
        self._held.clear()
        self._num_held_bytes = 0

    def _take_spilled(self) -> bytes:
        """Return the first line of the run that comes first, and move that run on."""
        run, file = self._runs[0], self._file
        if file is None:
            raise InvariantError("a run without a file")
        file.seek(run.start)
        _, length = _HEADER.unpack(file.read(_HEADER.size))
        line = file.read(length)
        start = run.start + _HEADER.size + length
        if start == run.end:
            heappop(self._runs)
        else:
            place, _ = _HEADER.unpack(file.read(_HEADER.size))
            heapreplace(self._runs, _Run(place, start, run.end))
        return line
