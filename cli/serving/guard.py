"""Connections as uvicorn serves them, with limits on the heads of requests, and their arrivals.

uvicorn waits for a head for ever, and takes one of any length.
"""

import asyncio
import time
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from batcher.serving.errors import BAD_REQUEST, HEADERS_TOO_LARGE, TIMEOUT, ApiError
from batcher.serving.http import ARRIVED

HEAD_SECONDS = 10.0
MAX_HEAD_BYTES = 64 * 2**10


class GuardedProtocol(HttpToolsProtocol):
    """Ends a connection whose client takes too long for a head, or sends too much of it.

    num_head_bytes: of the head that is coming, None while none is.
    """

    _num_head_bytes: int | None = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what has come, unless it is too much."""
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes is not None and self._num_head_bytes > MAX_HEAD_BYTES:
            message = f"the head of the request has more than {MAX_HEAD_BYTES:,} bytes"
            self._refuse(ApiError(HEADERS_TOO_LARGE, "headers-too-large", message))

    def on_message_begin(self) -> None:
        """Begin to count the bytes of a head that follows another request."""
        super().on_message_begin()
        self.scope["state"][ARRIVED] = time.monotonic()
        if self._deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """Let a head that has come be answered.

        Its parser loses the body of a request that asks for another protocol.
        """
        self._end_wait()
        if self.parser.should_upgrade() and self.parser.get_method() == b"POST":
            message = "this server speaks HTTP/1.1 alone: leave the header `Upgrade` out"
            self._refuse(ApiError(BAD_REQUEST, "unsupported-upgrade", message))
        else:
            super().on_headers_complete()

    def _await_head(self) -> None:
        self._num_head_bytes = 0
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._time_out)

    def _end_wait(self) -> None:
        self._num_head_bytes = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _time_out(self) -> None:
        message = f"the head of a request has not come within {HEAD_SECONDS:g} seconds"
        self._refuse(ApiError(TIMEOUT, "head-timeout", message))

    def _refuse(self, error: ApiError) -> None:
        """Answer before there is a request, and end the connection."""
        self._end_wait()
        if self.transport.is_closing():
            return
        reason = HTTPStatus(error.status).phrase
        head = (
            f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(error.json)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + error.json)
        self.transport.close()
