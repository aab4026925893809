"""What holds for all tests: how random ones draw, threads of numpy, bytecode, garbage, SIGHUP.

Random tests draw new examples at every desk; in continuous integration they draw the same.
"""

import gc
import os
import signal
import sys

# Two workers with two threads each wait for each other; numpy reads this when it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from examples import PART, USUAL
from hypothesis import settings

# A command that has to compile its modules takes twice as long to start, and many are started.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

is_same = "CI" in os.environ
settings.register_profile("quick", max_examples=USUAL // PART, deadline=None, derandomize=is_same)
settings.register_profile("thorough", max_examples=USUAL, deadline=None, derandomize=is_same)
settings.load_profile("quick")


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Start a worker more than there are cores: many tests wait for processes."""
    return (yield) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect the tests without looks for garbage, of which there is none: it takes a fifth less.

    They are not looked through afterwards, either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def hangups_reach_commands():
    """Start commands with the SIGHUP of a shell, though nohup has it ignored here.

    What is ignored is inherited, a handler is not; and with one this process lives on, too.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)
