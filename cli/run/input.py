"""Read the input: open it, unpack it, read its lines, parse them, and order them by arrival.

Rules: the input is never in memory as a whole, and a line only up to MAX_LINE_BYTES.  The content
says whether an input is packed, not its name.  A file is read to its end before the first step, so
every problem in it is known by then.
"""

import io
import os
import select
import shlex
import stat
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from itertools import islice
from shutil import copyfileobj
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar
from zlib import crc32

import msgspec
from msgspec.structs import replace

from batcher.errors import BatchdecodeError, FieldProblem
from batcher.events import ArriveReason
from batcher.request import NOTHING_UNREAD, Request, Unread, num_queued_as
from batcher.requests.lines import BadLine, ParsedLine, RequestParser
from batcher.requests.results import is_result
from batcher.requests.validation import ModelCapabilities
from batcher.trace.files import is_trace

from ..errors import reason_of
from ..screen.terminal import ColorChoice, printable_lines
from .problems import InvalidInput, ProblemReport, say, why_no_lines
from .urls import UrlError, copy_of, is_url, shown

if TYPE_CHECKING:
    from sqlite3 import Connection

    from ..options import RequestOptions

MAX_LINE_BYTES = 64 * 2**20
MAX_SKIPPED_BYTES = 2**30  # of a line that is too long; a longer one is endless
CHUNK_BYTES = 2**20
GZIP, _BOM = b"\x1f\x8b", b"\xef\xbb\xbf"
# Other compressed files: their first bytes, their name, and the command that unpacks them.
_OTHERS = (
    (b"\x28\xb5\x2f\xfd", "zstd", "zstdcat"),
    (b"\xfd7zXZ\x00", "xz", "xzcat"),
    (b"BZh", "bzip2", "bzcat"),
    (b"\x04\x22\x4d\x18", "lz4", "lz4cat"),
    (b"PK\x03\x04", "zip", "unzip -p"),
    (GZIP, "gzip twice", "zcat"),
)

PROMPT_TOKENS = 256  # max_tokens of prompts without a file of requests

Waiting = Callable[[], AbstractContextManager[None]]
AsJson = Callable[[bytes], bytes]
PlaceOf = Callable[[int], tuple[str, int]]


class InputError(BatchdecodeError):
    """The input cannot be opened, or not be read to its end."""


class CutOffError(InputError):
    """A packed input ends too early; the lines before the cut were read."""


class InputFile:
    """A file, a pipe or a terminal, open for reading.

    name: as messages show it.  is_file: it can be read again, and at any offset.  as_json: makes a
    line of JSON of a line of plain text.
    """

    def __init__(self, raw: io.FileIO, name: str, as_json: AsJson | None = None) -> None:
        self.name, self.as_json, self.raw = name, as_json, raw
        self.status = os.fstat(raw.fileno())
        self.is_file = stat.S_ISREG(self.status.st_mode) and raw.tell() == 0
        self._is_packed = self.is_file and os.pread(raw.fileno(), len(GZIP), 0) == GZIP
        self._pipe: io.BufferedReader | None = None
        self._unpacked: io.BufferedRandom | None = None

    def close(self) -> None:
        # The reader of a pipe stays open: a thread may be waiting in it, and would block us.
        for file in (self._unpacked, self.raw):
            if file is not None:
                file.close()

    def from_start(self, waiting: Waiting = nullcontext) -> io.BufferedReader:
        raw: io.RawIOBase
        if self.is_file:
            self.raw.seek(0)
            raw = io.FileIO(self.raw.fileno(), closefd=False)
            if self._is_packed:
                raw = Unpacked(raw)
            return io.BufferedReader(raw, CHUNK_BYTES)
        if self._pipe is None:
            raw = Unpacked(PatientPipe(self.raw, waiting))
            self._pipe = io.BufferedReader(raw, CHUNK_BYTES)
        return self._pipe

    def seekable(self) -> io.BufferedReader | io.BufferedRandom:
        """Return a stream that can seek; a packed file is unpacked on the disk for it."""
        if not self._is_packed:
            return self.from_start()
        import tempfile  # noqa: PLC0415 - only for a packed file that is out of order

        self._unpacked = tempfile.TemporaryFile()  # noqa: SIM115 - closed with us
        try:
            copyfileobj(self.from_start(), self._unpacked, CHUNK_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"cannot unpack {self.name}: {_reason(error)}") from error
        self._unpacked.seek(0)
        return self._unpacked


