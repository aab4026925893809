"""One server over HTTP: sends a body and passes on the chunks of its answer as they come.

Rule: every request ends, with all its chunks or a ServerFailure.  At most one event of an answer is
held in memory.
"""

import asyncio
import os
import re
import time
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from batcher.errors import BatchdecodeError, LostModelError
from batcher.models.callables import retry_after_of
from batcher.remote.model import PREFIX, RemoteModel, ServerSettings, address_of, settings_of
from batcher.remote.protocol import (
    MAX_SHOWN,
    ServerFailure,
    StreamEvent,
    error_text,
    read_chunk,
    refusal,
)

KEY_VARIABLE = "OPENAI_API_KEY"
MAX_LIST = 2**22  # bytes of the list of models
MAX_EVENT = 2**22  # bytes of an event of a stream
MAX_ANSWER = 2**30  # bytes of a stream
MAX_ERROR = 2**16  # bytes of the body of an error
MAX_REDIRECTS = 5
WHOLE = "whole answer"  # kind of event
WITHOUT_PATH = {404, 405}  # for an unknown path
_RESET = re.compile(rb'"x-ratelimit-reset"\s*:\s*"?([0-9]+)', re.IGNORECASE)
_SECONDS = re.compile("[0-9]{1,19}")
_UNSTATED = ("stream_options", "seed")  # sent although no row states them
_LINE_END = re.compile(r"\r\n|\n|\r(?!\Z)")  # a \n may follow a \r at the end


