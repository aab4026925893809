"""batchdecode without the wait for its imports: forked from a process that has made them.

`command_line()` stands for the tool in a command line.  What it starts (command_client.py) hands
its descriptors, folder, environment, umask, file-size limit and arguments to a server, which forks
a process that takes them over; one whose client is gone is killed.  COMMAND_SETUP, in the
environment of a command, names a file of Python that is run before it.  Rule: what Python reads
before it runs anything, as PYTHONUTF8 and LC_ALL, is as at the server, and modules are not taken
down at the end; where these count, start the tool.
"""

import ast
import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pkgutil
import resource
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
SHARED_SERVER = "COMMAND_SERVER"  # in the environment: the socket of one that is running
NEED_TORCH = ("batcher.training.", "batcher.hf.")
KEPT_MEMORY = {  # a page that a command has given back and takes anew costs a fault
    name: str(2**30) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
}
OF_OTHERS = ("fsspec.implementations.http", "gguf", "jinja2", "llguidance", "tokenizers")


@cache
def command_line():
    path = os.environ.get(SHARED_SERVER) or start_server()
    return [sys.executable, "-I", "-S", str(TESTS / "command_client.py"), path]


def start_server():
    """Start a server that ends with this process; return the path of its socket."""
    folder = Path(tempfile.mkdtemp())
    path = str(folder / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, str(TESTS / "command_server.py"), str(listener.fileno())],
            stdin=subprocess.PIPE,  # the server ends when this is closed
            env={**os.environ, "PYTHONPATH": str(TESTS.parent), "PYTHONUTF8": "1", **KEPT_MEMORY},
            pass_fds=[listener.fileno()],
        )
    atexit.register(shutil.rmtree, folder)
    atexit.register(server.communicate)
    return path


class Command(NamedTuple):
    """A process that runs for a client."""

    process: int
    connection: socket.socket


def serve(listener):
    """Fork a process for each client; return in these, ready to be the command."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    ends = {}  # by the descriptor that tells that the process has ended
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                os._exit(0)
            elif key.fileobj is listener:
                command = forked(listener)
                if command is None:
                    leave(selector)
                    return
                end = os.pidfd_open(command.process)
                ends[end] = command
                selector.register(end, selectors.EVENT_READ)
                selector.register(command.connection, selectors.EVENT_READ, end)
            elif key.fd in ends:
                command = ends.pop(key.fd)
                selector.unregister(command.connection)
                selector.unregister(key.fd)
                os.close(key.fd)
                answer(command, os.waitstatus_to_exitcode(os.waitpid(command.process, 0)[1]))
                command.connection.close()
            elif key.data in ends:  # and the client is gone
                os.kill(ends[key.data].process, signal.SIGKILL)


def forked(listener):
    """Fork for the client that waits; return None in the new process, which is as the client is."""
    connection, _ = listener.accept()
    size, descriptors, *_ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as told:
        client = ast.literal_eval(told.read(int.from_bytes(size, "big")).decode())
    process = os.fork()
    if process == 0:
        connection.close()
        become(descriptors, *client)
        return None
    for descriptor in descriptors:
        os.close(descriptor)
    command = Command(process, connection)
    answer(command, process)
    return command


def leave(selector):
    """Close what is the server's alone, in a process that it has forked."""
    for key in [*selector.get_map().values()]:
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        elif key.fd != 0:
            os.close(key.fd)
    selector.close()


def answer(command, number):
    with contextlib.suppress(ConnectionError):
        command.connection.sendall(b"%d\n" % number)


def become(descriptors, folder, environment, umask, file_size, arguments):
    """Make this process what the client is."""
    for descriptor, theirs in enumerate(descriptors):
        os.dup2(theirs, descriptor)
        os.close(theirs)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.umask(umask)
    resource.setrlimit(resource.RLIMIT_FSIZE, file_size)
    sys.dont_write_bytecode |= file_size[0] != resource.RLIM_INFINITY  # half a .pyc would be left
    sys.argv = ["batchdecode", *arguments]
    sys.path[0] = ""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as Python does it
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as above


def prepare():
    """Import all that a command may import late, but for what few do, and make all parsers."""
    for package in map(importlib.import_module, ("batcher", "cli")):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            is_command = module.name.endswith(".__main__")  # importing it runs one
            if not is_command and not module.name.startswith(NEED_TORCH):
                importlib.import_module(module.name)
    for name in OF_OTHERS:
        importlib.import_module(name)
    commands = importlib.import_module("cli.commands")
    for name in commands.COMMANDS:
        commands.command_of(name)
    gc.freeze()


def end(status):
    """End as Python does, but leave the modules: taking them down takes longer than a command."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries in C have printed and still hold
    os._exit(status)


if __name__ == "__main__":
    prepare()
    serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        if setup := os.environ.get("COMMAND_SETUP"):
            runpy.run_path(setup)
        importlib.import_module("cli.main").main()
    except SystemExit as leaving:
        if not isinstance(leaving.code, int):
            raise
        end(leaving.code)
    end(0)
