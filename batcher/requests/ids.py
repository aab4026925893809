"""Duplicate ids, found exactly among millions of them in a few bytes of memory each.

The newest ids are in a dict.  When it is full they move to a temporary file, one line each, and
only a 32-bit mark of each is kept in memory, in a hash table with open addressing: 7 to 13 bytes an
id, where a dict takes a hundred and more.  An id whose mark is not in the table is new; otherwise
the file decides, but hardly one new id in a billion finds its mark there by chance.  A Bloom filter
that errs as rarely takes half the memory and thirty probes for each id it takes in, instead of two.
"""

import weakref
from array import array
from collections.abc import Collection, Iterator, Sequence
from os import SEEK_END
from typing import IO, TYPE_CHECKING

import msgspec

from batcher.errors import BatchdecodeError, FieldProblem

if TYPE_CHECKING:
    import numpy as np

MAX_RECENT = 50_000  # ids in the dict: about 6 MB
MIN_PLACES = 1 << 19  # of the table; a power of two
MAX_LOAD = 0.6  # of the table; beyond it, probes get long
MARK_BITS = 32
LARGEST_MARK = 2**MARK_BITS - 1
CHUNK_SIZE = 1 << 18  # bytes of the file searched at a time

_encode = msgspec.json.Encoder().encode
_encode_lines = msgspec.json.Encoder().encode_lines
_decode_lines = msgspec.json.Decoder(tuple[str, int]).decode_lines


class IdRegistry:
    """The ids of a run and the lines they stand in; fewer than MAX_RECENT need no file."""

    def __init__(self) -> None:
        self._recent: dict[str, int] = {}
        self._old = _IdFile()

    def add(self, request_id: str, line_number: int) -> int | None:
        """Take note of the id and return None; or return the line that has it already.

        Raises:
            BatchdecodeError: there is no room for the temporary file.
        """
        recent = self._recent
        line = recent.get(request_id)
        if line is None and self._old.num_ids:
            line = self._old.find(request_id)
        if line is not None:
            return line
        recent[request_id] = line_number
        if len(recent) >= MAX_RECENT:
            self._settle()
        return None

    def add_new(self, request_ids: Sequence[str], line_numbers: Sequence[int]) -> bool:
        """Take note of all these ids, or of none; return whether it was of all.

        It is if each is sure to be new, which is cheaper to find out for many than for each.

        Raises:
            BatchdecodeError: there is no room for the temporary file.
        """
        new = dict(zip(request_ids, line_numbers, strict=True))
        if len(new) < len(request_ids) or not self._recent.keys().isdisjoint(new):
            return False
        if self._old.num_ids and self._old.may_have_any(new):
            return False
        self._recent |= new
        if len(self._recent) >= MAX_RECENT:
            self._settle()
        return True

    def _settle(self) -> None:
        """Move the newest ids to the file.

        Raises:
            BatchdecodeError: there is no room for it.
        """
        try:
            self._old.extend(self._recent)
        except OSError as error:
            message = f"cannot write the ids read so far to a temporary file: {error}"
            raise BatchdecodeError(message) from error
        self._recent.clear()


def duplicate_id(request_id: str, first_line: int) -> FieldProblem:
    message = f"id `{request_id}` is already used on line {first_line}"
    return FieldProblem("duplicate-id", ("id",), message)


class _IdFile:
    r"""Ids in a file, `["ID",LINE]\n` each, and a table of their marks to tell which may be in it.

    A mark is 0 for an empty place, else 32 bits of the id's hash.  It stands at the place that the
    other bits give, or behind it with no empty place between.
    """

    def __init__(self) -> None:
        self.num_ids = 0
        self._marks = array("I")
        self._file: IO[bytes] | None = None

    def find(self, request_id: str) -> int | None:
        """Return the line of the id; None if it is not here."""
        marks, code = self._marks, hash(request_id)
        last = len(marks) - 1
        mark = (code & LARGEST_MARK) or 1
        place = (code >> MARK_BITS) & last
        while found := marks[place]:
            if found == mark:
                return self._search(request_id)
            place = (place + 1) & last
        return None

    def may_have_any(self, request_ids: Collection[str]) -> bool:
        """Return whether the mark of any of these ids is here, by chance or not."""
        import numpy as np  # noqa: PLC0415 - few runs need it

        table = np.frombuffer(self._marks, np.uint32)
        marks, places = self._marks_of(request_ids)
        while len(places):
            found = table[places]
            if (found == marks).any():
                return True
            is_taken = found != 0
            marks, places = marks[is_taken], (places[is_taken] + 1) & (len(table) - 1)
        return False

    def extend(self, lines: dict[str, int]) -> None:
        if self._file is None:
            from tempfile import TemporaryFile  # noqa: PLC0415  # few runs need it

            self._file = TemporaryFile()  # noqa: SIM115  # it lives as long as this object
            weakref.finalize(self, self._file.close)
        self.num_ids += len(lines)
        if self.num_ids > len(self._marks) * MAX_LOAD:
            num_places = 2 * len(self._marks) or MIN_PLACES
            while self.num_ids > num_places * MAX_LOAD:
                num_places *= 2
            self._marks = array("I")  # the old table goes before the new one comes
            self._marks = array("I", bytes(num_places * self._marks.itemsize))
            for chunk in self._read_chunks():
                self._add_marks([request_id for request_id, _ in _decode_lines(chunk)])
        self._file.seek(0, SEEK_END)
        self._file.write(_encode_lines(list(lines.items())))
        self._file.flush()
        self._add_marks(lines)

    def _add_marks(self, request_ids: Collection[str]) -> None:
        import numpy as np  # noqa: PLC0415 - few runs need it

        table = np.frombuffer(self._marks, np.uint32)
        marks, places = self._marks_of(request_ids)
        while len(places):
            is_free = table[places] == 0
            table[places[is_free]] = marks[is_free]
            # Of several for one place the last is there; equal marks need only one.
            is_left = table[places] != marks
            marks, places = marks[is_left], (places[is_left] + 1) & (len(table) - 1)

    def _marks_of(self, request_ids: Collection[str]) -> "tuple[np.ndarray, np.ndarray]":
        import numpy as np  # noqa: PLC0415 - few runs need it

        codes = np.fromiter(map(hash, request_ids), np.int64, len(request_ids))
        marks = np.maximum(codes & LARGEST_MARK, 1).astype(np.uint32)
        return marks, (codes >> MARK_BITS) & (len(self._marks) - 1)

    def _search(self, request_id: str) -> int | None:
        needle = b"[%b," % _encode(request_id)
        for chunk in self._read_chunks():
            start = chunk.find(needle)
            if start >= 0:
                _, line = _decode_lines(chunk[start : chunk.index(b"\n", start)])[0]
                return line
        return None

    def _read_chunks(self) -> Iterator[bytes]:
        if self._file is not None:
            self._file.seek(0)
            while chunk := self._file.read(CHUNK_SIZE):
                yield chunk + self._file.readline()
