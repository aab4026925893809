"""How long a server is asked of which nothing comes, by a package that asks again by itself.

Such a package counts the tries of each request, and one file takes many: with waits in between that
adds up to ten minutes for a server that is not there.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import reason_of

if TYPE_CHECKING:
    from aiohttp import TraceConfig, TraceRequestEndParams, TraceRequestExceptionParams

_FAULT_OF_SERVER = 500  # statuses of HTTP from there on


class Patience:
    """What is left of it: so many seconds from the first of the failures since the last answer."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._failing_since: float | None = None
        self._reason = ""

    def check(self) -> None:
        """Do nothing as long as there is some left; then begin anew.

        Raises:
            TimeoutError: there is none left; it says what went wrong last.
        """
        since = self._failing_since
        if since is not None and self._clock() - since > self._seconds:
            self._failing_since = None
            raise TimeoutError(self._reason)

    def note_answer(self) -> None:
        """Take note that the server is there."""
        self._failing_since = None

    def note_failure(self, reason: str) -> None:
        """Take note that a request has failed."""
        self._reason = reason
        if self._failing_since is None:
            self._failing_since = self._clock()


def watching(patience: Patience) -> "TraceConfig":
    """Return what has every request of a session of aiohttp look at `patience`, and tell it."""
    from aiohttp import TraceConfig  # noqa: PLC0415 - with an extra

    async def begin(*_: Any) -> None:
        patience.check()

    async def end(_session: Any, _context: Any, told: "TraceRequestEndParams") -> None:
        response = told.response
        if response.status < _FAULT_OF_SERVER:
            patience.note_answer()
        else:
            patience.note_failure(f"{response.status} {response.reason or ''}".rstrip())

    async def fail(_session: Any, _context: Any, told: "TraceRequestExceptionParams") -> None:
        if isinstance(told.exception, Exception):  # not one that breaks off what we do
            patience.note_failure(reason_of(told.exception))

    config = TraceConfig()
    config.on_request_start.append(begin)
    config.on_request_end.append(end)
    config.on_request_exception.append(fail)
    return config
