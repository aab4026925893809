"""`batchdecode serve`: serves OpenAI's API over HTTP, with one engine or several."""

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import typer

from batcher.errors import BatchdecodeError

from ..command import DECODING, DISPLAY, command, flag, option
from ..options import (
    Color,
    DecodingOptions,
    Live,
    SchedulingOptions,
    color_option,
    config_option,
    force_flag,
    live_option,
    num_bytes,
    scheduling_group,
    trace_option,
)
from ..signals import user_code_prints_to_stderr

SERVING = "Serving"
_NEEDED_MODULES = ("starlette", "granian", "uvloop", "prometheus_client")
_ORIGIN = re.compile(r"\*|[A-Za-z][A-Za-z0-9+.-]*://[^/?#@\s]+/?")
MAX_PORT, MAX_WORKERS, MAX_QUEUE = 2**16 - 1, 256, 2**20


def _usable_key(key: str | None) -> str | None:
    """Return an API key that fits into a header, or raise; an empty variable sets an empty key."""
    key = os.environ.get("BATCHDECODE_API_KEY") if key is None else key
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise typer.BadParameter(
            "must be printable ASCII, not be empty, and not begin or end with a space; unset "
            "BATCHDECODE_API_KEY to serve without a key"
        )
    return key


def _usable_origins(origins: list[str] | None) -> list[str] | None:
    for origin in origins or ():
        if not _ORIGIN.fullmatch(origin):
            raise typer.BadParameter(
                f"must be an origin such as https://chat.example:3000, or *, not {origin!r}"
            )
    return origins


@dataclass(frozen=True, kw_only=True)
class ServeOptions(DecodingOptions):
    """The options of `batchdecode serve`; docs/guide/serve.md explains them.

    max_body: in bytes.
    """

    host: str = option(
        SERVING, "Address to listen on.", "ADDRESS", common=True, default="127.0.0.1"
    )
    port: int = option(
        SERVING, "Port (0 picks a free one).", "N", min=0, max=MAX_PORT, common=True, default=8000
    )
    api_key: str | None = option(
        SERVING,
        "Key that requests must send; set BATCHDECODE_API_KEY instead to keep it secret.",
        "KEY",
        callback=_usable_key,
        common=True,
    )
    allow_origin: list[str] | None = option(
        SERVING,
        "Allow web pages from ORIGIN, such as https://chat.example, or * for all; repeatable.",
        "ORIGIN",
        callback=_usable_origins,
    )
    served_model_name: str | None = option(
        SERVING, "Model name in requests.  [default: --model]", "NAME"
    )
    max_queue: int = option(
        SERVING,
        "Maximum number of waiting outputs; further requests get status 429.",
        "N",
        min=0,
        max=MAX_QUEUE,
        default=1024,
    )
    max_body: Any = option(
        SERVING,
        "Maximum size of a request body.",
        "SIZE",
        callback=num_bytes,
        parser=str,
        default="16MiB",
    )
    workers: int = option(
        SERVING,
        "Number of processes that share the address, each with its own engine and model.",
        "N",
        min=1,
        max=MAX_WORKERS,
        default=1,
    )
    config: str | None = config_option(
        DECODING, "defaults for -b, --model, requests and scheduling, and settings of models"
    )
    scheduling: SchedulingOptions = scheduling_group(default_time="wall").as_field()
    trace: str | None = trace_option()
    force: bool = force_flag()
    live: Live = live_option("slots")
    color: Color = color_option()
    quiet: bool = flag(DISPLAY, "Show only problems.", "-q", common=True)
    chat: bool = False  # no option: messages are chats, and prompts are not


def serve(options: ServeOptions) -> int:
    """Serve OpenAI's API over HTTP: completions, chats and streams."""
    if any(find_spec(name) is None for name in _NEEDED_MODULES):
        raise BatchdecodeError(
            "serve needs starlette, granian, uvloop and prometheus-client: "
            "install them with `pip install 'batchdecode[serve]'`"
        )
    from ..server import serve_requests  # noqa: PLC0415 - heavy

    with user_code_prints_to_stderr():
        return serve_requests(options)


COMMANDS = {
    "serve": command(
        serve,
        ServeOptions,
        examples=(
            "batchdecode serve",
            "batchdecode serve --profile h100_llama3.1-8b_tp1 -b 64",
            "BATCHDECODE_API_KEY=secret batchdecode serve --host 0.0.0.0 --model smollm2",
        ),
        notes=(
            (
                "SIGTERM or Ctrl-C stops the server after the requests that it has accepted; a "
                "second signal stops it at once."
            ),
            (
                "Exit codes: 0 stopped by a signal; 1 the model or a file failed; 2 bad usage; 130 "
                "a second Ctrl-C; 143 a second SIGTERM."
            ),
        ),
    )
}
