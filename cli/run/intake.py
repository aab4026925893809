"""The input, opened and read line by line: files and pipes, packed or not.

Rule: a line is held in memory only up to MAX_LINE_BYTES, and the input never as a whole.  Its
content tells whether it is packed, never its name.
"""

import io
import os
import select
import shlex
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import BinaryIO, NamedTuple, Self

from batcher.errors import BatchdecodeError

from ..errors import reason_of
from ..screen.terminal import printable_lines
from .urls import is_url, shown

MAX_LINE_BYTES = 64 * 2**20
MAX_SKIPPED_BYTES = 2**30  # of a line that is too long, before it counts as endless
_BOM = b"\xef\xbb\xbf"

Waiting = Callable[[], AbstractContextManager[None]]
_Buffered = io.BufferedReader | io.BufferedRandom


class InputError(BatchdecodeError):
    """The input cannot be opened, or not be read to its end."""


class CutOffError(InputError):
    """A packed input ends too early; what came before was given."""


class OpenInput:
    """An input that is open, and closed when it is left as a context.

    name: as messages call it.  is_file: it can be read again from its start, and anywhere in it.
    is_terminal: somebody types it.
    is_packed: such a file is compressed by gzip; of a pipe it is not known.
    """

    def __init__(self, raw: io.FileIO, name: str) -> None:
        self.name = name
        self.status = os.fstat(raw.fileno())
        self.is_file = stat.S_ISREG(self.status.st_mode) and raw.tell() == 0
        self.is_terminal = raw.isatty()
        self.is_packed = self.is_file and os.pread(raw.fileno(), len(GZIP), 0) == GZIP
        self._notes: list[str] = []
        self._num_taken = 0
        self._raw = raw
        self._stream: io.BufferedReader | None = None
        self._unpacked: BinaryIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The reader of a pipe is left alone: a thread may be waiting in it, and would block us.
        for file in (self._unpacked, self._stream if self.is_file else None, self._raw):
            if file is not None:
                file.close()

    def lines(self, waiting: Waiting = nullcontext) -> "LineReader":
        """Return a reader of the whole input; of a pipe, the one and only.

        `waiting` is entered whenever a pipe may have nothing to give yet.
        """
        stream = self._from_start(waiting)
        return LineReader(_unpacked(stream) if self.is_packed else stream, self.name, self._notes)

    def seekable_lines(self) -> "LineReader":
        """Return a reader that can go to any line; a packed file is unpacked into a temporary one.

        Raises:
            InputError: the packed file is damaged, or there is no room to unpack it.
        """
        if not self.is_packed:
            return self.lines()
        import tempfile  # noqa: PLC0415 - only for a packed file that is out of order

        unpacked = self._unpacked = tempfile.TemporaryFile()  # noqa: SIM115 - closed with us
        packed = _unpacked(self._from_start())
        try:
            while chunk := packed.read(CHUNK_BYTES):
                unpacked.write(chunk)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"cannot unpack {self.name}: {_reason(error)}") from error
        unpacked.seek(0)
        return LineReader(unpacked, self.name, self._notes)

    def digest(self) -> str:
        """Return the SHA-256 of the file's bytes, in hexadecimal."""
        import hashlib  # noqa: PLC0415 - only for runs that can be resumed

        return hashlib.file_digest(self._from_start(), "sha256").hexdigest()

    def _from_start(self, waiting: Waiting = nullcontext) -> io.BufferedReader:
        """Return the input's bytes, a file's from the first one on."""
        if self._stream is None:
            raw: io.RawIOBase = self._raw
            if not self.is_file:
                raw = PerhapsPacked(PatientPipe(self._raw, waiting))
            self._stream = io.BufferedReader(raw, CHUNK_BYTES)
        if self.is_file:
            self._stream.seek(0)
        return self._stream

    def take_notes(self) -> str:
        """Return what a person should know about the input as a whole and was not told yet."""
        notes = self._notes[self._num_taken :]
        self._num_taken += len(notes)
        return "".join(f"warning: {printable_lines(note)}\n" for note in notes)


def open_input(path: str | None, waiting: Waiting) -> OpenInput:
    """Return the opened input; `-` or None is stdin.

    waiting: entered while a FIFO opens, or what is at a URL is copied.

    Raises:
        InputError: there is no such input, or it cannot be read.
    """
    if path is not None and is_url(path):
        from .storing import fetched  # noqa: PLC0415 - few inputs are elsewhere

        with waiting():
            return OpenInput(fetched(path), shown(path))
    name = "<stdin>" if path in (None, "-") else str(path)
    try:
        if path is None or path == "-":
            return OpenInput(io.FileIO(0, closefd=False), name)
        with waiting():  # a FIFO opens when its other end does
            return OpenInput(io.FileIO(path), name)
    except (OSError, ValueError) as error:
        from batcher.planning.streamed import PREFIX as STREAMED  # noqa: PLC0415 - heavy

        reason = _reason(error)
        if name.startswith(STREAMED):
            reason = (
                f"only compare and plan take {STREAMED}, whose requests have no prompts; "
                "batchdecode workload writes such a file"
            )
        raise InputError(f"cannot read {name}: {reason}") from error


