"""Helper processes: how they are started, which threads they have, how they end.

Rule: a helper ignores what a terminal or a supervisor sends to all. It imports nothing from the
current folder unless `MODULE:NAME` names it. It ends with the process that started it.
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
    """Start helpers inside: they ignore signals, and their path lacks the current folder.

    multiprocessing starts `python -c`, which searches the current folder first; only the
    environment keeps it from that.
    """
    name, value = _SAFE_PATH
    is_set = name in os.environ
    os.environ.setdefault(name, value)
    try:
        ensure_running()  # a helper, too; it would let signals through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # which they inherit
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        if not is_set:
            del os.environ[name]


@contextmanager
def threads_shared(num_processes: int) -> Iterator[None]:
    """Let processes that are started inside share the processors, unless somebody has said how."""
    if any(name in os.environ for name in _THREADS):
        yield
        return
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    os.environ |= dict.fromkeys(_THREADS, str(max(1, num_cpus // num_processes)))
    try:
        yield
    finally:
        for name in _THREADS:
            del os.environ[name]


def become_helper(folder: str | None = None) -> None:
    """End this process when its parent ends; what a model starts here gets the usual path.

    folder: what multiprocessing keeps of the parent, to be removed if that was killed.
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
