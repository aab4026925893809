"""The server as a Starlette application: what is answered under which address."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from prometheus_client import CollectorRegistry, generate_latest, write_to_textfile
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from batcher.engine import Engine, StepOutcome
from batcher.events import TokenEvent
from batcher.metrics.prometheus import RunCollector, joined
from batcher.metrics.summary import RunMetrics
from batcher.requests.openai import URLS, Form
from batcher.requests.result_rows import (
    OK,
    BytesOf,
    ChatLogprobs,
    ChoiceLogprobs,
    RowUsage,
    answer_id_of,
    chat_logprobs,
    choice_logprobs,
    completion_of,
    usage_of,
)
from batcher.result import FinishReason, Result, StopReason, TokenLogprob
from batcher.serving.bodies import MAX_QUICK_BYTES, BodyReader, ClientRequest, fields_of
from batcher.serving.engine_thread import EngineThread, Exchange, News
from batcher.serving.http import (
    JSON,
    Access,
    Answer,
    ApiError,
    ClientGoneError,
    Gate,
    Limits,
    given_id,
    of_result,
    read_body,
)
from batcher.trace.run import RequestFold

# Parts of answers while they are generated: the chunks of OpenAI's streams.
#
# Rule: joined, the chunks of a choice say what its place in the whole answer would have said.


class ChunkChoice(Struct, frozen=True, gc=False):
    """What has come of one output of a completion; token_ids: only if they are asked for."""

    index: int
    text: str
    finish_reason: FinishReason | None
    stop_reason: StopReason
    logprobs: ChoiceLogprobs | None
    token_ids: list[int] | UnsetType = UNSET


class Delta(Struct, frozen=True, gc=False, omit_defaults=True):
    """What has come of what the assistant says; the first one of an output has its role."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Struct, frozen=True, gc=False):
    """What has come of one output of a chat; token_ids: only if they are asked for."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None
    stop_reason: StopReason
    logprobs: ChatLogprobs | None
    token_ids: list[int] | UnsetType = UNSET


class AnswerChunk(Struct, frozen=True, gc=False):
    """One part of an answer; the last one has no choices and the usage, if that is asked for.

    Then the others have a usage of null, as OpenAI's do; otherwise none.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice] | list[ChatChunkChoice]
    usage: RowUsage | UnsetType | None = UNSET


class _Output(Struct):
    """How much of one output has been told."""

    num_chars: int = 0
    num_tokens: int = 0
    has_role: bool = False