def _unpacked(packed: io.BufferedReader) -> io.BufferedReader:
    """Return a buffered reader of what is compressed in `packed`."""
    unpacked: io.RawIOBase = Unpacked(packed)
    return io.BufferedReader(unpacked, CHUNK_BYTES)


class Block(NamedTuple):
    """Lines that follow one another, without blank ones, and the number of each."""

    numbers: Sequence[int]
    texts: list[bytes]


class LineReader:
    """Reads lines that are not blank, and keeps count.

    name: that of the input.  number: of the last line read, from 1.  start: its offset.
    num_blank: blank lines so far.
    notes: takes what is odd about the input as a whole.
    """

    def __init__(self, stream: _Buffered, name: str, notes: list[str]) -> None:
        self.name, self.number, self.start, self.num_blank = name, 0, 0, 0
        self._stream, self._notes = stream, notes
        self._next_start, self._is_cut = 0, False

    def read(self) -> bytes | None:
        """Return the next line that is not blank, None at the end.

        A line that is too long is cut to one byte more than MAX_LINE_BYTES, and skipped to its end
        only when the next line is read: it may have none.

        Raises:
            InputError: the input is damaged or gone, or a line has no end.
        """
        self._skip_rest()
        while line := self._readline(MAX_LINE_BYTES + 1):
            self.number += 1
            self.start = self._next_start
            self._next_start += len(line)
            self._is_cut = len(line) > MAX_LINE_BYTES and not line.endswith(b"\n")
            if self.number == 1:
                line = self._begin(line)
            if line and not line.isspace():
                return line
            self.num_blank += 1
        return None

    def read_block(self, max_lines: int) -> Block:
        """Return the lines that come next, at least one and none only at the end.

        They are those that are whole in the buffer, so a pipe is not waited for to send more; and
        none is too long, since the buffer is smaller than that.

        Raises:
            InputError: the input is damaged or gone.
        """
        self._skip_rest()
        while self.number:  # the first line may tell what the whole is
            texts = list(islice(io.BytesIO(self._peek()), max_lines))
            if texts and not texts[-1].endswith(b"\n"):
                texts.pop()
            if not texts:
                break
            num_bytes = sum(map(len, texts))
            self._stream.read(num_bytes)
            numbers = range(self.number + 1, self.number + 1 + len(texts))
            self.number += len(texts)
            self.start = self._next_start + num_bytes - len(texts[-1])
            self._next_start += num_bytes
            if not any(map(bytes.isspace, texts)):
                return Block(numbers, texts)
            filled = [n for n, text in zip(numbers, texts, strict=True) if not text.isspace()]
            self.num_blank += len(texts) - len(filled)
            if filled:
                return Block(filled, [texts[number - numbers[0]] for number in filled])
        text = self.read()
        return Block([], []) if text is None else Block([self.number], [text])

    def go_to(self, start: int, number: int) -> None:
        """Go on with line `number`, which starts at the offset `start`."""
        self._stream.seek(start)
        self._next_start, self.number, self._is_cut = start, number - 1, False

    def read_at(self, start: int) -> bytes:
        """Return the line that starts at the offset `start`.

        Raises:
            InputError: the input is damaged or gone.
        """
        self._stream.seek(start)
        return self._readline(MAX_LINE_BYTES + 1)

    def _begin(self, line: bytes) -> bytes:
        """Return the first line without what only tells how the rest is encoded.

        Raises:
            InputError: the rest is compressed.
        """
        compression = compression_of(line, self.name)
        if compression is not None:
            raise InputError(f"{self.name} {compression}")
        if line.startswith(_BOM):
            self._note(f"{self.name} begins with a byte order mark, which is skipped")
            self.start, line = len(_BOM), line[len(_BOM) :]
        return line

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _readline(self, max_bytes: int) -> bytes:
        try:
            return self._stream.readline(max_bytes)
        except (OSError, EOFError, zlib.error) as error:
            raise self._broken(error) from error

    def _peek(self) -> bytes:
        try:
            return self._stream.peek()
        except (OSError, EOFError, zlib.error) as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> InputError:
        """Return what the input is that cannot be read on."""
        kind = CutOffError if isinstance(error, EOFError) else InputError
        return kind(f"cannot read {self.name} after line {self.number}: {_reason(error)}")

    def _skip_rest(self) -> None:
        """Read on to the end of the last line, if that was cut."""
        num_skipped = 0
        while self._is_cut:
            part = self._readline(CHUNK_BYTES)
            self._next_start += len(part)
            num_skipped += len(part)
            self._is_cut = bool(part) and not part.endswith(b"\n")
            if num_skipped > MAX_SKIPPED_BYTES:
                limit = f"{MAX_SKIPPED_BYTES >> 30} GiB"
                raise InputError(
                    f"cannot read {self.name}: line {self.number} does not end within {limit}"
                )


