"""Values for shell completion: policies, profiles, models, ids and more.

Completion has to be quick: it does not import numpy, and reads only a part of a large file.
"""

import gzip
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from batcher.settings import SETTINGS
from batcher.speculation.settings import Acceptance

_MAX_READ = 2**25  # bytes of a file in which ids are searched
_MAX_IDS = 200


def candidates(
    wanted: str | Callable[[str], Iterable[str | tuple[str, str]]], incomplete: str
) -> list[tuple[str, str]]:
    """Return the values that complete `incomplete`, with their descriptions or "".

    wanted: as `option` declares it.  A comma separates values.
    """
    first, comma, last = incomplete.rpartition(",")
    found = _values(wanted, last) if isinstance(wanted, str) else wanted(last)
    values = ((v, "") if isinstance(v, str) else v for v in found)
    return [(f"{first}{comma}{v}", text) for v, text in values if v.startswith(last)]


def _values(name: str, start: str) -> Iterable[str | tuple[str, str]]:
    if name in _TABLES:
        module, attribute = _TABLES[name]
        found: Iterable[str] = getattr(import_module(module, __package__), attribute)
        return found
    if name in SETTINGS:
        return SETTINGS[name].choices or ()
    if name in _CATALOGS or name == "profile":
        from batcher.timing.catalog import shipped  # noqa: PLC0415 - only when asked

        return _profiles(start) if name == "profile" else shipped(_CATALOGS[name])
    if name in {"model", "draft"}:
        return _MODELS if name == "model" else ["ngram", *_MODELS]
    if name == "acceptance":
        return get_args(Acceptance)
    if name in {"slo", "slos"}:
        from batcher.metrics.slo import METRICS  # noqa: PLC0415 - only when asked

        metrics = [(f"{metric}=", text) for metric, text in METRICS.items()]
        classes = ("priority=", "a class of requests: priority=1:ttft=0.3")
        return [*metrics, classes] if name == "slos" else metrics
    if name == "trace_input":  # a file, or the second word of a command
        return ("why", "diff") if start else ()
    return _request_ids(start)


# Modules to import on demand.
_TABLES = {
    "policy": ("batcher.scheduling.queue", "POLICIES"),
    "router": ("batcher.planning.routers", "ROUTERS"),
    "column": (".views.plan_columns", "COLUMNS"),
}
_CATALOGS = {"profile_name": "profiles.yaml", "model_shape": "models.yaml", "gpu": "hardware.yaml"}
_MODELS = (
    ("simulated", "the default"),
    ("smollm2", "a checkpoint to try"),
    ("hf:", "NAME or FOLDER of transformers"),
    ("openai:", "URL of a server"),
)


def _profiles(start: str) -> Iterator[str | tuple[str, str]]:
    from batcher.timing.catalog import shipped  # noqa: PLC0415 - as above

    kind, *parts = start.split(":")
    if kind == "roofline" and parts:
        before = start.rpartition(":")[0]
        names = shipped("models.yaml" if len(parts) == 1 else "hardware.yaml")
        yield from (f"{before}:{name}" for name in names)
        return
    yield from shipped("profiles.yaml")
    yield "constant:", "SECONDS"
    yield "roofline:", "MODEL:GPU"


def _request_ids(start: str) -> Iterator[str]:
    """Yield the ids in the last file of the line, a trace or requests."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    try:
        words = shlex.split(line)
    except ValueError:  # a quote is open
        words = line.split()
    files = [word for word in words if Path(word).is_file()]
    if not files:
        return
    with Path(files[-1]).open("rb") as packed:
        is_gzip = packed.read(2) == b"\x1f\x8b"
        packed.seek(0)
        content: Any = gzip.GzipFile(fileobj=packed) if is_gzip else packed
        text = content.read(_MAX_READ)
    quoted = json.dumps(start, ensure_ascii=False)[1:-1]
    pattern = rf'"(?:id|custom_id)": ?("{re.escape(quoted)}(?:[^"\\]|\\.)*")'
    found = dict.fromkeys(match[1] for match in re.finditer(pattern.encode(), text))
    yield from (json.loads(name) for name in islice(found, _MAX_IDS))
