"""Where lines go: files, .gz files, stdout, and the order they are put in before.

Rule: only whole lines are written; what did not get out whole is taken back where that can be.
"""

import errno
import io
import os
import select
import stat
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

from batcher.errors import BatchdecodeError
from batcher.events import Event, TokenEvent
from batcher.formats.stream import encode_tokens
from batcher.formats.trace import encode_events

from ..errors import WriteError
from ..screen.cells import printable_json
from .answers import Answer
from .input_order import InputOrder
from .stdout import stdout_descriptor

_FLUSH_SECONDS = 0.2
_MAX_BUFFERED = 1000
_NAMES_OF_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


class OutputError(BatchdecodeError):
    """A file cannot be written, or should not be."""


class ResumeError(BatchdecodeError):
    """What is there cannot be continued."""


class Sink(Protocol):
    """Takes whole lines.

    is_file: they go into a regular file as they are, and what did not get out whole leaves nothing.
    """

    is_file: bool

    def write(self, lines: bytes) -> None:
        """Pass `lines` on at once.

        Raises:
            WriteError: there is no room for them, or nobody to take them.
            BrokenPipeError: whoever read them has gone.
        """

    def close(self) -> None:
        """Write what ends the file."""


class FileSink:
    """Writes to a descriptor at once; a file ends with a whole line even when the disk is full."""

    def __init__(self, raw: io.FileIO, name: str) -> None:
        self.name = name
        self._raw = raw
        status = os.fstat(raw.fileno())
        self.is_file = stat.S_ISREG(status.st_mode)
        self._size = status.st_size  # of the file, as far as we know

    def write(self, lines: bytes) -> None:
        """Write all of `lines`, or nothing of them to a file."""
        rest = memoryview(lines)
        try:
            while rest:
                num_written = self._raw.write(rest)
                if num_written is None:  # somebody has made it non-blocking
                    select.select([], [self._raw], [])
                else:
                    rest = rest[num_written:]
                    self._size += num_written
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.is_file:
                self._take_back(len(lines) - len(rest))
            raise WriteError(self.name, error) from error

    def close(self) -> None:
        """Close the descriptor.

        Raises:
            WriteError: some of what was written is no longer in the file.
        """
        is_own = self.is_file and self._raw.closefd  # into stdout, others may write, too
        num_lost = self._size - os.fstat(self._raw.fileno()).st_size if is_own else 0
        self._raw.close()
        if num_lost > 0:
            what = f"{num_lost:,} bytes were cut off while it was written"
            raise WriteError(self.name, OSError(errno.EIO, what))

    def _take_back(self, num_bytes: int) -> None:
        """Cut off the torn end that a failed write has left."""
        self._size -= num_bytes
        self._raw.seek(-num_bytes, os.SEEK_CUR)
        self._raw.truncate()


