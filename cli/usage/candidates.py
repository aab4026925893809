"""What the value of an option may be, for a shell that completes it.

Rule: nothing here takes long: numpy is not imported, and of a large file only a part is read.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

from batcher.settings import SETTINGS

_MAX_READ = 2**25  # bytes of a file in which ids are looked for
_MAX_IDS = 200
_GZIP = b"\x1f\x8b"


class CompletionItem(NamedTuple):
    """A word that may stand there, and what it means, if that is not plain."""

    text: str
    meaning: str = ""


class Files(NamedTuple):
    """Files whose name matches, and folders; of no pattern folders alone."""

    pattern: str = "*"


class Asked(NamedTuple):
    """What is asked for: how it begins, and the other words of the line."""

    incomplete: str
    words: list[str]


Candidates = Iterator[CompletionItem | Files]

_OF_FILES = {"FILE", "INPUT", "LOG", "A", "B", "CORPUS"}  # what stands for a file in help


def candidates_of(param: Any, offers: str, asked: Asked) -> Candidates:
    """Return what the value of a parameter of typer's may be.

    offers: what its declaration says that it takes.
    """
    first, comma, last = asked.incomplete.rpartition(",")
    if comma and param.metavar.endswith(",..."):
        for each in candidates_of(param, offers, asked._replace(incomplete=last)):
            if isinstance(each, CompletionItem):
                yield each._replace(text=f"{first},{each.text}")
        return
    if offers in _OFFERED:
        yield from _OFFERED[offers](asked)
    choices = getattr(param.type, "choices", ())
    if not choices and offers in SETTINGS:
        choices = SETTINGS[offers].choices or ()  # of several values: the type is a text
    yield from (CompletionItem(str(choice)) for choice in choices)
    if param.metavar.removesuffix(",...") in _OF_FILES:
        yield Files()
    elif param.metavar == "FOLDER":
        yield Files("")


def _policies(_: Asked) -> Candidates:
    from batcher.scheduling.policies import POLICIES  # noqa: PLC0415 - only when asked, as all

    yield from map(CompletionItem, POLICIES)


def _routers(_: Asked) -> Candidates:
    from batcher.planning.routers import ROUTERS  # noqa: PLC0415 - as above

    yield from map(CompletionItem, ROUTERS)


def _profiles(asked: Asked) -> Candidates:
    """Yield profiles, the other forms of a step time and, of a roofline, models and GPUs."""
    kind, *parts = asked.incomplete.split(":")
    if kind == "roofline" and parts:
        names = _names_in("models.yaml") if len(parts) == 1 else _names_in("hardware.yaml")
        start = asked.incomplete.rpartition(":")[0]
        yield from (CompletionItem(f"{start}:{name}") for name in names)
        return
    yield from map(CompletionItem, _names_in("profiles.yaml"))
    yield CompletionItem("constant:", "SECONDS")
    yield CompletionItem("roofline:", "MODEL:GPU")
    yield Files("*.yaml")


def _names_in(file: str) -> Mapping[str, Any]:
    from batcher.timing.catalog import shipped  # noqa: PLC0415 - as above

    return shipped(file)


def _models(_: Asked) -> Candidates:
    yield CompletionItem("simulated", "the default")
    yield CompletionItem("smollm2", "a checkpoint to try")
    yield CompletionItem("hf:", "NAME or FOLDER of transformers")
    yield CompletionItem("openai:", "URL of a server")
    yield Files("*.gguf")


def _drafts(asked: Asked) -> Candidates:
    yield CompletionItem("ngram")
    yield from _models(asked)


def _acceptance(_: Asked) -> Candidates:
    from batcher.speculation.settings import Acceptance  # noqa: PLC0415 - as above

    yield from map(CompletionItem, get_args(Acceptance))


def _columns(_: Asked) -> Candidates:
    from ..views.plan_columns import COLUMNS  # noqa: PLC0415 - as above

    yield from map(CompletionItem, COLUMNS)


def _slo_metrics(_: Asked) -> Candidates:
    from batcher.metrics.slo import METRICS  # noqa: PLC0415 - as above

    yield from (CompletionItem(f"{name}=", meaning) for name, meaning in METRICS.items())


def _slos(asked: Asked) -> Candidates:
    yield from _slo_metrics(asked)
    yield CompletionItem("priority=", "of a class of requests: priority=1:ttft=0.3")


def _sources(_: Asked) -> Candidates:
    from ..workloads.write import OPTIONS_OF  # noqa: PLC0415 - as above

    yield from map(CompletionItem, OPTIONS_OF)


def _topics(asked: Asked) -> Candidates:
    """Yield the pages; from the first letter on commands, options and all else in one word."""
    from .topics import heading_of, pages, topics  # noqa: PLC0415 - as above

    found = {page.page: heading_of(page) for group in pages().values() for page in group}
    if asked.incomplete:
        names = (name for topic in topics() for name in topic.names if " " not in name)
        found = dict.fromkeys(sorted(names), "") | found
    yield from (CompletionItem(name, meaning) for name, meaning in found.items())


def _request_ids(asked: Asked) -> Candidates:
    """Yield ids of the requests of the last file in the line, a trace or requests."""
    files = [Path(word) for word in asked.words if Path(word).is_file()]
    return map(CompletionItem, _ids_in(files[-1], asked.incomplete) if files else ())


def _ids_in(file: Path, start: str) -> Iterator[str]:
    """Yield the ids in the first part of a file that begin so, some of them if there are many."""
    with file.open("rb") as packed:
        is_gzip = packed.read(len(_GZIP)) == _GZIP
        packed.seek(0)
        content: Any = gzip.GzipFile(fileobj=packed) if is_gzip else packed
        text = content.read(_MAX_READ)
    quoted = json.dumps(start, ensure_ascii=False)[1:-1]
    pattern = rf'"(?:id|custom_id)": ?("{re.escape(quoted)}(?:[^"\\]|\\.)*")'
    found = (match[1] for match in re.finditer(pattern.encode(), text))
    for name in islice(_distinct(found), _MAX_IDS):
        yield json.loads(name)


def _distinct(found: Iterator[bytes]) -> Iterator[bytes]:
    seen = set[bytes]()
    for name in found:
        if name not in seen:
            seen.add(name)
            yield name


_OFFERED: dict[str, Callable[[Asked], Candidates]] = {
    "policy": _policies,
    "router": _routers,
    "profile": _profiles,
    "profile_name": lambda _: map(CompletionItem, _names_in("profiles.yaml")),
    "model": _models,
    "model_shape": lambda _: map(CompletionItem, _names_in("models.yaml")),
    "gpu": lambda _: map(CompletionItem, _names_in("hardware.yaml")),
    "draft": _drafts,
    "acceptance": _acceptance,
    "column": _columns,
    "slo": _slo_metrics,
    "slos": _slos,
    "source": _sources,
    "request_id": _request_ids,
    "topic": _topics,
}