class OpenInput(AbstractContextManager["OpenInput"]):
    """The open files of a command, read one after the other as if they were one.

    Its context closes them.  is_file: all can be read again.  is_terminal: a person types one of
    them.  statuses: of the files.
    """

    def __init__(self, *files: InputFile) -> None:
        self._files, self.name = files, files[0].name
        if len(files) > 1:
            self.name += f" and {len(files) - 1} more"
        self.is_file = all(file.is_file for file in files)
        self.is_terminal = any(file.raw.isatty() for file in files)
        self.statuses = [file.status for file in files]
        self._num_before = [0]  # lines before each file, as far as they are read
        self._notes: list[str] = []
        self._num_taken = 0

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def lines(self, waiting: Waiting = nullcontext) -> "LineReader":
        """Return a reader of the whole input; a pipe has only one.

        waiting: entered whenever a pipe may have nothing to read yet.
        """
        return self._reader(file.from_start(waiting) for file in self._files)

    def seekable_lines(self) -> "LineReader":
        """Return a reader that can go to any line."""
        return self._reader(file.seekable() for file in self._files)

    def _reader(self, streams: Iterable[io.BufferedReader | io.BufferedRandom]) -> "LineReader":
        parts = zip(streams, self._files, strict=True)
        named = [(stream, file.name, file.as_json) for stream, file in parts]
        return LineReader(named, self._notes, self._num_before)

    def place_of(self, number: int) -> tuple[str, int]:
        """Return the name of the file that has the line, and the number of the line in it."""
        place = bisect_left(self._num_before, number) - 1
        return self._files[place].name, number - self._num_before[place]

    def digest(self) -> str:
        import hashlib  # noqa: PLC0415 - only for runs that can be resumed

        digests = []
        for file in self._files:
            file.raw.seek(0)
            digests.append(hashlib.file_digest(file.raw, "sha256").hexdigest())
        if len(digests) == 1:
            return digests[0]
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def take_notes(self) -> str:
        notes = self._notes[self._num_taken :]
        self._num_taken += len(notes)
        return "".join(f"warning: {printable_lines(note)}\n" for note in notes)


def open_requests(options: "RequestOptions", waiting: Waiting) -> OpenInput:
    """Return the opened prompts and inputs of a command, in this order: -p, --prompts, INPUT.

    Prompts get a max_tokens of PROMPT_TOKENS unless --max-tokens or a chat decides on it.

    Raises:
        InputError: one of them cannot be opened, or is stdin for the second time.
    """
    more = b"}"
    if not (options.chat or "max_tokens" in options.defaults):
        more = b',"max_tokens":%d}' % PROMPT_TOKENS

    def request_of(prompt: bytes) -> bytes:
        return b'{"prompt":' + msgspec.json.encode(prompt.decode()) + more

    def as_json(line: bytes) -> bytes:
        prompt = line.removesuffix(b"\n").removesuffix(b"\r")
        if len(prompt) > MAX_LINE_BYTES:
            return prompt
        try:
            return request_of(prompt)
        except UnicodeDecodeError:  # its parser will show the place
            return prompt

    prompts = options.prompts or []
    paths = options.input or ([] if options.prompt or prompts else ["-"])
    if [*paths, *prompts].count("-") > 1:
        raise InputError("stdin (-) can be read only once")
    with ExitStack() as stack:
        files = []
        if options.prompt:
            given = io.FileIO(os.memfd_create("prompts"), "r+")
            for number, text in enumerate(options.prompt, 1):
                try:
                    given.write(request_of(os.fsencode(text)) + b"\n")
                except UnicodeDecodeError as error:
                    reason = f"is not UTF-8: {error.reason}"
                    raise InputError(f"prompt {number} of -p {reason}") from None
            given.seek(0)
            files.append(InputFile(given, "-p"))
            stack.callback(given.close)
        for path, convert in (
            *((path, as_json) for path in prompts),
            *((path, None) for path in paths),
        ):
            files.append(_open_file(path, waiting, convert))
            stack.callback(files[-1].close)
        stack.pop_all()
    return OpenInput(*files)


def open_input(path: str | None, waiting: Waiting) -> OpenInput:
    """Return the opened input; `-` or None is stdin.

    waiting: entered while a FIFO opens or a URL is downloaded.
    """
    return OpenInput(_open_file(path, waiting))


def _open_file(path: str | None, waiting: Waiting, as_json: AsJson | None = None) -> InputFile:
    if path is not None and is_url(path):
        try:
            with waiting():
                copy = copy_of(path)
        except UrlError as error:
            raise InputError(f"cannot read {shown(path)}: {error}") from error
        # opened again, it has its own offset
        return InputFile(io.FileIO(f"/dev/fd/{copy}"), shown(path), as_json)
    name = "<stdin>" if path in (None, "-") else str(path)
    try:
        if path is None or path == "-":
            return InputFile(io.FileIO(0, closefd=False), name, as_json)
        with waiting():  # a FIFO opens when its other end does
            return InputFile(io.FileIO(path), name, as_json)
    except (OSError, ValueError) as error:
        from batcher.planning.workload import PREFIX as STREAMED  # noqa: PLC0415 - heavy

        reason = _reason(error)
        if name.startswith(STREAMED):
            reason = (
                f"only compare and plan take {STREAMED}, whose requests have no prompts; "
                "batchdecode workload writes such a file"
            )
        raise InputError(f"cannot read {name}: {reason}") from error


