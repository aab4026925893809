"""The server as a Starlette application: its endpoints, streams and metrics."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest, write_to_textfile
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from batcher.engine import Engine, StepOutcome
from batcher.errors import RUN_ERROR_CODES
from batcher.events import TokenEvent
from batcher.metrics.prometheus import RunCollector, joined
from batcher.metrics.summary import RunMetrics
from batcher.requests.openai import URLS
from batcher.requests.result_rows import (
    OK,
    BytesOf,
    answer_id_of,
    chat_logprobs,
    choice_logprobs,
    completion_of,
    status_of,
    usage_of,
)
from batcher.result import FinishReason, Result, StopReason, TokenLogprob
from batcher.serving.engine_thread import EngineThread, Exchange, News
from batcher.serving.http import (
    BAD_REQUEST,
    JSON,
    MAX_QUICK_BYTES,
    UNAVAILABLE,
    Access,
    ApiError,
    BodyReader,
    ClientGoneError,
    ClientRequest,
    Gate,
    Limits,
    fields_of,
    read_body,
)
from batcher.trace.run import RequestFold

_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """Writes the chunks of one stream; joined, they say the same as the whole answer.

    The last chunk has no choices and the usage, if the client asks for it; then the usage of all
    others is null.
    """

    def __init__(self, request_id: str, model: str, body: ClientRequest, created: int) -> None:
        self._is_chat, self._has_ids = body.form == "chat", body.delivery.return_token_ids
        head = {
            "id": answer_id_of(request_id, body.form),
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":'
        self._end = b',"usage":null}\n\n' if body.delivery.includes_usage else b"}\n\n"
        self._sent: dict[int, tuple[int, int]] = {}  # characters and tokens, by place

    def of_tokens(self, event: TokenEvent, place: int) -> bytes:
        return self._chunk(place, event.text, event.tokens or [], event.logprobs)

    def of_result(self, result: Result, place: int) -> bytes:
        """Return the last chunk of an output; place: of its choice in the whole answer."""
        num_chars, num_tokens = self._sent.get(place, (0, 0))
        logprobs = None if result.logprobs is None else result.logprobs[num_tokens:]
        end = result.finish_reason, result.stop_reason
        text, tokens = result.text[num_chars:], result.token_ids[num_tokens:]
        return self._chunk(place, text, tokens, logprobs, end)

    def of_usage(self, results: list[Result]) -> bytes:
        return self._head + b'[],"usage":' + _encode(usage_of(results)) + b"}\n\n"

    def _chunk(
        self,
        place: int,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None,
        end: tuple[FinishReason | None, StopReason] = (None, None),
    ) -> bytes:
        is_first = place not in self._sent
        start, num_tokens = self._sent.get(place, (0, 0))
        self._sent[place] = start + len(text), num_tokens + len(tokens)
        choice: dict[str, Any] = {"index": place}
        if self._is_chat:
            delta = {"content": text} if text or is_first else {}
            choice["delta"] = {"role": "assistant", **delta} if is_first else delta
        else:
            choice["text"] = text
        choice["finish_reason"], choice["stop_reason"] = end
        choice["logprobs"] = None
        if logprobs and self._is_chat:
            choice["logprobs"] = chat_logprobs(logprobs)
        elif logprobs:
            choice["logprobs"] = choice_logprobs(logprobs, [start] * len(logprobs))
        if self._has_ids:
            choice["token_ids"] = tokens
        return self._head + _encode([choice]) + self._end


class ServerMetrics:
    """Counts what an engine does; only `text` may be called outside the engine's thread.

    Workers share a folder of files, one for each, which it updates at least every second while the
    engine works.  /metrics of each worker adds the files of the others.

    fold: see RunMetrics.  worker: its number.  folder: None for a server without workers.
    """

    def __init__(
        self,
        engine: Engine,
        model: str,
        fold: RequestFold | None = None,
        worker: int = 0,
        folder: Path | None = None,
    ) -> None:
        self._collector = RunCollector(
            RunMetrics(fold=fold, is_watched=True), engine, (model, str(worker))
        )
        self._collector.observe([engine.run_event()])
        self._own = CollectorRegistry()
        self._own.register(self._collector)
        self._file = None if folder is None else folder / f"{worker}.prom"
        self.share()

    def after_step(self, outcome: StepOutcome) -> None:
        self._collector.observe(outcome.events)
        if self._file is not None and time.monotonic() - self._shared_at > 1:
            self.share()

    def share(self) -> None:
        if self._file is not None:
            write_to_textfile(str(self._file), self._own)
            self._shared_at = time.monotonic()

    def text(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        parts: list[Iterable[Metric]] = [self._collector.collect()]
        files = [] if self._file is None else self._file.parent.glob("*.prom")
        others = [path for path in sorted(files) if path != self._file]
        parts += [text_string_to_metric_families(path.read_text()) for path in others]
        yield from joined(parts)


EVENTS = "text/event-stream; charset=utf-8"
MAX_ID_LENGTH = 128
_DONE = b"data: [DONE]\n\n"


class Answer:
    """An answer in parts; Starlette's responses have no limit on the time to read a part.

    has_begun: whether the status is sent.
    """

    def __init__(self, send: Send, limits: Limits) -> None:
        self.headers: dict[str, str] = {}
        self.has_begun = False
        self._send, self._limits = send, limits

    async def begin(self, status: int, **headers: str) -> None:
        self.has_begun = True
        named = self.headers | {name.replace("_", "-"): text for name, text in headers.items()}
        encoded = [(name.encode(), text.encode()) for name, text in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def give(self, status: int, body: bytes) -> None:
        await self.begin(status, content_type=JSON, content_length=str(len(body)))
        await self.add(body, is_last=True)

    async def add(self, part: bytes, *, is_last: bool = False) -> None:
        """Send a part once the one before is nearly read, or raise a ClientGoneError."""
        message = {"type": "http.response.body", "body": part, "more_body": not is_last}
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientGoneError from None


class Service(Struct, frozen=True):
    """The endpoints that generate, as an ASGI application.

    model: the name in answers.  bytes_of: the bytes of a token.
    """

    engine: EngineThread
    reader: BodyReader
    model: str
    bytes_of: BytesOf
    limits: Limits = Limits()
    access: Access = Access()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(send, self.limits)
        with suppress(ClientGoneError):
            try:
                await self._answer(answer, scope, receive)
            except ApiError as error:
                if answer.has_begun:  # a stream, so the error is an event of it
                    await answer.add(b"data: " + error.json + b"\n\n" + _DONE, is_last=True)
                else:
                    answer.headers.update(error.headers)
                    await answer.give(error.status, error.json)

    async def _answer(self, answer: Answer, scope: Scope, receive: Receive) -> None:
        engine, reader, arrived = self.engine, self.reader, time.monotonic()
        given = Headers(scope=scope).get("x-request-id") or None
        if given and not (len(given) <= MAX_ID_LENGTH and given.isascii() and given.isprintable()):
            message = f"`X-Request-Id` has at most {MAX_ID_LENGTH} characters, all of them ASCII"
            raise ApiError(BAD_REQUEST, "invalid-value", message, "X-Request-Id")
        name = engine.name_for(given)
        answer.headers["x-request-id"] = given or name
        engine.check_room(1)
        url, data = scope["path"], await read_body(scope, receive, self.limits)
        fields = fields_of(data) if len(data) <= MAX_QUICK_BYTES else None
        if fields is not None and reader.is_quick(fields):
            body = reader.read(url, fields)
        else:
            body = await asyncio.to_thread(lambda: reader.read(url, fields or fields_of(data)))
        names = [name, *(engine.name_for(given) for _ in body.requests[1:])]
        # The text of a request with states is known at its end: it includes their markers.
        wants_tokens = bool(body.delivery.stream) and body.requests[0].states is None
        exchange = engine.submit(body.requests, names, arrived, wants_tokens=wants_tokens)
        watch = asyncio.create_task(_watch(receive, exchange))
        try:
            if body.delivery.stream:
                await self._stream(answer, body, exchange)
            else:
                results = [news for news in await exchange.take() if isinstance(news, Result)]
                _raise_failure(results)
                results.sort(key=exchange.place_of)
                completion = completion_of(
                    results,
                    self.model,
                    body.form,
                    self.bytes_of,
                    created=int(time.time()),
                    has_token_ids=bool(body.delivery.return_token_ids),
                )
                await answer.give(OK, _encode(completion))
        finally:
            watch.cancel()
            engine.release(exchange)

    async def _stream(self, answer: Answer, body: ClientRequest, exchange: Exchange) -> None:
        writer = ChunkWriter(exchange.names[0], self.model, body, int(time.time()))
        results: list[Result] = []
        while True:
            news = await exchange.take()
            ended = {(n.id, n.index) for n in news if isinstance(n, Result) and n.error is None}
            chunks = []
            for item in news:  # the last chunk of an output includes the tokens of that step
                if isinstance(item, Result):
                    results.append(item)
                    place = exchange.place_of(item)
                    if item.error is None:
                        chunks.append(writer.of_result(item, place))
                elif (item.id, item.index) not in ended:
                    chunks.append(writer.of_tokens(item, exchange.place_of(item)))
            part = b"".join(chunks)
            if not answer.has_begun:
                _raise_failure(news[:1])
                await answer.begin(OK, content_type=EVENTS, cache_control="no-cache")
            if not exchange.num_left and all(result.error is None for result in results):
                break
            await answer.add(part)
            _raise_failure(results)
        if body.delivery.includes_usage:
            part += writer.of_usage(results)
        await answer.add(part + _DONE, is_last=True)


def _raise_failure(news: Iterable[News]) -> None:
    for item in news:
        if isinstance(item, Result) and item.error is not None:
            code, message = item.error.code, item.error.message
            if code in {"model-error", "call-timeout"}:  # the message may quote other requests
                message = RUN_ERROR_CODES[code]
            raise ApiError(status_of(code), code, message)


async def _watch(receive: Receive, exchange: Exchange) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.fail(ClientGoneError())


def make_app(service: Service, metrics: Callable[[], bytes]) -> Starlette:
    """Return the application; metrics: returns the text of /metrics."""
    created = int(time.time())
    model = {"id": service.model, "object": "model", "created": created, "owned_by": "you"}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        service.reader.check_model(request.path_params["name"])
        return JSONResponse(model)

    async def health(_: Request) -> Response:
        if service.engine.failure is not None:
            return JSONResponse({"status": "failed"}, UNAVAILABLE)
        if service.engine.is_draining:
            return JSONResponse({"status": "draining"}, UNAVAILABLE)
        return JSONResponse({"status": "ok"})

    async def metrics_text(_: Request) -> Response:
        return Response(metrics(), media_type="text/plain; version=1.0.0; charset=utf-8")

    middleware = [Middleware(Gate, service.access)]
    if origins := service.access.origins:
        cross = Middleware(
            CORSMiddleware, origins, ["GET", "POST"], ["*"], expose_headers=["x-request-id"]
        )
        middleware.insert(0, cross)  # first, so that pages can read refusals
    return Starlette(
        routes=[
            *(Route(url, service, methods=["POST"]) for url in URLS),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics_text),
        ],
        middleware=middleware,
        exception_handlers=dict.fromkeys((ApiError, HTTPException), _of_error),
    )


async def _of_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = error.detail.lower().replace(" ", "-")
        error = ApiError(error.status_code, code, message, headers=error.headers or {})
    if not isinstance(error, ApiError):
        raise error
    return Response(error.json, error.status, dict(error.headers), JSON)
