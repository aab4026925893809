"""The file beside a log of requests that says how the run was limited."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from batcher.errors import BatchdecodeError
from batcher.simulation.run_meta import NAMES, Limit, read_run_meta

from ..running.problems import say
from ..screen.cells import printable

SUFFIX = "meta.json"
MAX_SIZE = 2**24  # bytes


class MetaFile(NamedTuple):
    """The name of the file, and what it says; nothing if there is none."""

    name: str
    limits: Mapping[str, Limit]


def read_meta_file(given: str | None, log: str | None) -> MetaFile:
    """Return what the `given` file says of the run of a log, or if None the one beside the log.

    Raises:
        BatchdecodeError: it cannot be read, or is not what it should be.
    """
    path = Path(given) if given is not None else _beside(log)
    if path is None:
        return MetaFile("", {})
    meta = read_run_meta(_content(path), str(path))
    if given is not None and not meta.limits:
        raise BatchdecodeError(f"{path} says nothing of limits; it would, under {', '.join(NAMES)}")
    for field in meta.not_simulated:
        say(f"{printable(f'{path}: {field} is not simulated')}\n")
    return MetaFile(path.name, meta.limits)


def _beside(log: str | None) -> Path | None:
    """Return the file beside `log` whose name, without its end, the log's begins with.

    Of several it is the one with the longest name, None if there is none.
    """
    if log is None or log == "-":
        return None
    path = Path(log)
    found = [
        other
        for other in path.parent.glob(f"*{SUFFIX}")
        if path.name.startswith(other.name.removesuffix(SUFFIX).rstrip("_.-"))
    ]
    return max(found, key=lambda other: len(other.name), default=None)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SIZE + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BatchdecodeError(f"cannot read {path}: {reason}") from None
    if len(content) > MAX_SIZE:
        raise BatchdecodeError(
            f"{path} is larger than {MAX_SIZE >> 20} MiB: no file about a run is"
        )
    return content