class PatientPipe(io.RawIOBase):
    """A pipe that waits for its writer, until a signal comes."""

    def __init__(self, raw: io.FileIO, waiting: Waiting) -> None:
        self._raw, self._waiting = raw, waiting

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._waiting():
            while (num_read := self._raw.readinto(buffer)) is None:
                select.select([self._raw], [], [])  # another program has made it non-blocking
            return num_read


class Unpacked(io.RawIOBase):
    """The bytes of `packed`, unpacked if they begin as gzip does, or is_gzip is set.

    A read returns what has come, so a pipe can be followed as far as it was flushed.  It raises
    EOFError where the data is cut off, and zlib.error where it is damaged.
    """

    def __init__(self, packed: io.RawIOBase, *, is_gzip: bool = False) -> None:
        self._packed = packed
        self._data: bytes = b""  # read, and not unpacked yet
        self._is_begun = self._is_packed = is_gzip
        self._unpacker = zlib.decompressobj(wbits=31)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._is_begun:
            self._is_begun = True
            while self._data in (b"", GZIP[:1]) and (more := self._packed.read(CHUNK_BYTES)):
                self._data += more
            self._is_packed = self._data.startswith(GZIP)
        if self._is_packed:
            piece = self._unpack(len(buffer))
        elif self._data:
            piece, self._data = self._data[: len(buffer)], self._data[len(buffer) :]
        else:
            return self._packed.readinto(buffer) or 0
        buffer[: len(piece)] = piece
        return len(piece)

    def _unpack(self, size: int) -> bytes:
        while True:
            if self._unpacker.eof:  # another member follows, or padding
                self._data = self._unpacker.unused_data.lstrip(b"\0")
                while not self._data:
                    if not (more := self._packed.read(CHUNK_BYTES)):
                        return b""
                    self._data = more.lstrip(b"\0")
                self._unpacker = zlib.decompressobj(wbits=31)
            piece = self._unpacker.decompress(self._data, size)
            self._data = self._unpacker.unconsumed_tail
            if piece:
                return piece
            if not self._unpacker.eof:
                self._data = self._packed.read(CHUNK_BYTES) or b""
                if not self._data:
                    raise EOFError


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the compressed data is cut off"
    return "the compressed data is damaged" if isinstance(error, zlib.error) else reason_of(error)


# -- lines


class Block(NamedTuple):
    """Consecutive lines without the blank ones, and their numbers."""

    numbers: Sequence[int]
    texts: list[bytes]


NamedStream = tuple[io.BufferedReader | io.BufferedRandom, str, AsJson | None]
"""A file, its name, and its as_json: see InputFile."""


