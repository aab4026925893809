"""Helper processes: their signals, their threads and their end.

A helper ignores the signals that a terminal or a supervisor sends to all processes.  It imports
nothing from the current folder unless `MODULE:NAME` does.  It ends with its parent.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.resource_tracker import ensure_running
from threading import Thread

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_SAFE_PATH = ("PYTHONSAFEPATH", "for helpers of batchdecode")


@contextmanager
def helpers_started() -> Iterator[None]:
    """Let helpers that are started inside ignore signals and the current folder.

    multiprocessing starts `python -c`, which searches the current folder first unless the
    environment forbids it.
    """
    name, value = _SAFE_PATH
    is_set = name in os.environ
    os.environ.setdefault(name, value)
    try:
        ensure_running()  # starting this helper later would unblock the signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # inherited
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        if not is_set:
            del os.environ[name]


def num_threads() -> int:
    """Return the number of threads for products: what the environment says, else all cores."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    if stated.isdecimal() and int(stated):
        return int(stated)
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


@contextmanager
def threads_shared(num_processes: int) -> Iterator[None]:
    """Let processes that are started inside share the cores, unless the environment says how."""
    if any(name in os.environ for name in _THREADS):
        yield
        return
    os.environ |= dict.fromkeys(_THREADS, str(max(1, num_threads() // num_processes)))
    try:
        yield
    finally:
        for name in _THREADS:
            del os.environ[name]


def become_helper(folder: str | None = None) -> None:
    """End this process when its parent ends; processes of a model get the usual path again.

    folder: temporary files of the parent's multiprocessing, removed here if it was killed.
    """
    name, value = _SAFE_PATH
    if os.environ.get(name) == value:
        del os.environ[name]
    Thread(target=_end_after_parent, args=(folder,), daemon=True).start()


def _end_after_parent(folder: str | None) -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
