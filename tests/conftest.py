"""What holds for all tests: how random ones draw, threads of numpy, bytecode, garbage, SIGHUP.

Random tests draw new examples at every desk; in continuous integration they draw the same.
"""

import gc
import os
import pty
import signal
import sys
from pathlib import Path

# Two workers with two threads each wait for each other; numpy reads this when it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import command_server
import pytest
from _pytest.assertion import rewrite
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
    return (yield) + 1


def pytest_configure(config):
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[command_server.SHARED_SERVER] = command_server.start_server()


def pytest_make_parametrize_id(val, argname):
    """Name bytes by their argument: workers must agree on names, and gzip writes the time."""
    return argname if isinstance(val, bytes) else None


def compile_share(config):
    """Compile what no worker has compiled yet, this one its share; else each would compile all."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[number::count]:
        compiled = path.parent / "__pycache__" / f"{path.stem}{rewrite.PYC_TAIL}"
        if not compiled.exists():
            compiled.parent.mkdir(exist_ok=True)
            stat, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, compiled)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Collect the tests without looks for garbage, of which there is none: it takes a fifth less.

    They are not looked through afterwards, either.
    """
    gc.disable()
    compile_share(session.config)
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


@pytest.fixture
def tty():
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)
