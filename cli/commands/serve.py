"""`batchdecode serve`: answers OpenAI's API over HTTP, from one engine or several."""

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from batcher.errors import BatchdecodeError
from batcher.settings import GRAMMAR_TIMEOUT

from .. import shared
from ..config import OF_REQUESTS
from ..help import DECODING, DISPLAY, OUTPUT, flag, option
from ..options import (
    SchedulingOptions,
    as_command,
    num_bytes,
    refuse,
    refuse_stdout,
    scheduling_group,
)

SERVING = "Serving"
_NEEDED_MODULES = ("starlette", "granian", "uvloop", "prometheus_client")
_ORIGIN = re.compile(r"\*|[A-Za-z][A-Za-z0-9+.-]*://[^/?#@\s]+/?")
MAX_PORT, MAX_WORKERS, MAX_QUEUE = 2**16 - 1, 256, 2**20

EXAMPLES = (
    "batchdecode serve",
    "batchdecode serve --profile h100_llama3.1-8b_tp1 -b 64",
    "BATCHDECODE_API_KEY=secret batchdecode serve --host 0.0.0.0 --model smollm2",
)
NOTES = (
    "SIGTERM and Ctrl-C end it when all requests in it are answered; a second one ends it at once.",
    (
        "Exit codes: 0 it has ended as it was told to; 1 the model or a file failed; 2 bad usage; "
        "130, 143 a second Ctrl-C, SIGTERM."
    ),
)


def _usable_key(key: str | None) -> str | None:
    """Return a key that a header can carry, or raise; an empty variable sets an empty key."""
    key = os.environ.get("BATCHDECODE_API_KEY") if key is None else key
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        refuse(
            "must be printable ASCII, not be empty, and not begin or end with a space; unset "
            "BATCHDECODE_API_KEY to serve without a key"
        )
    return key


def _usable_origins(origins: list[str] | None) -> list[str] | None:
    """Return origins as browsers write them, or raise."""
    for origin in origins or ():
        if not _ORIGIN.fullmatch(origin):
            refuse(f"must be an origin such as https://chat.example:3000, or *, not {origin!r}")
    return origins


@dataclass(frozen=True, kw_only=True)
class ServeOptions(shared.ModelOptions):
    """The options of `batchdecode serve`; docs/serve.md says what each one means.

    max_body: in bytes.
    """

    host: str = option(
        SERVING, "Address to listen at.", "ADDRESS", default="127.0.0.1", is_common=True
    )
    port: int = option(
        SERVING,
        "Port; 0 takes one that is free.",
        "N",
        default=8000,
        min=0,
        max=MAX_PORT,
        is_common=True,
    )
    api_key: str | None = option(
        SERVING,
        "Key that requests must send; better set by BATCHDECODE_API_KEY.",
        "KEY",
        callback=_usable_key,
        is_common=True,
    )
    allow_origin: list[str] | None = option(
        SERVING,
        "Allow the web pages of this origin, as https://chat.example, or * for all; repeatable.",
        "ORIGIN",
        callback=_usable_origins,
    )
    served_model_name: str | None = option(
        SERVING, "What requests call the model.  [default: --model]", "NAME"
    )
    max_queue: int = option(
        SERVING,
        "Outputs that may wait for a slot; more are answered 429.",
        "N",
        default=1024,
        min=0,
        max=MAX_QUEUE,
    )
    max_body: Any = option(
        SERVING,
        "How large a request may be.",
        "SIZE",
        default="16MiB",
        callback=num_bytes,
        parser=str,
    )
    workers: int = option(
        SERVING,
        "Processes at one address, each with an engine and a model of its own.",
        "N",
        default=1,
        min=1,
        max=MAX_WORKERS,
    )
    config: str | None = shared.config(
        DECODING,
        "defaults of -b, --model, of requests and scheduling, and settings of models",
        OF_REQUESTS,
    )
    batch: int = shared.batch()
    model: str = shared.model()
    checkpoint: dict[str, Any] = shared.checkpoint_group().field
    defaults: dict[str, Any] = shared.defaults_group().field
    grammar_timeout: float = shared.grammar_timeout(default=GRAMMAR_TIMEOUT)
    strict_constraints: bool = shared.strict_constraints()
    scheduling: SchedulingOptions = scheduling_group(default_time="wall").field
    trace: str | None = option(
        OUTPUT,
        "Where every decision goes; with .gz compressed.",
        "FILE",
        callback=refuse_stdout,
        is_common=True,
    )
    force: bool = shared.force()
    live: Literal["auto", "always", "plain", "never"] = option(
        DISPLAY,
        "Show the slots: auto (on a terminal), always, plain (lines of words) or never.",
        "WHEN",
        default="auto",
        is_common=True,
    )
    color: shared.Color = shared.color()
    quiet: bool = flag(DISPLAY, "Say nothing but problems.", "-q", is_common=True)
    chat: bool | None = None  # what ModelOptions wants: messages say themselves that they are


def serve(options: ServeOptions) -> int:
    """Answer OpenAI's API over HTTP: completions, chats and streams."""
    if any(find_spec(name) is None for name in _NEEDED_MODULES):
        raise BatchdecodeError(
            "serve needs starlette, granian, uvloop and prometheus-client: "
            "install them with `pip install 'batchdecode[serve]'`"
        )
    from ..run.stdout import user_code_prints_to_stderr  # noqa: PLC0415 - as the next
    from ..serving.workers import serve_alone, serve_together  # noqa: PLC0415 - heavy

    with user_code_prints_to_stderr():
        return serve_alone(options) if options.workers == 1 else serve_together(options)


COMMAND = as_command(serve, ServeOptions, examples=EXAMPLES, notes=NOTES)
