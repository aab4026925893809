"""One server over HTTP: a body is sent, and the chunks of its answer are handed on as they come.

Rule: whatever the server does, a request ends, with all its chunks or a ServerFailure; no more of
its answer is held than a chunk.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import httpx_sse
import msgspec

from batcher.errors import BatchdecodeError, LostModelError
from batcher.models.calls import retry_after_of
from batcher.remote.failures import ServerFailure, refusal
from batcher.remote.protocol import Body, StreamEvent, read_chunk
from batcher.remote.settings import PREFIX, ServerAddress, ServerSettings

KEY_VARIABLE = "OPENAI_API_KEY"
MAX_LIST = 2**22  # bytes of the list of models
MAX_EVENT = 2**22  # bytes of an event of a stream
MAX_ANSWER = 2**30  # bytes of a stream
MAX_ERROR = 2**16  # bytes of the body of an error
MAX_DIGITS = 20  # of a time in a header
DONE = "[DONE]"
_UNSTATED = ("stream_options", "seed")  # which are sent though no row states them
STREAM_TYPE = "text/event-stream"

Take = Callable[[StreamEvent], None]


class Client:
    """Asks one server, with as many connections as requests are in flight.

    The key is that of the environment, and stands nowhere else.
    """

    def __init__(self, address: ServerAddress, settings: ServerSettings) -> None:
        self._address, self._settings = address, settings
        self._key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise BatchdecodeError(f"{KEY_VARIABLE} is no key that a header can hold")
        headers = {"User-Agent": "batchdecode", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            self._http = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=settings.connect_timeout),
                limits=httpx.Limits(max_connections=None),
                verify=httpx.URL(address.url).scheme == "https",  # certificates take time to read
            )
        except (ImportError, ValueError) as error:
            raise BatchdecodeError(f"the proxy of the environment is of no use: {error}") from None

    async def ask(self, body: Body, take: Take) -> None:
        """Send a body, and call `take` with each chunk of the answer, up to its end.

        Raises:
            ServerFailure: there is no answer, or not all of it.
        """
        limit = self._settings.first_token_timeout
        try:
            async with asyncio.timeout(limit) as timeout:
                async with httpx_sse.aconnect_sse(
                    self._http, "POST", self._address.url + body.path, json=body.fields
                ) as source:
                    await self._check(source.response)
                    stream = source.response.stream = _BoundedStream(source.response.stream)
                    async for event in source.aiter_sse():
                        stream.begin_event()
                        if event.data == DONE:
                            return
                        if event.data:
                            take(read_chunk(event.data))
                        limit = self._settings.idle_timeout
                        timeout.reschedule(asyncio.get_running_loop().time() + limit)
        except TimeoutError:
            raise ServerFailure("timeout", f"nothing came for {limit:g} s") from None
        except ServerFailure as failure:
            raise self._without_key(failure) from None
        except httpx_sse.SSEError as error:
            raise ServerFailure("answer", f"no stream of events came: {error}") from None
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise self._broken(error) from None

    async def model_names(self) -> list[str]:
        """Return what the server calls its models.

        Raises:
            ServerFailure: it does not say.
        """
        try:
            async with (
                asyncio.timeout(self._settings.connect_timeout),
                self._http.stream("GET", f"{self._address.url}/models") as response,
            ):
                if response.status_code != httpx.codes.OK:
                    raise await self._refused(response)
                told = msgspec.json.decode(await _read(response), type=_Models)
        except TimeoutError:
            raise ServerFailure("timeout", "it does not answer") from None
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise ServerFailure("answer", "it does not tell its models") from None
        except httpx.HTTPError as error:
            raise self._broken(error) from None
        return [model.id for model in told.data]

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _check(self, response: httpx.Response) -> None:
        """Make sure that an answer begins as one.

        Raises:
            ServerFailure: it does not.
        """
        if response.status_code != httpx.codes.OK:
            raise await self._refused(response)
        packing = response.headers.get("content-encoding", "identity")
        if packing != "identity":  # what a packed line takes once it is unpacked, nobody knows
            raise ServerFailure("answer", f"the stream is packed ({packing[:80]}), unasked")
        kind = response.headers.get("content-type", "none")
        if kind.partition(";")[0].strip().lower() != STREAM_TYPE:
            raise ServerFailure("answer", f"no stream of events came, but {kind[:80]}")

    async def _refused(self, response: httpx.Response) -> ServerFailure:
        """Return what it means that the server has answered with another status than 200."""
        said = await _read(response, MAX_ERROR)
        if self._key:
            said = said.replace(self._key.encode(), b"***")
        headers = response.headers
        failure = refusal(response.status_code, said, retry_after_of(headers))
        if failure.retry_after is None and response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            failure.retry_after = _seconds_to_reset(headers.get("x-ratelimit-reset", ""))
        unstated = next((name for name in _UNSTATED if name.encode() in said), None)
        if unstated is not None and not failure.is_worth_retry:
            failure.args = (f"{failure}; use --extra-body '{{\"{unstated}\": null}}' to omit it",)
        if failure.is_final:
            failure.args = (f"{failure}; the key is that of {KEY_VARIABLE}",)
        elif response.status_code == httpx.codes.NOT_FOUND and not urlsplit(self._address.url).path:
            failure.args = (f"{failure}; is it {PREFIX}{self._address.url}/v1?",)
        return failure

    def _without_key(self, failure: ServerFailure) -> ServerFailure:
        """Return a failure that does not tell the key, which a server may have said again."""
        if self._key:
            failure.args = (str(failure).replace(self._key, "***"),)
        return failure

    def _broken(self, error: Exception) -> ServerFailure:
        """Return what it means that HTTP has failed."""
        said = str(error) or type(error).__name__
        is_there = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        what = "the connection failed" if is_there else "cannot connect"
        return self._without_key(ServerFailure("connection", f"{what}: {said}"))


def _seconds_to_reset(text: str) -> float | None:
    """Return what X-RateLimit-Reset says: seconds, or the time in seconds or ms since 1970."""
    if not (text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS):
        return None
    number, now = float(text), time.time()
    if number > 100 * now:
        number /= 1000
    return max(number - now, 0.0) if number > now / 2 else number


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _BoundedStream(httpx.AsyncByteStream):
    """The bytes of a stream, which is not endless, and none of its events is."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._num_bytes = self._begin = 0

    def begin_event(self) -> None:
        """Take what comes from now on for another event."""
        self._begin = self._num_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._num_bytes += len(part)
            if self._num_bytes - self._begin > MAX_EVENT:
                message = f"an event of the stream has more than {MAX_EVENT} bytes"
                raise ServerFailure("answer", message)
            if self._num_bytes > MAX_ANSWER:
                raise ServerFailure("answer", f"the stream has more than {MAX_ANSWER} bytes")
            yield part

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()


async def _read(response: httpx.Response, limit: int = MAX_LIST) -> bytes:
    """Return the body of an answer, or as much of it as is wanted."""
    parts, length = [], 0
    async for part in response.aiter_raw():
        parts.append(part)
        length += len(part)
        if length > limit:
            break
    return b"".join(parts)[:limit]


def list_models(address: ServerAddress, settings: ServerSettings) -> list[str]:
    """Return the models that a server lists; [] if it lists none, or the address names one.

    Raises:
        BatchdecodeError: it cannot be reached, or refuses the key.
    """
    if address.model is not None:
        return []
    try:
        return asyncio.run(_model_names(address, settings))
    except ServerFailure as failure:
        if failure.reason in {"connection", "timeout"} or failure.is_final:
            raise LostModelError(f"{address.url}: {failure}") from None
        return []  # a server without a list of its models needs no name


async def _model_names(address: ServerAddress, settings: ServerSettings) -> list[str]:
    client = Client(address, settings)
    try:
        return await client.model_names()
    finally:
        await client.close()
