"""Records in the order of their keys; those that memory has no room for are in a temporary file.

Rule: what is held in memory is bounded, however many records there are.
"""

import os
import weakref
from collections.abc import Iterator
from heapq import heappop, heappush
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


def _push(
    heads: list[tuple[Key, int, Record, Iterator[tuple[Key, Record]]]],
    number: int,
    run: Iterator[tuple[Key, Record]],
) -> None:
    """Put the next record of `run` among the heads, if there is one more."""
    for key, record in run:
        heappush(heads, (key, number, record, run))
        return


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
        closed = [(run.first, number) for number, run in enumerate(self._runs)]
        closed += [(key, len(closed)) for key, _ in self._held[:1]]
        closed.sort(reverse=True)
        heads: list[tuple[Key, int, Record, Iterator[tuple[Key, Record]]]] = []  # a heap
        while closed or heads:
            while closed and (not heads or closed[-1] < heads[0][:2]):
                _, number = closed.pop()
                is_held = number == len(self._runs)
                run = iter(self._held) if is_held else self._read_run(self._runs[number])
                _push(heads, number, run)
            _, number, record, run = heappop(heads)
            yield record
            _push(heads, number, run)

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
