"""From the options of a server to what it is made of: an engine, its clock and its address."""

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

from batcher.engine import Engine
from batcher.errors import BatchdecodeError
from batcher.formats.requests import RequestParser
from batcher.models.base import Model, bytes_of
from batcher.models.simulated import SimulatedModel
from batcher.scheduling.clock import PacedClock, WallClock
from batcher.serving.access import Access
from batcher.serving.bodies import BodyReader
from batcher.serving.endpoints import Service
from batcher.serving.engine_thread import EngineThread, ServerClock, Watcher
from batcher.serving.http import Limits

from ..commands.serve import ServeOptions
from ..models import capabilities_of

MAX_STEPS_KEPT = 2**20


def make_clock(options: ServeOptions) -> ServerClock:
    """Return the clock of a server: the wall, or a profile that is kept to on the wall.

    Raises:
        BatchdecodeError: there is no such profile.
    """
    step_time = options.scheduling.step_time()
    if step_time is None:
        return WallClock(max_kept=MAX_STEPS_KEPT)
    return PacedClock(step_time, MAX_STEPS_KEPT)


def make_engine(options: ServeOptions, model: Model, clock: ServerClock) -> Engine:
    """Return the engine that the options describe.

    Raises:
        BatchdecodeError: they contradict each other, or name what there is not.
    """
    scheduling = options.scheduling.fitted(model)
    if scheduling.check and isinstance(model, SimulatedModel):
        model.is_attentive = True
    try:
        return Engine(
            model,
            options.batch,
            settings=scheduling.settings(),
            clock=clock,
            is_streaming=True,
            is_checked=bool(scheduling.check),
            grammar_timeout=options.grammar_timeout,
            strict_constraints=options.strict_constraints,
            speculation=scheduling.speculation,
        )
    except MemoryError as error:
        raise BatchdecodeError(f"there is no memory for so many blocks: {error}") from error


def make_service(
    options: ServeOptions,
    model: Model,
    engine: Engine,
    clock: ServerClock,
    watcher: Watcher,
    worker: int,
    address: str,
) -> Service:
    """Return what the endpoints of a server have in common.

    address: the numeric address at which it listens.
    worker: its number, from 0, with which the names of requests begin if there are several.
    """
    prefix = f"{worker}-" if options.workers > 1 else ""
    engine.capabilities = capabilities = capabilities_of(engine, options)
    name = options.served_model_name or options.model
    token_bytes = model.tokenizer.token_bytes
    return Service(
        engine=EngineThread(engine, clock, watcher, options.max_queue, prefix),
        reader=BodyReader(
            RequestParser(capabilities), name, asks_tokenizer=capabilities.encode is not None
        ),
        model=name,
        bytes_of=lambda token: bytes_of(token, token_bytes),
        limits=Limits(max_body_bytes=options.max_body),
        access=_access_of(options, address),
    )


def _access_of(options: ServeOptions, address: str) -> Access:
    """Return which requests may enter; see batcher/serving/access.py."""
    origins = tuple(origin.lower().rstrip("/") for origin in options.allow_origin or ())
    hosts = None
    if ip_address(address).is_loopback:
        allowed = (urlsplit(origin).netloc.rpartition("@")[2] for origin in origins)
        names = {re.sub(r":\d*$", "", host) for host in allowed}
        bound = f"[{options.host}]" if ":" in options.host else options.host.lower()
        hosts = frozenset({"localhost", "127.0.0.1", "[::1]", bound} | names)
    return Access(options.api_key, origins, hosts)
