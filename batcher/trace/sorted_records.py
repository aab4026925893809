"""Records in the order of their keys; those that memory has no room for are in a temporary file.

Rule: what is held in memory is bounded, however many records there are.
"""

import os
import weakref
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from operator import itemgetter
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

import msgspec

MAX_HELD = 2**14
_BLOCK_BYTES = 2**16

Record = TypeVar("Record")
Key = tuple[int, ...]

_encoder = msgspec.json.Encoder()


class _Run(NamedTuple):
    """Records in the file from `start` to `end`, and the first of their keys."""

    first: Key
    start: int
    end: int


class SortedRecords(Generic[Record]):
    """Takes records in any order, then gives them by their keys, and those of one key as they came.

    They are sorted in runs, which are merged as they are read (Knuth, The Art of Computer
    Programming 3, section 5.4).  A run is read only from where its first record comes, so of
    records that came nearly in order two runs or so are read at once.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.json.Decoder(tuple[Key, kind])
        self._held: list[tuple[Key, Record]] = []
        self._file: BinaryIO | None = None
        self._runs: list[_Run] = []
        self._num_records = 0

    def add(self, key: Key, record: Record) -> None:
        """Take in a record; all keys have the same length."""
        self._held.append((key, record))
        self._num_records += 1
        if len(self._held) >= MAX_HELD:
            self._write_run()

    def __len__(self) -> int:
        return self._num_records

    def __iter__(self) -> Iterator[Record]:
        self._held.sort(key=itemgetter(0))
        runs = [(run.first, self._read_run(run)) for run in self._runs]
        runs += [(key, iter(self._held)) for key, _ in self._held[:1]]
        # A heap; None stands for the first record of a run that is not read yet.
        heads: list[tuple[Key, int, Record | None, Iterator[tuple[Key, Record]]]]
        heads = [(first, number, None, run) for number, (first, run) in enumerate(runs)]
        heapify(heads)
        while heads:
            _, number, record, run = heads[0]
            if record is not None:
                yield record
            following = next(run, None)
            if following is None:
                heappop(heads)
            else:
                heapreplace(heads, (following[0], number, following[1], run))

    def _write_run(self) -> None:
        if self._file is None:
            import tempfile  # noqa: PLC0415 - only for long runs

            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with us
            weakref.finalize(self, self._file.close)
        self._held.sort(key=itemgetter(0))
        start = self._file.tell()
        self._file.write(_encoder.encode_lines(self._held))
        self._file.flush()
        self._runs.append(_Run(self._held[0][0], start, self._file.tell()))
        self._held = []

    def _read_run(self, run: _Run) -> Iterator[tuple[Key, Record]]:
        if self._file is None:
            return
        (_, start, end), rest = run, b""
        while start < end:
            block = os.pread(self._file.fileno(), min(_BLOCK_BYTES, end - start), start)
            start += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                yield self._decoder.decode(line)
