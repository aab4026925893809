"""Messages as one stream of bytes, each with its length before it, which any pieces bring over."""

import socket
import struct
from collections.abc import Callable
from typing import Generic, TypeVar

from .messages import Instruction, Report, encode

_LENGTH = struct.Struct("<Q")
CHUNK_BYTES = 2**18

AnyMessage = TypeVar("AnyMessage")


def frame_of(message: Instruction | Report) -> bytes:
    """Return a message as it stands in the stream."""
    encoded = encode(message)
    return _LENGTH.pack(len(encoded)) + encoded


class Inbox(Generic[AnyMessage]):
    """What has come of a stream, message by message; decode: makes one of its bytes."""

    def __init__(self, decode: Callable[[memoryview], AnyMessage]) -> None:
        self._decode = decode
        self._buffer, self._end = bytearray(CHUNK_BYTES), 0

    def read(self, source: socket.socket) -> int:
        """Take in what has come through a socket; return how many bytes, 0 if no more will come.

        Raises:
            OSError: nothing has come yet, or nothing more will.
        """
        self._make_room(1)
        with memoryview(self._buffer) as buffer:
            num_read = source.recv_into(buffer[self._end :])
        self._end += num_read
        return num_read

    def add(self, piece: bytes) -> None:
        """Take in the piece that comes next."""
        self._make_room(len(piece))
        self._buffer[self._end : self._end + len(piece)] = piece
        self._end += len(piece)

    def take(self) -> list[AnyMessage]:
        """Return the messages that are whole by now."""
        found, start = [], 0
        with memoryview(self._buffer) as buffer:
            while self._end - start >= _LENGTH.size:
                first = start + _LENGTH.size
                end = first + _LENGTH.unpack_from(buffer, start)[0]
                if end > self._end:
                    break
                found.append(self._decode(buffer[first:end]))
                start = end
            if start:
                self._end -= start
                buffer[: self._end] = buffer[start : start + self._end]
        return found

    def _make_room(self, num_bytes: int) -> None:
        """Let there be room for so many bytes more: for all there are again, if for too few."""
        if self._end + num_bytes > len(self._buffer):
            self._buffer.extend(bytes(max(len(self._buffer), num_bytes)))