class ChunkWriter:
    """Makes the chunks of one answer of what the engine tells of its request.

    What is told of an output before its result is a beginning of what the result says.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        form: Form,
        created: int,
        *,
        has_token_ids: bool = False,
        has_usage: bool = False,
    ) -> None:
        self._id, self._model, self._created = answer_id_of(request_id, form), model, created
        self._is_chat, self._has_token_ids = form == "chat", has_token_ids
        self._no_usage: UnsetType | None = None if has_usage else UNSET
        self._outputs: dict[int, _Output] = {}

    def of_tokens(self, event: TokenEvent, place: int) -> AnswerChunk:
        return self._chunk(place, event.text, event.tokens or [], event.logprobs)

    def of_result(self, result: Result, place: int) -> AnswerChunk:
        """Return the last chunk of an output: all that was not told, and how it ended.

        place: its place in the answer, which is its index unless the outputs compete.
        """
        output = self._outputs.get(place, _Output())
        logprobs = result.logprobs
        return self._chunk(
            place,
            result.text[output.num_chars :],
            result.token_ids[output.num_tokens :],
            None if logprobs is None else logprobs[output.num_tokens :],
            result.finish_reason,
            result.stop_reason,
        )

    def of_usage(self, results: list[Result]) -> AnswerChunk:
        return self._around([], usage_of(results))

    def _chunk(
        self,
        index: int,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None,
        finish_reason: FinishReason | None = None,
        stop_reason: StopReason = None,
    ) -> AnswerChunk:
        output = self._outputs.setdefault(index, _Output())
        start, output.num_chars = output.num_chars, output.num_chars + len(text)
        output.num_tokens += len(tokens)
        token_ids = tokens if self._has_token_ids else UNSET
        if self._is_chat:
            role: Literal["assistant"] | None = None if output.has_role else "assistant"
            output.has_role = True
            delta = Delta(role, text or (None if role is None else ""))
            told = chat_logprobs(logprobs) if logprobs else None
            chat = ChatChunkChoice(index, delta, finish_reason, stop_reason, told, token_ids)
            return self._around([chat], self._no_usage)
        of_text = choice_logprobs(logprobs, [start] * len(logprobs)) if logprobs else None
        choice = ChunkChoice(index, text, finish_reason, stop_reason, of_text, token_ids)
        return self._around([choice], self._no_usage)

    def _around(
        self,
        choices: list[ChunkChoice] | list[ChatChunkChoice],
        usage: RowUsage | UnsetType | None,
    ) -> AnswerChunk:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return AnswerChunk(self._id, kind, self._created, self._model, choices, usage)


# What /metrics tells of a server: of its engine, and of those of the workers beside it.
#
# Each worker leaves what it tells in a folder that all of them share, at least every second in
# which something happens and whenever nothing does, and /metrics of each adds what the others have
# left.

SHARE_SECONDS = 1.0


class ServerMetrics:
    """Counts what an engine does, for as long as it runs; of all but `text` its thread makes use.

    model: what it is called.  fold: see RunMetrics.  worker: the number of this one.  folder: what
    the workers share; None for a server without others.
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
        self._is_shared, self._shared_at = False, time.monotonic()
        self.share()

    def after_step(self, outcome: StepOutcome) -> None:
        self._collector.observe(outcome.events)
        self._is_shared = False
        if self._file is not None and time.monotonic() - self._shared_at > SHARE_SECONDS:
            self.share()

    def share(self) -> None:
        if self._file is not None and not self._is_shared:
            write_to_textfile(str(self._file), self._own)
            self._is_shared, self._shared_at = True, time.monotonic()

    def text(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        told: list[Iterable[Metric]] = [self._collector.collect()]
        files = [] if self._file is None else self._file.parent.glob("*.prom")
        others = [path for path in sorted(files) if path != self._file]
        told += [text_string_to_metric_families(path.read_text()) for path in others]
        yield from joined(told)


# The endpoints that generate: from a body to the engine, and from what that tells to an answer.

_DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


class Service(Struct, frozen=True):
    """What all endpoints have in common.

    model: the name that answers show.  bytes_of: the bytes that a token stands for.
    """

    engine: EngineThread
    reader: BodyReader
    model: str
    bytes_of: BytesOf
    limits: Limits = Limits()
    access: Access = Access()


class GeneratingEndpoint:
    """An endpoint as an ASGI application; url: as in rows of an OpenAI Batch."""

    def __init__(self, url: str, service: Service) -> None:
        self._url, self._service = url, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(send, self._service.limits)
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
        """Answer a request.

        Raises:
            ApiError: it cannot be served.
            ClientGoneError: nobody waits for the answer any more.
        """
        service, engine, arrived = self._service, self._service.engine, time.monotonic()
        given = given_id(scope)
        name = engine.name_for(given)
        answer.headers["x-request-id"] = given or name
        engine.check_room(1)
        body = await self._read(await read_body(scope, receive, service.limits))
        requests = body.requests
        engine.check_room(len(requests) * requests[0].n)
        names = [name, *(engine.name_for(given) for _ in requests[1:])]
        exchange = engine.submit(requests, names, arrived, wants_tokens=body.wants_tokens)
        watch = asyncio.create_task(_watch(receive, exchange))
        try:
            if body.delivery.stream:
                await self._stream(answer, body, exchange)
            else:
                await self._give_whole(answer, body, exchange)
        finally:
            watch.cancel()
            engine.release(exchange)

    async def _read(self, data: bytes) -> ClientRequest:
        reader = self._service.reader
        if len(data) <= MAX_QUICK_BYTES:
            fields = fields_of(data)
            if reader.is_quick(fields):
                return reader.read(self._url, fields)
        return await asyncio.to_thread(lambda: reader.read(self._url, fields_of(data)))

    async def _give_whole(self, answer: Answer, body: ClientRequest, exchange: Exchange) -> None:
        results = [news for news in await exchange.take() if isinstance(news, Result)]
        _raise_failure(results)
        is_ranked = body.requests[0].best_of is not None
        places = exchange.places
        results.sort(key=lambda result: places[result.id] + (0 if is_ranked else result.index))
        completion = completion_of(
            results,
            self._service.model,
            body.form,
            self._service.bytes_of,
            created=int(time.time()),
            has_token_ids=bool(body.delivery.return_token_ids),
        )
        await answer.give(OK, _encoder.encode(completion))

    async def _stream(self, answer: Answer, body: ClientRequest, exchange: Exchange) -> None:
        writer = ChunkWriter(
            exchange.names[0],
            self._service.model,
            body.form,
            int(time.time()),
            has_token_ids=bool(body.delivery.return_token_ids),
            has_usage=body.delivery.includes_usage,
        )
        results: list[Result] = []
        is_ranked = body.requests[0].best_of is not None
        while True:
            news = await exchange.take()
            ended = {(n.id, n.index) for n in news if isinstance(n, Result) and n.error is None}
            chunks = []
            for item in news:  # the last chunk of an output includes the tokens of that step
                if isinstance(item, Result):
                    rank = item.index
                    if is_ranked:
                        rank = sum(result.id == item.id for result in results)
                    results.append(item)
                    if item.error is None:
                        chunks.append(writer.of_result(item, exchange.places[item.id] + rank))
                elif (item.id, item.index) not in ended:
                    chunks.append(writer.of_tokens(item, exchange.places[item.id] + item.index))
            part = b"".join(map(_event, chunks))
            if not answer.has_begun:
                _raise_failure(news[:1])
                await answer.begin_stream()
            if not exchange.num_left and all(result.error is None for result in results):
                break
            await answer.add(part)
            _raise_failure(results)
        if body.delivery.includes_usage:
            part += _event(writer.of_usage(results))
        await answer.add(part + _DONE, is_last=True)


def _event(chunk: AnswerChunk) -> bytes:
    return b"data: " + _encoder.encode(chunk) + b"\n\n"


def _raise_failure(news: Iterable[News]) -> None:
    for item in news:
        if isinstance(item, Result) and item.error is not None:
            raise of_result(item.error)


async def _watch(receive: Receive, exchange: Exchange) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.fail(ClientGoneError())


METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def make_app(service: Service, metrics: Callable[[], bytes]) -> Starlette:
    """Return the application; metrics: what /metrics answers."""
    created = int(time.time())

    model = {"id": service.model, "object": "model", "created": created, "owned_by": "you"}

    async def models(_: Request) -> Response:
        return _json(200, {"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        service.reader.check_model(request.path_params["name"])
        return _json(200, model)

    async def health(_: Request) -> Response:
        engine = service.engine
        if engine.failure is not None or engine.is_draining:
            return _json(503, {"status": "draining" if engine.failure is None else "failed"})
        return _json(200, {"status": "ok"})

    async def told_metrics(_: Request) -> Response:
        return Response(metrics(), media_type=METRICS_TYPE)

    middleware = [Middleware(Gate, service.access)]
    if origins := service.access.origins:
        cross = Middleware(
            CORSMiddleware, origins, ["GET", "POST"], ["*"], expose_headers=["x-request-id"]
        )
        middleware.insert(0, cross)  # so that refusals can be read, too
    return Starlette(
        routes=[
            *(Route(url, GeneratingEndpoint(url, service), methods=["POST"]) for url in URLS),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", told_metrics),
        ],
        middleware=middleware,
        exception_handlers={ApiError: _of_api_error, HTTPException: _of_http_error},
    )


def _json(status: int, content: object) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=JSON)


async def _of_api_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return Response(error.json, error.status, dict(error.headers), JSON)


async def _of_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = error.detail.lower().replace(" ", "-")
    told = ApiError(error.status_code, code, message, headers=error.headers or {})
    return await _of_api_error(request, told)
