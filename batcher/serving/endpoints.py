"""The endpoints that generate: from a body to the engine, and from what that tells to an answer."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from batcher.requests.result_rows import OK, BytesOf, completion_of
from batcher.result import Result
from batcher.serving.bodies import MAX_QUICK_BYTES, BodyReader, ClientRequest, fields_of
from batcher.serving.chunks import AnswerChunk, ChunkWriter
from batcher.serving.engine_thread import EngineThread, Exchange, News
from batcher.serving.errors import ApiError, of_result
from batcher.serving.http import (
    Access,
    Answer,
    ClientGoneError,
    Limits,
    given_id,
    read_body,
)

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
        """Answer one request; if its client goes, it is aborted."""
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
        """Answer when all is generated."""
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
        """Answer while it is generated; what fails before the first token has a status."""
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
            part = b"".join(_events(_chunks(writer, is_ranked, exchange.places, news, results)))
            if not answer.has_begun:
                _raise_failure(news[:1])
                await answer.begin_stream()
            if not exchange.num_left and all(result.error is None for result in results):
                break
            await answer.add(part)
            _raise_failure(results)
        if body.delivery.includes_usage:
            part += b"".join(_events([writer.of_usage(results)]))
        await answer.add(part + _DONE, is_last=True)


def _chunks(
    writer: ChunkWriter,
    is_ranked: bool,  # noqa: FBT001 - of this file
    places: Mapping[str, int],
    news: Sequence[News],
    results: list[Result],
) -> Iterable[AnswerChunk]:
    """Yield the chunks of `news`, and append its results to `results`.

    The last chunk of an output includes the tokens that came with its result.
    """
    ended = {(n.id, n.index) for n in news if isinstance(n, Result) and n.error is None}
    for item in news:
        if isinstance(item, Result):
            rank = sum(result.id == item.id for result in results) if is_ranked else item.index
            results.append(item)
            if item.error is None:
                yield writer.of_result(item, places[item.id] + rank)
        elif (item.id, item.index) not in ended:
            yield writer.of_tokens(item, places[item.id] + item.index)


def _events(chunks: Iterable[AnswerChunk]) -> Iterable[bytes]:
    """Yield chunks as server-sent events."""
    for chunk in chunks:
        yield b"data: " + _encoder.encode(chunk) + b"\n\n"


def _raise_failure(news: Iterable[News]) -> None:
    """Raise an ApiError if an output has failed."""
    for item in news:
        if isinstance(item, Result) and item.error is not None:
            raise of_result(item.error)


async def _watch(receive: Receive, exchange: Exchange) -> None:
    """Tell whoever waits for news of a request when its client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.fail(ClientGoneError())