def numbered(lines: LineReader) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are left, each with its number."""
    while (line := lines.read()) is not None:
        yield lines.number, line


class PatientPipe(io.RawIOBase):
    """A pipe that waits for its writer, in a way that a signal can break off."""

    def __init__(self, raw: io.FileIO, waiting: Waiting) -> None:
        self._raw, self._waiting = raw, waiting

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]  # any writable buffer
        """Wait for something to read into `buffer`; return how much it is, 0 at the end."""
        with self._waiting():
            while (num_read := self._raw.readinto(buffer)) is None:
                select.select([self._raw], [], [])  # somebody has made it non-blocking
            return num_read


def _reason(error: Exception) -> str:
    """Return what went wrong, without Python's decoration."""
    if isinstance(error, EOFError):
        return "the compressed data is cut off"
    if isinstance(error, zlib.error) or (isinstance(error, OSError) and error.errno is None):
        return "the compressed data is damaged"  # the latter is gzip's own
    return reason_of(error)


GZIP = b"\x1f\x8b"
CHUNK_BYTES = 2**20
_HEADER_BYTES = 16  # gzip asks for 10 at most
# What else may come: how it begins, what it is called, and what writes it to stdout.
_OTHERS = (
    (b"\x28\xb5\x2f\xfd", "zstd", "zstdcat"),
    (b"\xfd7zXZ\x00", "xz", "xzcat"),
    (b"BZh", "bzip2", "bzcat"),
    (b"\x04\x22\x4d\x18", "lz4", "lz4cat"),
    (b"PK\x03\x04", "zip", "unzip -p"),
    (GZIP, "gzip twice", "zcat"),
)


def compression_of(start: bytes, filename: str) -> str | None:
    """Return what to say of an input that begins so, if it is compressed; None if it is not."""
    file = "" if filename == "<stdin>" else f" {shlex.quote(filename)}"
    if start.startswith(b"PK\x03\x04") and b"[Content_Types].xml" in start[:256]:
        return "is an Office document, such as an Excel workbook: save it as CSV or text first"
    for magic, name, program in _OTHERS:
        if start.startswith(magic):
            how = f"JSON lines of it: {program}{file}"
            return f"is compressed with {name}; only gzip is unpacked. {how}"
    return None


class Unpacked(io.RawIOBase):
    """What gzip has packed in `packed`, in one member or several.

    Reading raises EOFError where it is cut off, zlib.error or BadGzipFile where it is damaged;
    what came before that was given.
    """

    def __init__(self, packed: "BinaryIO | _Packets") -> None:
        import gzip  # noqa: PLC0415 - only for what is compressed

        self._file = gzip.GzipFile(fileobj=packed, mode="rb")  # type: ignore[arg-type]  # all it asks for

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def seekable(self) -> bool:
        """Return whether the packed file is: going back is to unpack it anew."""
        return self._file.seekable()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to an offset of what is unpacked."""
        return self._file.seek(offset, whence)

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]  # any writable buffer
        """Read what there is of the next bytes: a pipe is not waited for to fill the buffer."""
        return self._file.readinto1(buffer)


class PerhapsPacked(io.RawIOBase):
    """A pipe that is unpacked if its first bytes say so; the first read waits for them."""

    def __init__(self, pipe: io.RawIOBase) -> None:
        self._pipe: io.BufferedReader = io.BufferedReader(pipe, CHUNK_BYTES)
        self._unpacked: Unpacked | None = None
        self._has_begun = False

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]  # any writable buffer
        """Read what there is of the next bytes."""
        if not self._has_begun:
            self._has_begun = True
            start = self._pipe.peek(len(GZIP))[: len(GZIP)]  # a pipe may give one byte alone
            if start and GZIP.startswith(start):
                self._unpacked = Unpacked(_Packets(self._pipe))
        if self._unpacked is not None:
            return self._unpacked.readinto(buffer)
        return self._pipe.readinto1(buffer)


class _Packets:
    """A pipe as gzip needs it: headers whole, and of the rest what there is."""

    def __init__(self, pipe: io.BufferedReader) -> None:
        self._pipe = pipe

    def read(self, size: int) -> bytes:
        """Return `size` bytes, or, if that is more than a header has, at least one of them."""
        return self._pipe.read(size) if size <= _HEADER_BYTES else self._pipe.read1(size)