class LineReader:
    """Reads the lines that are not blank; numbers and offsets count on from file to file.

    number: of the last line read, from 1.  num_blank: blank lines so far.
    start: the offset of the last line that `read` returned.
    notes: takes remarks about the files as a whole.
    end: the offset behind the last line read.
    num_before: the lines before each file, as far as they are known.

    Raises, wherever it reads:
        InputError: a file is damaged or gone, or a line has no end.
    """

    def __init__(
        self, streams: Sequence[NamedStream], notes: list[str], num_before: list[int] | None = None
    ) -> None:
        self.number = self.start = self.end = self.num_blank = 0
        self._streams, self._notes, self._num_before = streams, notes, num_before or [0]
        self._bytes_before = list[int]()  # of the files up to the present one
        self._is_cut = False
        self._begin_next()

    def _begin_next(self) -> bool:
        """Turn to the next file; return whether there is one."""
        place = len(self._bytes_before)
        if place == len(self._streams):
            return False
        self._bytes_before.append(self.end)
        if place == len(self._num_before):
            self._num_before.append(self.number)
        self._stream, self._name, self._as_json = self._streams[place]
        self._is_begun = False  # whether a line that is not blank was read from it
        return True

    @property
    def _number_here(self) -> int:
        """The number of the last line in its file."""
        return self.number - self._num_before[len(self._bytes_before) - 1]

    def place_of(self, number: int) -> tuple[str, int]:
        """Return the name of the file that has the line, and the number of the line in it."""
        place = bisect_left(self._num_before, number) - 1
        return self._streams[place][1], number - self._num_before[place]

    def read(self) -> bytes | None:
        """Return the next line that is not blank, None at the end.

        A line that is too long is cut to MAX_LINE_BYTES + 1 bytes.  Its rest is skipped when the
        next line is read, as it may have no end.
        """
        self._skip_rest()
        while (line := self._readline(MAX_LINE_BYTES + 1)) or self._begin_next():
            if not line:
                continue
            self.number += 1
            self.start = self.end
            self.end += len(line)
            self._is_cut = len(line) > MAX_LINE_BYTES and not line.endswith(b"\n")
            if not self._is_begun and self._number_here == 1:
                line = self._begin(line)
            if not line or line.isspace():
                self.num_blank += 1
                continue
            if self._as_json is not None and not self._is_begun:
                self._refuse_other_than_prompts(line)
            self._is_begun = True
            return line if self._as_json is None else self._as_json(line)
        return None

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        while (line := self.read()) is not None:
            yield self.number, line

    def read_block(self, max_lines: int) -> Block:
        """Return the next lines that are complete in the buffer, at least one; none at the end.

        So a pipe is not waited for, and no line is too long: the buffer is smaller than that.
        """
        self._skip_rest()
        while self._is_begun:  # the first line shows what the file is
            try:
                peeked = self._stream.peek()
            except (OSError, EOFError, zlib.error) as error:
                raise self._broken(error) from error
            if not peeked:
                if self._begin_next():
                    break
                return Block([], [])  # a terminal that is read again waits for another end
            texts = list(islice(io.BytesIO(peeked), max_lines))
            if texts and not texts[-1].endswith(b"\n"):
                texts.pop()
            if not texts:
                break
            num_bytes = sum(map(len, texts))
            self._stream.read(num_bytes)
            numbers = range(self.number + 1, self.number + 1 + len(texts))
            self.number += len(texts)
            self.end += num_bytes
            filled: Sequence[int] = numbers
            if any(map(bytes.isspace, texts)):
                filled = [n for n, text in zip(numbers, texts, strict=True) if not text.isspace()]
                self.num_blank += len(texts) - len(filled)
                texts = [texts[number - numbers[0]] for number in filled]
            if texts:
                as_json = self._as_json
                return Block(filled, texts if as_json is None else list(map(as_json, texts)))
        text = self.read()
        return Block([], []) if text is None else Block([self.number], [text])

    def read_at(self, start: int) -> bytes:
        place = bisect_right(self._bytes_before, start) - 1
        self._stream, self._name, self._as_json = self._streams[place]
        self._stream.seek(start - self._bytes_before[place])
        line = self._readline(MAX_LINE_BYTES + 1)
        return line if self._as_json is None else self._as_json(line)

    def _begin(self, line: bytes) -> bytes:
        """Return the first line without a byte order mark; refuse compressed data."""
        name = self._name
        if line.startswith(b"PK\x03\x04") and b"[Content_Types].xml" in line[:256]:
            what = "an Office document, such as an Excel workbook: save it as CSV or text first"
            raise InputError(f"{name} is {what}")
        file = "" if name == "<stdin>" else f" {shlex.quote(name)}"
        for magic, kind, program in _OTHERS:
            if line.startswith(magic):
                how = f"only gzip is supported. Decompress it with: {program}{file}"
                raise InputError(f"{name} is compressed with {kind}; {how}")
        if line.startswith(_BOM):
            note = f"{name} begins with a byte order mark, which is skipped"
            if note not in self._notes:
                self._notes.append(note)
            self.start += len(_BOM)
            line = line[len(_BOM) :]
        return line

    def _refuse_other_than_prompts(self, line: bytes) -> None:
        with suppress(ValueError, RecursionError):
            fields = msgspec.json.decode(line, type=dict[str, Any])
            if {"prompt", "messages", "body"} & fields.keys():
                raise InputError(
                    f"{self._name} contains requests in JSON, not plain prompts: pass it without "
                    "--prompts"
                )
        if b"\r" in line.strip() and not line.endswith(b"\n"):
            file = "" if self._name == "<stdin>" else f" <{shlex.quote(self._name)}"
            how = rf"tr '\r' '\n'{file}"
            raise InputError(f"{self._name} has lines that end in CR. Convert it: {how}")

    def _readline(self, max_bytes: int) -> bytes:
        try:
            return self._stream.readline(max_bytes)
        except (OSError, EOFError, zlib.error) as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> InputError:
        kind = CutOffError if isinstance(error, EOFError) else InputError
        return kind(f"cannot read {self._name} after line {self._number_here}: {_reason(error)}")

    def _skip_rest(self) -> None:
        num_skipped = 0
        while self._is_cut:
            part = self._readline(CHUNK_BYTES)
            self.end += len(part)
            num_skipped += len(part)
            self._is_cut = bool(part) and not part.endswith(b"\n")
            if num_skipped > MAX_SKIPPED_BYTES:
                what = f"line {self._number_here} does not end within {MAX_SKIPPED_BYTES >> 30} GiB"
                raise InputError(f"cannot read {self._name}: {what}")


# -- requests, in the order of the lines

Line = ParsedLine | BadLine
BLOCK_LINES = 1024
_PARSED_LINES = 128  # at once: a run begins soon, however long a line takes
_HEAD_BYTES = 2**22


MAX_RECENT = 50_000  # ids in the dict: about 6 MB


