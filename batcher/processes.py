"""Processes that compute for this one: which signals they hear, which threads they have, their end.

Rule: they take no notice of what a terminal or a supervisor sends to all, and end with this one.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.resource_tracker import ensure_running
from threading import Thread

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Let processes that are started inside take no notice of signals for this one."""
    ensure_running()  # which would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # which they inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def end_with_parent() -> None:
    """See to it that this process ends at once when the one that started it has, in whatever."""
    Thread(target=_end_after_parent, daemon=True).start()


def _end_after_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