class Client:
    """A client of one server, with a connection for each request in flight.

    The key comes from the environment and is stored nowhere else.
    """

    def __init__(self, url: str, settings: ServerSettings) -> None:
        self._url, self._settings = url, settings
        self._key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise BatchdecodeError(f"{KEY_VARIABLE} is invalid: no HTTP header can contain it")
        headers = {"User-Agent": "batchdecode", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            self._http = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=settings.connect_timeout),
                limits=httpx.Limits(max_connections=None),
                verify=httpx.URL(url).scheme == "https",  # certificates take time to read
            )
        except (ImportError, ValueError) as error:
            raise BatchdecodeError(
                f"the proxy of the environment cannot be used: {error}"
            ) from None

    async def ask(self, body: dict[str, Any], take: Callable[[StreamEvent], None]) -> bool:
        """Send a body, and call `take` with each chunk; return whether the server ended the answer.

        Raises:
            ServerFailure: the answer is missing or incomplete.
        """
        path = "/chat/completions" if "messages" in body else "/completions"
        limit = self._settings.first_token_timeout
        try:
            async with (
                asyncio.timeout(limit) as timeout,
                self._open("POST", path, body) as response,
            ):
                packing = response.headers.get("content-encoding", "identity").lower()
                if packing not in {"identity", "gzip", "deflate"}:
                    message = f"the answer is compressed ({packing[:80]}) without a request for it"
                    raise ServerFailure("answer", message, is_worth_retry=False)
                async for kind, data in _events_of(response):
                    if data.strip() == "[DONE]":
                        return True
                    if data:
                        take(self._chunk_of(kind, data))
                    if kind == WHOLE:
                        return True
                    limit = self._settings.idle_timeout
                    timeout.reschedule(asyncio.get_running_loop().time() + limit)
        except TimeoutError:
            raise ServerFailure("timeout", f"no data for {limit:g} s") from None
        except RecursionError:
            raise ServerFailure("answer", "the answer is nested too deeply") from None
        return False

    def _chunk_of(self, kind: str, data: str) -> StreamEvent:
        try:
            return read_chunk(data, is_error=kind == "error", is_whole=kind == WHOLE)
        except ServerFailure as failure:
            raise self._hint_at_path(failure) if kind == WHOLE else failure from None

    async def model_names(self) -> list[str]:
        """Return the names of the server's models, and close the client."""
        try:
            async with (
                asyncio.timeout(self._settings.connect_timeout),
                self._open("GET", "/models") as response,
            ):
                models = msgspec.json.decode(await _read(response, MAX_LIST))["data"]
                return [str(model["id"]) for model in models]
        except TimeoutError:
            raise ServerFailure("timeout", "it does not answer") from None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ServerFailure("answer", "it does not list its models") from None
        finally:
            await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, fields: dict[str, Any] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Yield a successful response, or raise; follow redirects to the same host."""
        url = httpx.URL(self._url + path)
        try:
            for _ in range(MAX_REDIRECTS):
                async with self._http.stream(method, url, json=fields) as response:
                    if response.is_success:
                        yield response
                        return
                    is_here = False
                    if response.has_redirect_location:
                        url = response.url.join(response.headers["location"])
                        is_safe = url.scheme in {"https", response.url.scheme}
                        is_here = is_safe and url.host == response.url.host
                    if not is_here:
                        raise await self._refused(response)
        except httpx.DecodingError as error:
            raise ServerFailure("answer", f"the answer cannot be decompressed: {error}") from None
        except (httpx.HTTPError, httpx.StreamError) as error:
            said = str(error) or type(error).__name__
            is_there = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            what = "the connection failed" if is_there else "cannot connect"
            may_change = "CERTIFICATE_VERIFY_FAILED" not in said
            message = f"{what}: {said}"
            raise ServerFailure("connection", message, is_worth_retry=may_change) from None
        message = f"{MAX_REDIRECTS} redirects, the last to {url}"
        raise ServerFailure("answer", message, is_worth_retry=False)

    async def _refused(self, response: httpx.Response) -> ServerFailure:
        said, headers = await _read(response, MAX_ERROR), response.headers
        failure = refusal(response.status_code, said, retry_after_of(headers))
        if failure.retry_after is None and response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            within = _RESET.search(said)  # OpenRouter's form
            given = within[1].decode() if within else headers.get("x-ratelimit-reset", "")
            if _SECONDS.fullmatch(given):  # seconds, or a time since 1970 in s or ms
                number, now = float(given), time.time()
                number = number / 1000 if number > 100 * now else number
                failure.retry_after = max(number - now, 0.0) if number > now / 2 else number
        unstated = next((name for name in _UNSTATED if name in str(failure)), None)
        if unstated is not None and not failure.is_worth_retry:
            failure.note(f"; use --extra-body '{{\"{unstated}\": null}}' to omit it")
        if failure.is_final:
            failure.note(
                f"; the key is that of {KEY_VARIABLE}" if self._key else f"; set {KEY_VARIABLE}"
            )
        elif response.status_code in WITHOUT_PATH:
            self._hint_at_path(failure)
        elif response.has_redirect_location:
            target = response.headers["location"][:MAX_SHOWN]
            failure.note(f"; it redirects to {target}: give that address if it is right")
        return failure

    def _hint_at_path(self, failure: ServerFailure) -> ServerFailure:
        has_path = bool(urlsplit(self._url).path)
        return failure if has_path else failure.note(f"; is it {PREFIX}{self._url}/v1?")

    def without_key(self, failure: ServerFailure) -> ServerFailure:
        """Mask the key in a message, because a server may echo it."""
        if self._key:
            failure.args = (str(failure).replace(self._key, "***"),)
        return failure


async def _events_of(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Yield the kind and data of each server-sent event; limit the length of events and answers.

    An answer that is not a stream is one event of the kind WHOLE.

    Raises:
        ServerFailure: it is too long, or not UTF-8, or ends with an error in llama.cpp's form.
    """
    decode = getincrementaldecoder("utf-8")().decode
    rest = kind = last_line = ""
    data = list[str]()
    num_bytes = begin = 0  # of the answer, and before the event
    is_whole: bool | None = None  # until something comes
    async for part in _with_end(response.aiter_bytes()):
        num_bytes += len(part)
        if num_bytes - begin > MAX_EVENT:
            message = f"an event of the stream has more than {MAX_EVENT} bytes"
            raise ServerFailure("answer", message)
        if num_bytes > MAX_ANSWER:
            raise ServerFailure("answer", f"the stream has more than {MAX_ANSWER} bytes")
        try:
            rest += decode(part)
        except UnicodeDecodeError as error:
            raise ServerFailure("answer", f"the response is not UTF-8: {error}") from None
        if is_whole is None:
            rest = rest.lstrip().removeprefix("\ufeff").lstrip()
            if rest:  # an event begins with the name of a field, or a colon
                is_whole = rest[0] not in ":deir"
        if is_whole is not False:
            continue
        *lines, rest = _LINE_END.split(rest)
        for line in lines:
            last_line = line or last_line
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                data.append(value)
            elif name == "event":
                kind = value
            elif not line and (data or kind):
                yield kind, "\n".join(data)
                kind, data, begin = "", [], num_bytes
    if is_whole:
        yield WHOLE, rest.removesuffix("\n\n")
    elif last_line.startswith("error:"):
        said = error_text(last_line.removeprefix("error:").encode())
        raise ServerFailure("answer", f"the server sent an error: {said}")


async def _with_end(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for part in parts:
        yield part
    yield b"\n\n"  # the end of an event that the server has not ended


async def _read(response: httpx.Response, limit: int) -> bytes:
    parts, length = [], 0
    async for part in response.aiter_raw():
        parts.append(part)
        length += len(part)
        if length > limit:
            break
    return b"".join(parts)[:limit]


def remote_model_of(name: str, given: Mapping[str, Any]) -> RemoteModel:
    """Return the model `openai:URL[#NAME]`; without a name, ask the server for its models.

    Raises:
        BatchdecodeError: a setting is wrong, or the server cannot be reached or refuses the key.
    """
    (url, named), settings = address_of(name), settings_of(given)
    if named is not None:
        return RemoteModel(url, settings, named)

    client = Client(url, settings)
    try:
        return RemoteModel(url, settings, listed=asyncio.run(client.model_names()))
    except ServerFailure as failure:
        client.without_key(failure)
        if failure.reason in {"connection", "timeout"} or failure.is_final:
            raise LostModelError(f"{url}: {failure}") from None
        return RemoteModel(url, settings)  # a server without a list of models needs no name
