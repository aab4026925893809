"""Where stdout is: descriptor 1, but while user code runs that is stderr, and stdout is kept.

So nothing comes between the results, by whatever way it is written: `print`, `os.write`, a library
in C, a child process.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress

_descriptors = [1]  # the last one is stdout


def stdout_descriptor() -> int:
    """Return the descriptor that results are written to."""
    return _descriptors[-1]


@contextmanager
def user_code_prints_to_stderr() -> Iterator[None]:
    """Make 1 what stderr is; child processes do not get the descriptor that is stdout meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    _descriptors.append(kept)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed and still hold
        _descriptors.pop()
        os.dup2(kept, 1)
        os.close(kept)


def end_stdout() -> None:
    """Let what is printed while the process ends go to stderr: all that was to be written is."""
    with suppress(OSError, ValueError):  # Python says so when it ends
        sys.stdout.flush()
        os.dup2(2, 1)
