"""Processes by their numbers: whether they are there, or have gone."""

import time
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
