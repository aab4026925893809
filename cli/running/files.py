"""Checks of the files a run is to write, before the first of them is touched."""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from cli.running.output import OutputError

NamedPath = tuple[str, str | None]  # what a file is to the run, an option for example; its path


def side_files(output: str | None) -> list[str]:
    """Return the files that a run with these results writes beside them."""
    if output is None or not _may_be_file(output):
        return []
    record = f"{output}.run.json"
    repaired = [f"{output}.new.gz"] if output.endswith(".gz") else []
    return [record, f"{record}.new", *repaired]


def check_distinct(input_status: os.stat_result, outputs: Iterable[NamedPath]) -> None:
    """Make sure that no two of the run's files are one and the same.

    Raises:
        OutputError: two of them are.
    """
    used: dict[object, str] = {(input_status.st_dev, input_status.st_ino): "the input"}
    for name, path in outputs:
        if path is None or not _may_be_file(path):
            continue  # two streams may well go to one terminal, or to /dev/null
        try:
            status = Path(path).stat()
        except OSError:
            key: object = os.path.realpath(path)
        else:
            key = (status.st_dev, status.st_ino)
        if key in used:
            raise OutputError(f"{name} {path} is {used[key]} too: they must be different files")
        used[key] = name


def check_writable(path: str) -> None:
    """Make sure that the file `path` can be opened for writing; what it holds stays.

    Raises:
        OutputError: it cannot.
    """
    try:
        if not Path(path).exists():
            folder = Path(os.path.realpath(path)).parent
            next(folder.iterdir(), None)  # which is an error unless it is a folder
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        elif _may_be_file(path):
            os.close(os.open(path, os.O_WRONLY))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputError(f"cannot write {path}: {reason}") from error


def _may_be_file(path: str) -> bool:
    """Return whether writing to `path` changes a file, or would have to."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
