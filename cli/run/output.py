"""Where lines go: files, .gz files, stdout.

Rule: only whole lines are written; what did not get out whole is taken back where that can be.
"""

import errno
import io
import os
import stat
import zlib
from pathlib import Path
from typing import Protocol

from batcher.errors import BatchdecodeError

from ..errors import WriteError, reason_of
from ..screen.terminal import printable_json
from ..signals import open_to_write, write_some
from .stdout import stdout_descriptor
from .urls import is_url

NAMES_OF_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


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
        self.size = status.st_size  # of the file, as far as we know

    def write(self, lines: bytes) -> None:
        """Write all of `lines`, or nothing of them to a file."""
        start = 0
        try:
            while start < len(lines):
                if self.is_file:
                    start += self._raw.write(memoryview(lines)[start:]) or 0
                else:
                    start += write_some(self._raw.fileno(), lines, start)
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.is_file:  # cut off the torn end
                self._raw.seek(-start, os.SEEK_CUR)
                self._raw.truncate()
            raise WriteError(self.name, error) from error
        self.size += start

    def close(self) -> None:
        """Close the descriptor, if it is the sink's own."""
        self._raw.close()

    def check_size(self, num_bytes: int) -> None:
        """Make sure that the file has as many bytes as were written.

        Raises:
            OSError: it has others.
        """
        if num_bytes < self.size:
            what = f"{self.size - num_bytes:,} bytes were cut off while it was written"
            raise OSError(errno.EIO, what)
        if num_bytes > self.size:
            what = f"others have written {num_bytes - self.size:,} bytes into it meanwhile"
            raise OSError(errno.EIO, what)


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


def open_sink(path: str, *, append: bool = False) -> Sink:
    """Return a sink for a pipe, a device or a URL, which gets all at its end; see OutFile.

    Raises:
        OutputError: the file cannot be opened.
    """
    if is_url(path):
        from .storing import StoredSink  # noqa: PLC0415 - few files are elsewhere

        return StoredSink(path)

    def open_at_end(path: str, flags: int) -> int:  # if others cut the file, that leaves no hole
        return open_to_write(path, flags | os.O_APPEND)

    try:
        raw = io.FileIO(opened_as(path), "a" if append else "w", opener=open_at_end)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path}: {reason_of(error)}") from error
    return packed(FileSink(raw, path), path, is_new=not append)


def packed(file: FileSink, path: str, *, is_new: bool) -> Sink:
    """Return a sink for the open file `path`, compressed if its name ends in .gz."""
    return GzipSink(file, is_needed=is_new) if path.endswith(".gz") else file


def opened_as(path: str) -> str:
    """Return where `path` is: stdout may not be descriptor 1 for now, see stdout.py."""
    return f"/dev/fd/{stdout_descriptor()}" if path in NAMES_OF_STDOUT else path


def may_be_file(path: str) -> bool:
    """Return whether writing to `path` changes a file, or would have to."""
    try:
        mode = Path(opened_as(path)).stat().st_mode
    except (OSError, ValueError):
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def stdout_sink() -> Sink:
    """Return a sink for stdout."""
    return FileSink(io.FileIO(stdout_descriptor(), "w", closefd=False), "stdout")


def stdout_json_sink() -> Sink:
    """Return a sink for JSON on stdout."""
    sink = stdout_sink()
    return TerminalJson(sink) if os.isatty(stdout_descriptor()) else sink
