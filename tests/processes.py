"""Processes by their numbers: whether they are there, or have gone."""

import time
from contextlib import suppress
from pathlib import Path


def is_there(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def are_gone(pids):
    deadline = time.monotonic() + 20
    while any(map(is_there, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_there, pids))


def children_of(pid):
    """Return the processes that `pid` has started, by what they are told to do."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            if int(status.read_text().rpartition(")")[2].split()[1]) == pid:
                found[int(status.parent.name)] = (status.parent / "cmdline").read_text()
    return found
