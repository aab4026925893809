"""Somebody else's code may fork; its child process ends where it would come back to ours."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def child_ends_here() -> Iterator[None]:
    """End a process that was forked inside, before it goes on with what is its parent's.

    It ends as one of Python's does, but without what is to be done at exit: buffers and locks are
    those of the parent, too.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(_status_of(sys.exception()))


def _status_of(error: BaseException | None) -> int:
    """Return the exit status of a process that `error` ends, which it is told of."""
    if error is None:
        return 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or 0) & 0xFF
    sys.excepthook(type(error), error, error.__traceback__)
    return 1