class SpilledTable:
    """Keys and values in a temporary database on disk, which vanishes with the process.

    what: its content, for the BatchdecodeError of a full disk.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._database: Connection | None = None

    def __bool__(self) -> bool:
        return self._database is not None

    def add(self, items: dict[Any, Any]) -> None:
        """Move all items of a dict here."""
        import sqlite3  # noqa: PLC0415 - few runs need it

        try:
            if self._database is None:
                # "" is a temporary file; any thread may add
                self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
                self._database.execute("PRAGMA journal_mode = OFF")
                self._database.execute(
                    "CREATE TABLE spilled (key PRIMARY KEY, value) WITHOUT ROWID"
                )
            self._database.execute("BEGIN")
            rows = sorted(items.items())
            self._database.executemany("INSERT INTO spilled VALUES (?, ?)", rows)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            message = f"cannot write {self._what} to a temporary file: {error}"
            raise BatchdecodeError(message) from error
        items.clear()

    def find(self, key: str | int) -> Any:
        if self._database is None:
            return None
        query = "SELECT value FROM spilled WHERE key = ?"
        found = self._database.execute(query, (key,)).fetchone()
        return None if found is None else found[0]

    def items_from(self, key: int) -> Iterator[tuple[Any, Any]]:
        if self._database is not None:
            query = "SELECT key, value FROM spilled WHERE key >= ? ORDER BY key"
            yield from self._database.execute(query, (key,))

    def close(self) -> None:
        if self._database is not None:
            self._database.close()


class IdRegistry:
    """The ids of a run, of which there may be millions, and the line of each.

    The newest are in a dict.  When it is full they move to a temporary database on disk.
    """

    def __init__(self) -> None:
        self._recent: dict[str, int] = {}
        self._old = SpilledTable("the ids read so far")

    def add(self, request_id: str, line_number: int) -> int | None:
        """Add the id and return None, or return the line that has it already."""
        line = self.find(request_id)
        if line is None:
            self._recent[request_id] = line_number
            if len(self._recent) >= MAX_RECENT:
                self._old.add(self._recent)
        return line

    def find(self, request_id: str) -> int | None:
        line = self._recent.get(request_id)
        if line is None and self._old:
            line = self._old.find(request_id)
        return line


class ReadLine(NamedTuple):
    """A line with its number, and the request in it."""

    number: int
    text: bytes
    parsed: Line


class LineArrivals:
    """The arrival times of the lines of a file, in 16 bytes each: they count the queue of a run.

    Lines are added, and taken, in the order of their arrival; each counts its outputs.  The arrival
    of a later turn of a session is not known, as it arrives when the turn before it has ended.
    """

    def __init__(self) -> None:
        self._times, self._totals = array("d"), array("q")
        self._num_taken = self._num_turns = 0
        self._sessions = set[str]()  # with a turn that was taken

    def add(self, time: float, count: int, *, is_turn: bool = False) -> None:
        """Add a line; is_turn: it is not the first one of its session."""
        if is_turn:
            self._num_turns += count
        elif self._times and self._times[-1] == time:
            self._totals[-1] += count
        else:
            self._totals.append(count + self._totals[-1] if self._totals else count)
            self._times.append(time)

    def take(self, line: Line) -> None:
        if not isinstance(line, ParsedLine):
            return
        session, count = line.request.session, num_queued_as(line.request)
        if session in self._sessions:
            self._num_turns -= count
            return
        self._num_taken += count
        if session is not None:
            self._sessions.add(session)

    def left(self, now: float) -> Unread:
        place = bisect_right(self._times, now)
        queued = max((self._totals[place - 1] if place else 0) - self._num_taken, 0)
        total = self._totals[-1] if self._totals else 0
        return Unread(queued, total - self._num_taken - queued + self._num_turns)


class SessionArrivals:
    """The earliest arrival of requests: a turn of a session not before the turns before it."""

    def __init__(self) -> None:
        self._sessions: dict[str, float] = {}

    def is_turn(self, request: Request) -> bool:
        return request.session in self._sessions

    def time_of(self, request: Request) -> float:
        if request.session is None:
            return request.arrival_time
        time = max(request.arrival_time, self._sessions.get(request.session, 0.0))
        self._sessions[request.session] = time
        return time


Arrival = Literal["file", "pipe", "any"]
Reread = tuple[int, int, bytes, int, int]
"""Index, number, text and checksum of a line, and the number of an earlier line with its id."""


class Survey:
    """Compares each line with the lines before it: ids, and times of arrival.

    num_read: lines so far.  duplicates: index of a line -> number of the earlier line with its id.
    Of a file, which may be read again, it also keeps:
    checksums: of each line, 4 bytes, 0 for a bad one.  arrivals: as long as the file is_in_order.

    place_of: see OpenInput.  arrival: "file", "pipe", where going back is a problem, or "any".
    """

    def __init__(self, place_of: PlaceOf, arrival: Arrival) -> None:
        self.num_read, self.duplicates = 0, dict[int, int]()
        self.checksums, self.arrivals = array("I"), LineArrivals()
        self.is_in_order, self.last_arrival = True, 0.0
        self._place_of, self._arrival, self._last_number = place_of, arrival, 0
        self._ids, self._times = IdRegistry(), SessionArrivals()

    def add(self, number: int, text: bytes, line: Line) -> Line:
        """Return the line, or the problem that it has after those before it.

        Raises:
            InputError: the input contains something other than requests.
        """
        index, last_number = self.num_read, self._last_number
        self.num_read, self._last_number = index + 1, number
        if isinstance(line, BadLine):
            name, _ = self._place_of(number)
            if not index or name != self._place_of(last_number)[0]:
                check_kind(text, name)
        elif (first := self._ids.add(id_of(line), number)) is not None:
            self.duplicates[index] = first
            line = id_given_before(line, text, number, first)
        elif self._arrival != "any":
            request, last = line.request, self.last_arrival
            is_turn, arrival = self._times.is_turn(request), self._times.time_of(request)
            if arrival < last and self._arrival == "pipe":
                return arrival_goes_back(line, text, number, last)
            self.is_in_order &= arrival >= last
            self.last_arrival = arrival
            if self._arrival == "file" and self.is_in_order:
                self.arrivals.add(arrival, num_queued_as(request), is_turn=is_turn)
        if self._arrival == "file":
            self.checksums.append(checksum_of(text, line))
        return line

    def end(self) -> None:
        """Free the memory of the ids: no more lines will be added."""
        self._ids = IdRegistry()

    def read_again(self, lines: LineReader) -> Iterator[Reread]:
        index, num_lines = 0, len(self.checksums)
        while index < num_lines:
            numbers, texts = lines.read_block(min(BLOCK_LINES, num_lines - index))
            if not texts:
                raise InputError("the input has become shorter while it was read")
            for number, text in zip(numbers, texts, strict=True):
                yield index, number, text, self.checksums[index], self.duplicates.get(index, 0)
                index += 1


class RequestReader:
    """Parses lines, and compares each with those before it.

    Raises, when it is iterated over:
        InputError: the input is damaged or gone, or contains something other than requests.
    """

    def __init__(self, lines: LineReader, parser: RequestParser, arrival: Arrival = "any") -> None:
        self.lines, self.survey = lines, Survey(lines.place_of, arrival)
        self._parser = parser

    def __iter__(self) -> Iterator[ReadLine]:
        for block in self.blocks():
            yield from block

    def blocks(self) -> Iterator[list[ReadLine]]:
        """Yield the lines in blocks; a block of a pipe has the lines that have come."""
        parser, survey = self._parser, self.survey
        while (block := self.lines.read_block(_PARSED_LINES)).texts:
            lines = []
            for number, text in zip(*block, strict=True):
                parsed = survey.add(number, text, parse_line(parser, text, number))
                lines.append(ReadLine(number, text, parsed))
            yield lines


def check_kind(first_line: bytes, name: str) -> None:
    """Raise an InputError if the first line, which is not a request, is the output of a run."""
    found = why_no_lines(first_line, name)
    if found is not None:
        raise InputError(f"{name} {found}")
    is_row = False  # of the output of an OpenAI batch, whichever server wrote it
    with suppress(ValueError, RecursionError):
        fields = msgspec.json.decode(first_line, type=dict[str, Any])
        is_row = {"custom_id", "response"} <= fields.keys()
    if is_row or is_result(first_line) or is_trace(first_line):
        found = "trace" if is_trace(first_line) else "results"
        raise InputError(
            f"{name} contains the {found} of a run, not requests: pass the original requests file"
        )


def read_requests(
    source: OpenInput, capabilities: ModelCapabilities, color: ColorChoice, what_now: str
) -> list[Request]:
    """Return all requests of an input, and print its problems.

    Raises:
        InvalidInput: some lines are bad; its message ends in `what_now`.
        InputError: the input cannot be read.
    """
    report = ProblemReport(source.name, color)
    reader = RequestReader(source.lines(), RequestParser(capabilities))
    found = []
    for line in reader:
        if isinstance(line.parsed, ParsedLine):
            found.append(line.parsed.request)
        else:
            report.add(line.parsed)
    say(source.take_notes() + report.closing())
    if report.num_lines:
        raise InvalidInput(report, reader.survey.num_read, what_now)
    return found


class LineParser:
    """Parses lines that were parsed before, when they had a certain checksum."""

    def __init__(self, parser: RequestParser) -> None:
        self._parser = parser
        self._decode = msgspec.json.Decoder(Request).decode

    def parse_again(self, line: bytes, number: int, checksum: int, first_number: int = 0) -> Line:
        """Return the request in `line`; checksum: 0 for a bad line.

        A known request is not checked again, unless fields may have other spellings.
        first_number: the earlier line with the same id, or 0.

        Raises:
            InputError: the line was a request, and has changed.
        """
        if not checksum:
            parsed = parse_line(self._parser, line, number)
            if not first_number or isinstance(parsed, BadLine):
                return parsed
            return id_given_before(parsed, line, number, first_number)
        if crc32(line) != checksum:
            raise InputError(f"line {number} of the input has changed since the start")
        if self._parser.is_respelling:
            return self._parser.parse(line, number)
        try:
            request = self._decode(line)
        except (ValueError, RecursionError):
            return self._parser.parse(line, number)
        return ParsedLine(request if request.id is not None else replace(request, id=str(number)))


def checksum_of(line: bytes, parsed: Line) -> int:
    return crc32(line) if isinstance(parsed, ParsedLine) else 0


def parse_line(parser: RequestParser, line: bytes, number: int) -> Line:
    if len(line) <= MAX_LINE_BYTES:
        return parser.parse(line, number)
    from batcher.requests.json_spans import TextSpan  # noqa: PLC0415 - rare
    from batcher.requests.problems import make_problem  # noqa: PLC0415 - as above

    message = f"the line has more than {MAX_LINE_BYTES // 2**20} MiB, the maximum"
    problem = FieldProblem("line-too-long", (), message)
    start = line[:2000].decode(errors="replace")
    return BadLine(str(number), [make_problem(problem, number, start, TextSpan(0, 1))])


def id_of(parsed: ParsedLine) -> str:
    return parsed.request.id  # type: ignore[return-value]  # see above


def id_given_before(parsed: ParsedLine, line: bytes, number: int, first: int) -> BadLine:
    message = f"id `{id_of(parsed)}` is already used on line {first}"
    return _bad(parsed, FieldProblem("duplicate-id", ("id",), message), line, number)


def arrival_goes_back(parsed: ParsedLine, line: bytes, number: int, last: float) -> BadLine:
    message = f"arrival_time goes back from {last:g} to {parsed.request.arrival_time:g}"
    hint = "sort the requests by arrival_time, or pass them in a file"
    problem = FieldProblem("arrival-order", ("arrival_time",), message, hint)
    return _bad(parsed, problem, line, number)


def _bad(parsed: ParsedLine, problem: FieldProblem, line: bytes, number: int) -> BadLine:
    from batcher.requests.problems import place_problem  # noqa: PLC0415 - as above

    return BadLine(id_of(parsed), [place_problem(problem, line, number)], parsed.form)


# -- requests, in the order of arrival


class Source:
    """The requests of a run.

    has_ended: next() has no more lines.  input_index: of the line that it returned last.
    reason: why its requests arrive when they do.  total: the number of lines, if known.
    arrivals: of all lines, if known.
    """

    has_ended, input_index = False, -1
    reason: ArriveReason = "input"
    total: int | None = None
    arrivals: LineArrivals | None = None

    def upcoming(self, now: float, num: int) -> list[str]:  # noqa: ARG002 - see FileSource
        """Return the ids of the next `num` requests, as far as they are known to have arrived."""
        return []

    def took(self, line: Line) -> None:
        if self.arrivals is not None:
            self.arrivals.take(line)

    def backlog(self, now: float) -> Unread:
        return NOTHING_UNREAD if self.arrivals is None else self.arrivals.left(now)

    def find(self, text: str) -> str | None:  # noqa: ARG002 - see FileSource
        """Return the upcoming id in memory that is `text`, or the first that contains it."""
        return None

    @property
    def is_in_memory(self) -> bool:
        return self.has_ended

    def next(self) -> Line | None:
        """Return the next line; None at the end, and while a followed pipe has none."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until next() may have a line, or the input has ended."""


