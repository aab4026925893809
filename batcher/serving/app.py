"""The server as a Starlette application: what is answered under which address."""

import time
from collections.abc import Callable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batcher.requests.openai import URLS
from batcher.serving.endpoints import GeneratingEndpoint, Service
from batcher.serving.errors import ApiError
from batcher.serving.http import JSON, Gate

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
    """Answer with an error of ours."""
    if not isinstance(error, ApiError):
        raise error
    return Response(error.json, error.status, dict(error.headers), JSON)


async def _of_http_error(request: Request, error: Exception) -> Response:
    """Answer to an address or a method that there is not."""
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = error.detail.lower().replace(" ", "-")
    told = ApiError(error.status_code, code, message, headers=error.headers or {})
    return await _of_api_error(request, told)