class GzipSink:
    """Compresses what goes to another sink; after every write the file can be read up to there.

    is_needed: whether something must be written in any case, as in a new file.
    """

    is_file = False

    def __init__(self, sink: Sink, *, is_needed: bool) -> None:
        self._sink, self._is_needed = sink, is_needed
        # 31 gives the header of a .gz file, without a time: the same lines are the same bytes.
        self._compressor = zlib.compressobj(wbits=31)

    def write(self, lines: bytes) -> None:
        """Compress `lines` and pass them on."""
        self._is_needed = True
        packed = self._compressor.compress(lines)
        self._sink.write(packed + self._compressor.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        """End the compressed data, and close the other sink."""
        if self._is_needed:
            self._sink.write(self._compressor.flush(zlib.Z_FINISH))
        self._sink.close()


class TerminalJson:
    """Writes JSON to a terminal, with escapes for what would move the cursor or reorder a line."""

    is_file = False

    def __init__(self, terminal: Sink) -> None:
        self._terminal = terminal

    def write(self, lines: bytes) -> None:
        """Write `lines`, which are JSON, such that they say the same."""
        self._terminal.write(printable_json(lines.decode()).encode())

    def close(self) -> None:
        """Close the terminal."""
        self._terminal.close()


class ResultWriter:
    """Writes answers as they come, or in the order of the input.

    num_written: the lines of answers that are out.  num_token_events: those of a stream.
    """

    def __init__(
        self, sink: Sink, encode: Callable[[Answer], bytes], order: InputOrder | None = None
    ) -> None:
        self.num_written = self.num_token_events = 0
        self._sink, self._encode, self._order = sink, encode, order
        self._parts: dict[int, list[Answer]] = {}  # by place, of requests that are not complete

    def write(self, answers: Sequence[Answer]) -> None:
        """Write the answers of a step, in lines; in the order of the input, those whose turn it is.

        Raises:
            WriteError, BrokenPipeError: see Sink.
        """
        if self._order is None:
            lines = [self._encode(answer) for answer in answers]
        else:
            lines = []
            for answer in answers:
                lines += self._put(self._order, answer)
        self._write_lines(lines)

    def put_back(self, place: int, lines: bytes) -> None:
        """Take in lines of an earlier run, whose turn is that of this place in the input.

        Raises:
            WriteError, BrokenPipeError: see Sink.
        """
        if self._order is not None:
            self._write_lines(self._order.put(place, lines))

    def write_tokens(self, tokens: Sequence[TokenEvent]) -> None:
        """Write the token events of a step, which go before its answers.

        Raises:
            WriteError, BrokenPipeError: see Sink.
        """
        self._sink.write(encode_tokens(tokens))
        self.num_token_events += len(tokens)

    def finish(self) -> None:
        """Write what is still held back; no answer will come any more."""
        if self._order is not None:
            for place, parts in self._parts.items():
                self._write_lines(self._order.put(place, self._join(parts)))
            for lines in self._order.rest():
                self._write_lines([lines])

    def close(self) -> None:
        """End the file; what is held back for its turn is lost."""
        if self._order is not None:
            self._order.close()
        self._sink.close()

    def _put(self, order: InputOrder, answer: Answer) -> list[bytes]:
        """Return the lines whose turn has come with `answer`, those of a request together."""
        parts = self._parts.pop(answer.place, [])
        parts.append(answer)
        if answer.is_last:
            return order.put(answer.place, self._join(parts))
        self._parts[answer.place] = parts
        return []

    def _join(self, answers: list[Answer]) -> bytes:
        """Return the lines of all `answers` to one request, in their order."""
        answers.sort(key=lambda answer: answer.rank)
        return b"".join(map(self._encode, answers))

    def _write_lines(self, lines: list[bytes]) -> None:
        """Write `lines` at once; if there is no room for all, those there is room for."""
        if not lines:
            return
        joined = b"".join(lines)
        try:
            self._sink.write(joined)
        except WriteError:
            if not self._sink.is_file:
                raise
            for line in lines:
                self._sink.write(line)
                self.num_written += line.count(b"\n")
        else:
            self.num_written += joined.count(b"\n")


class TraceWriter:
    """Writes events soon after they happen: at once would cost a system call for each step."""

    def __init__(self, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._clock = sink, clock
        self._buffer: list[Event] = []
        self._last_flush = clock()

    def write(self, events: Sequence[Event]) -> None:
        """Write `events`, or keep them for a moment."""
        self._buffer += events
        if len(self._buffer) >= _MAX_BUFFERED or self._clock() - self._last_flush > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was kept.

        Raises:
            WriteError, BrokenPipeError: see Sink.
        """
        if self._buffer:
            lines = encode_events(self._buffer)
            self._buffer.clear()
            self._sink.write(lines)
        self._last_flush = self._clock()

    def close(self) -> None:
        """Write everything and end the file."""
        self.flush()
        self._sink.close()


def open_sink(path: str, *, append: bool = False) -> Sink:
    """Return a sink for `path`, compressed if its name ends in .gz.

    Raises:
        OutputError: the file cannot be opened.
    """
    try:
        raw = io.FileIO(_opened_as(path), "a" if append else "w", opener=_open_at_end)
        file = FileSink(raw, path)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path}: {_reason(error)}") from error
    return GzipSink(file, is_needed=not append) if path.endswith(".gz") else file


def _open_at_end(path: str, flags: int) -> int:
    """Open a file that is always written to at its end: if others cut it, that leaves no hole."""
    return os.open(path, flags | os.O_APPEND, 0o666)


def _opened_as(path: str) -> str:
    """Return where `path` is: stdout may not be descriptor 1 for now, see stdout.py."""
    return f"/dev/fd/{stdout_descriptor()}" if path in _NAMES_OF_STDOUT else path


def stdout_sink() -> Sink:
    """Return a sink for stdout."""
    return FileSink(io.FileIO(stdout_descriptor(), "w", closefd=False), "stdout")


def stdout_json_sink() -> Sink:
    """Return a sink for JSON on stdout."""
    sink = stdout_sink()
    return TerminalJson(sink) if os.isatty(stdout_descriptor()) else sink


def _reason(error: OSError | ValueError) -> str:
    """Return what went wrong, without Python's decoration."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