class FileSource(Source):
    """A file, which is surveyed first, to be read in the order of arrival.

    The survey keeps the first lines as parsed requests, and a checksum of each line after them.  If
    the lines are not in the order of their arrival, a second pass notes the offset of each, 52
    bytes per line, and each is looked up.

    Raises:
        InputError: the file cannot be read.
        InvalidInput: the file has bad lines, and they are not to be skipped.
    """

    def __init__(
        self, requests: OpenInput, parser: RequestParser, report: ProblemReport, *, keep_going: bool
    ) -> None:
        self._head, num_bytes = deque[Line](), 0
        reader = RequestReader(requests.lines(), parser, "file")
        survey = self._survey = reader.survey
        for _, text, line in reader:
            if isinstance(line, BadLine):
                report.add(line)
            if num_bytes < _HEAD_BYTES:
                self._head.append(line)
                num_bytes += len(text)
        if report.num_lines and not keep_going:
            what_now = "nothing decoded. --keep-going to skip them."
            raise InvalidInput(report, survey.num_read, what_now)
        survey.end()
        self.total, self.arrivals = survey.num_read, survey.arrivals
        self._parser = LineParser(parser)
        if survey.is_in_order:
            self._order: Iterator[int] = iter(range(self.total))
            self._fits_in_memory = len(self._head) == self.total
            again = survey.read_again(requests.lines())
            self._rest: Iterator[Reread] = islice(again, len(self._head), None)
        else:
            self._head.clear()
            self._fits_in_memory = False
            self._look_up(requests.seekable_lines())

    def _look_up(self, lines: LineReader) -> None:
        """Note the offset of each line, and sort them by arrival time, then by number.

        A bad line arrives with the line before it.
        """
        import numpy as np  # noqa: PLC0415 - only for a file that is out of order

        survey = self._survey
        checksums, duplicates = survey.checksums, survey.duplicates
        starts, numbers, counts, arrivals = array("q"), array("q"), array("q"), array("d")
        times, arrival = SessionArrivals(), 0.0
        for number, line in lines:
            index = len(arrivals)
            if index == self.total:
                break  # the file has grown
            parsed = self._parser.parse_again(
                line, number, checksums[index], duplicates.get(index, 0)
            )
            count = 0
            if isinstance(parsed, ParsedLine):
                sign = -1 if times.is_turn(parsed.request) else 1
                count = sign * num_queued_as(parsed.request)
                arrival = times.time_of(parsed.request)
            arrivals.append(arrival)
            counts.append(count)  # negative for turns
            starts.append(lines.start)
            numbers.append(number)
        found = np.argsort(np.frombuffer(arrivals), kind="stable")
        order = array("q", found.astype(np.int64).tobytes())
        self.arrivals, self.total = LineArrivals(), len(order)
        for index in order:
            self.arrivals.add(arrivals[index], abs(counts[index]), is_turn=counts[index] < 0)
        self._order = iter(order)
        self._rest = (
            (i, numbers[i], lines.read_at(starts[i]), checksums[i], duplicates.get(i, 0))
            for i in order
        )

    @property
    def is_in_memory(self) -> bool:
        return self._fits_in_memory or self.has_ended

    def upcoming(self, now: float, num: int) -> list[str]:
        names, first = list[str](), self.input_index + 1
        for index, line in enumerate(islice(self._head, num), first):
            if isinstance(line, ParsedLine):
                if not has_arrived(line.request, now):
                    break
                names.append(name_of(line, index))
        return names

    def find(self, text: str) -> str | None:
        first = self.input_index + 1
        names = [name_of(line, index) for index, line in enumerate(list(self._head), first)]
        return text if text in names else next((name for name in names if text in name), None)

    def next(self) -> Line | None:
        index = next(self._order, None)
        if index is None:
            self.has_ended = True
            return None
        self.input_index = index
        if self._head:
            return self._head.popleft()
        _, number, line, checksum, first_number = next(self._rest)
        return self._parser.parse_again(line, number, checksum, first_number)


Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """A thread that reads a pipe, item by item; it calls `wake` at each."""

    def __init__(self, items: Iterable[Item], wake: Callable[[], None]) -> None:
        import queue  # noqa: PLC0415 - only for pipes that are followed, as is the next
        import threading  # noqa: PLC0415 - as above

        self._items, self._wake = items, wake
        self._first: list[Item | Exception | None] = []
        self._queue: queue.Queue[Item | Exception | None] = queue.Queue(1)
        threading.Thread(target=self._read_all, daemon=True).start()

    @property
    def is_ready(self) -> bool:
        """Whether `take` returns, or raises, at once."""
        return bool(self._first) or not self._queue.empty()

    def wait(self) -> None:
        if not self._first:
            self._first.append(self._queue.get())

    def take(self) -> Item | None:
        """Wait for the next item and return it, None at the end; raise the error of the reader."""
        self.wait()
        item = self._first.pop()
        if isinstance(item, Exception):
            raise item
        return item

    def _read_all(self) -> None:
        end = None
        try:
            for item in self._items:
                self._queue.put(item)
                self._wake()
        except Exception as error:  # raised again by `take`: # noqa: BLE001
            end = error
        self._queue.put(end)
        self._wake()


