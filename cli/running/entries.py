"""Lines of the input as requests, in the order they stand in, and the ids they have twice."""

from array import array
from bisect import bisect_left

from msgspec import Struct

from batcher.formats.ids import IdRegistry
from batcher.formats.requests import BadLine, ParsedLine, RequestParser

from .intake import MAX_LINE_BYTES, LineReader
from .problems import id_given_before, id_of, line_too_long


class Entry(Struct, gc=False):
    """One line of the input that is not blank; `place` counts them from 0."""

    place: int
    parsed: ParsedLine | BadLine


class Duplicates:
    """The lines whose id an earlier line has: 16 bytes for each, since there may be millions."""

    def __init__(self) -> None:
        self._places, self._first_numbers = array("q"), array("q")

    def add(self, place: int, first_number: int) -> None:
        """Take note of the line at `place`, which is after all before."""
        self._places.append(place)
        self._first_numbers.append(first_number)

    def first_number(self, place: int) -> int | None:
        """Return the number of the line that has the id of this one; None if no earlier has it."""
        found = bisect_left(self._places, place)
        if found == len(self._places) or self._places[found] != place:
            return None
        return self._first_numbers[found]


class EntryReader:
    """Parses one line after the other and finds ids that were given before.

    line: the last one.  duplicates: all such lines so far.
    """

    def __init__(self, lines: LineReader, parser: RequestParser) -> None:
        self.lines = lines
        self.line = b""
        self.duplicates = Duplicates()
        self._parser = parser
        self._ids = IdRegistry()
        self._num_read = 0

    def read(self) -> Entry | None:
        """Return the next line that is not blank, None at the end."""
        line = self.lines.read()
        if line is None:
            return None
        self.line = line
        parsed = _parse(self._parser, line, self.lines.number)
        if isinstance(parsed, ParsedLine):
            number = self.lines.number
            first = self._ids.add(id_of(parsed), number)
            if first is not None:
                self.duplicates.add(self._num_read, first)
                parsed = id_given_before(parsed, line, number, first)
        self._num_read += 1
        return Entry(self._num_read - 1, parsed)


class LineParser:
    """Parses lines of a file that was surveyed, whose duplicates are known."""

    def __init__(self, parser: RequestParser, duplicates: Duplicates) -> None:
        self._parser, self._duplicates = parser, duplicates

    def parse(self, line: bytes, number: int, place: int) -> ParsedLine | BadLine:
        """Return what the line with this number, at this place, is."""
        parsed = _parse(self._parser, line, number)
        first = self._duplicates.first_number(place)
        if first is None or isinstance(parsed, BadLine):
            return parsed
        return id_given_before(parsed, line, number, first)


def _parse(parser: RequestParser, line: bytes, number: int) -> ParsedLine | BadLine:
    if len(line) > MAX_LINE_BYTES:
        return line_too_long(line, number)
    return parser.parse(line, number)
