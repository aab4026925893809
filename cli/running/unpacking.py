"""Compressed input: what it is by its first bytes, and gzip unpacked as it is read.

Rule: the content tells, never the name, and no more of it is in memory than is asked for.
"""

import io
import os
import shlex
from typing import BinaryIO

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