class PipeSource(Source):
    """A pipe: next() waits for the next line, so the run is the same as for a file.

    follow: called when more has come, which a thread reads; then next() never waits.
    """

    def __init__(
        self,
        reader: RequestReader,
        waiting: Waiting = nullcontext,
        follow: Callable[[], None] | None = None,
    ) -> None:
        self._blocks, self._waiting = reader.blocks(), waiting
        self._ahead = None if follow is None else ReadAhead(self._blocks, follow)
        self._lines = deque[ReadLine]()
        if follow is not None:
            self.reason = "follow"

    def next(self) -> Line | None:
        if not self._lines:
            if self._ahead is None:
                block = next(self._blocks, None)
            elif self._ahead.is_ready:
                block = self._ahead.take()
            else:
                return None
            if block is None:
                self.has_ended = True
                return None
            self._lines.extend(block)
        self.input_index += 1
        return self._lines.popleft().parsed

    def wait(self) -> None:
        if self._ahead is not None:
            with self._waiting():
                self._ahead.wait()


def has_arrived(request: Request, now: float) -> bool:
    """Return whether it waits for a slot; a turn may wait for the turn before it."""
    return request.session is None and request.arrival_time <= now


def name_of(line: Line, input_index: int) -> str:
    found = line.request.id if isinstance(line, ParsedLine) else line.id
    return str(input_index + 1) if found is None else found


def open_source(
    requests: OpenInput,
    parser: RequestParser,
    report: ProblemReport,
    *,
    keep_going: bool,
    follow: bool,
    waiting: Waiting,
    wake: Callable[[], None],
) -> Source:
    """Return the source for the input; a file is surveyed, and its problems reported.

    wake: called, by another thread, when more of a followed pipe has come.
    """
    if follow:
        return PipeSource(RequestReader(requests.lines(), parser), waiting, wake)
    if not requests.is_file:
        return PipeSource(RequestReader(requests.lines(waiting), parser, "pipe"))
    with waiting():
        return FileSource(requests, parser, report, keep_going=keep_going)
