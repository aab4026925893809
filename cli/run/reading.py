"""Lines of the input as requests, in the order they stand in, and the ids they have twice."""

from array import array
from bisect import bisect_left
from typing import Any
from zlib import crc32

import msgspec
from msgspec.structs import replace

from batcher.request import Request
from batcher.requests.ids import IdRegistry
from batcher.requests.lines import BadLine, ParsedLine, RequestParser
from batcher.requests.results import is_result
from batcher.requests.values import ModelCapabilities
from batcher.trace.files import is_trace

from ..screen.terminal import ColorChoice
from .intake import MAX_LINE_BYTES, InputError, LineReader, OpenInput
from .problems import InvalidInput, ProblemReport, id_given_before, id_of, line_too_long, say

Line = ParsedLine | BadLine


class Duplicates:
    """The lines whose id an earlier line has: 16 bytes for each, since there may be millions."""

    def __init__(self) -> None:
        self._indexes, self._first_numbers = array("q"), array("q")

    def add(self, index: int, first_number: int) -> None:
        """Take note of the line `index`, which is after all before."""
        self._indexes.append(index)
        self._first_numbers.append(first_number)

    def first_number(self, index: int) -> int | None:
        """Return the number of the line that has the id of this one; None if no earlier has it."""
        found = bisect_left(self._indexes, index)
        if found == len(self._indexes) or self._indexes[found] != index:
            return None
        return self._first_numbers[found]


class RequestReader:
    """Parses one line after the other and finds ids that were given before.

    line: the last one.  num_read: how many, without blank ones.
    duplicates: all with such ids so far.
    """

    def __init__(self, lines: LineReader, parser: RequestParser) -> None:
        self.lines = lines
        self.line = b""
        self.num_read = 0
        self.duplicates = Duplicates()
        self._parser = parser
        self._ids = IdRegistry()

    def read(self) -> Line | None:
        """Return the next line that is not blank, None at the end.

        Raises:
            InputError: the input is damaged or gone, or holds something else than requests.
        """
        lines = self.lines
        line = lines.read()
        if line is None:
            return None
        self.line, number = line, lines.number
        parsed = parse_line(self._parser, line, number)
        if isinstance(parsed, ParsedLine):
            first = self._ids.add(id_of(parsed), number)
            if first is not None:
                self.duplicates.add(self.num_read, first)
                parsed = id_given_before(parsed, line, number, first)
        elif not self.num_read:
            check_kind(line, self.lines.name)
        self.num_read += 1
        return parsed


def check_kind(first_line: bytes, name: str) -> None:
    """Make sure that the first line of `name`, which is no request, is not what a run writes.

    Raises:
        InputError: it is of results, of a trace, or of something that is not lines of text.
    """
    from .other_forms import why_no_lines  # noqa: PLC0415 - good input does without

    found = why_no_lines(first_line, name)
    if found is not None:
        raise InputError(f"{name} {found}")
    if is_result(first_line) or _is_answered_row(first_line):
        found = "results"
    elif is_trace(first_line):
        found = "trace"
    else:
        return
    raise InputError(
        f"{name} holds the {found} of a run, and no requests: "
        "give the requests that the run has read"
    )


def _is_answered_row(line: bytes) -> bool:
    """Return whether a line is of the output of an OpenAI batch, whatever has answered it."""
    try:
        return {"custom_id", "response"} <= msgspec.json.decode(line, type=dict[str, Any]).keys()
    except (ValueError, RecursionError):
        return False


def read_requests(
    source: OpenInput, capabilities: ModelCapabilities, color: ColorChoice, what_now: str
) -> list[Request]:
    """Return all requests of an input, and say what is wrong with it.

    Raises:
        InvalidInput: some lines are bad; its message ends in `what_now`.
        InputError: the input cannot be read.
    """
    report = ProblemReport(source.name, color)
    reader = RequestReader(source.lines(), RequestParser(capabilities))
    found = []
    while (line := reader.read()) is not None:
        if isinstance(line, ParsedLine):
            found.append(line.request)
        else:
            report.add(line)
    say(source.take_notes() + report.closing())
    if report.num_lines:
        raise InvalidInput(report, reader.num_read, what_now)
    return found


class LineParser:
    """Parses lines of a file that was surveyed, whose duplicates are known."""

    def __init__(self, parser: RequestParser, duplicates: Duplicates) -> None:
        self._parser, self._duplicates = parser, duplicates
        self._decode = msgspec.json.Decoder(Request).decode

    def parse_again(self, line: bytes, number: int, index: int, checksum: int) -> Line:
        """Return what a line is that had this checksum when it was parsed before.

        Raises:
            InputError: it was a request, and has changed.
        """
        if not checksum:
            return self.parse(line, number, index)
        if crc32(line) != checksum:
            raise InputError(f"line {number} of the input has changed since the start")
        return self.parse_good(line, number)

    def parse_good(self, line: bytes, number: int) -> Line:
        """Return what a line is that is known to be a request, without checking it again.

        If it is one by its own names for all it says, the types of its fields tell how to read it.
        """
        if self._parser.is_respelling:
            return self._parser.parse(line, number)
        try:
            request = self._decode(line)
        except (ValueError, RecursionError):
            return self._parser.parse(line, number)
        return ParsedLine(request if request.id is not None else replace(request, id=str(number)))

    def parse(self, line: bytes, number: int, index: int) -> Line:
        """Return what the line with this number, at this index, is."""
        parsed = parse_line(self._parser, line, number)
        first = self._duplicates.first_number(index)
        if first is None or isinstance(parsed, BadLine):
            return parsed
        return id_given_before(parsed, line, number, first)


def checksum_of(line: bytes, parsed: Line) -> int:
    """Return what tells whether a line is the same when it is read again; 0 for a bad one."""
    return crc32(line) if isinstance(parsed, ParsedLine) else 0


def parse_line(parser: RequestParser, line: bytes, number: int) -> Line:
    """Return what a line with this number is by itself."""
    if len(line) > MAX_LINE_BYTES:
        return line_too_long(line, number)
    return parser.parse(line, number)
