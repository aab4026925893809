"""Servers at one address: one in this process, or several in processes of their own.

The kernel deals connections out to them, and they know nothing of each other.  This process then
only passes signals on, and ends with all of them when one ends that was not told to.
"""

import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from batcher.errors import BatchdecodeError

from ..commands.serve import ServeOptions
from ..errors import reason_of
from ..run.problems import say
from ..screen.terminal import counted, printable_lines
from ..signals import stopping_signals
from .server import Server, url_of


def serve_alone(options: ServeOptions) -> int:
    """Serve in this process; return the exit status.

    Raises:
        BatchdecodeError: an option is not right, or the address cannot be had.
    """
    with bound(options) as listener:
        return Server(options, listener).run()


def serve_together(options: ServeOptions) -> int:
    """Serve in as many processes as the options say; return the exit status.

    Raises:
        BatchdecodeError: an option is not right, or the address cannot be had.
    """
    for name, is_given in (("trace", options.trace is not None), ("live", options.live != "auto")):
        if is_given:
            raise BatchdecodeError(f"--{name} is about one engine: it needs --workers 1")
    stopping = stopping_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping)  # until they are passed on
    with tempfile.TemporaryDirectory() as folder, bound(options, is_shared=True) as first:
        context = get_context("fork")  # cheap, and there is no thread yet
        ready, tell_ready = context.Pipe(duplex=False)
        workers = [
            context.Process(target=_work, args=(options, first, number, Path(folder), tell_ready))
            for number in range(options.workers)
        ]
        for worker in workers:
            worker.start()
        received = _pass_on(stopping, workers)
        are_ready = _wait_until_ready(workers, ready)
        if are_ready and not options.quiet:
            whole = f"{counted(options.workers, 'worker')} of {counted(options.batch, 'slot')}"
            say(printable_lines(f"serving {options.model} with {whole} at {url_of(first)}\n"))
        return _watch(workers, received)


def bound(
    options: ServeOptions, *, is_shared: bool = False, port: int | None = None
) -> socket.socket:
    """Return a socket at the address of the options.

    is_shared: whether other sockets may have it, too.  port: instead of that of the options.

    Raises:
        BatchdecodeError: the address cannot be had.
    """
    port = options.port if port is None else port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        where = f"{options.host}, port {port}"
        raise BatchdecodeError(f"cannot listen at {where}: {reason_of(error)}") from error
    return listener


def _work(
    options: ServeOptions, first: socket.socket, number: int, folder: Path, tell_ready: Connection
) -> None:
    """Be the worker `number`; first: a socket that has the address already."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping_signals())
    os.setpgid(0, 0)  # Ctrl-C is for the parent, which passes it on
    port = first.getsockname()[1]
    first.close()
    try:
        with bound(options, is_shared=True, port=port) as listener:
            server = Server(options, listener, number, folder, lambda: tell_ready.send(number))
            status = server.run()
    except BatchdecodeError as error:
        say(printable_lines(f"error: {error}\n"))
        status = 2
    if (parent := parent_process()) is not None and not parent.is_alive():
        shutil.rmtree(folder, ignore_errors=True)  # it was killed
    sys.exit(status)


def _wait_until_ready(workers: Sequence[BaseProcess], ready: Connection) -> bool:
    """Wait until all workers listen; return False if one has ended instead."""
    for _ in workers:
        if ready not in wait([ready, *(worker.sentinel for worker in workers)]):
            return False
        ready.recv()
    return True


def _pass_on(stopping: Sequence[signal.Signals], workers: Sequence[BaseProcess]) -> list[int]:
    """Pass signals on to the workers from now on; return a list that gets those which come."""
    received: list[int] = []

    def pass_on(number: int, _frame: Any) -> None:
        received.append(number)
        for worker in workers:
            if worker.is_alive() and worker.pid is not None:
                os.kill(worker.pid, number)

    for number in stopping:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping)
    return received


def _watch(workers: Sequence[BaseProcess], received: Sequence[int]) -> int:
    """Wait until all workers have ended, or end all when one has; return the worst status."""
    while alive := [worker for worker in workers if worker.is_alive()]:
        if not received and len(alive) < len(workers):
            for worker in alive:
                worker.terminate()
            received = [signal.SIGTERM]
        wait([worker.sentinel for worker in alive])
    return max(_status(worker) for worker in workers)


def _status(worker: BaseProcess) -> int:
    """Return the exit status of a worker that has ended; as a shell tells it of a signal."""
    code = worker.exitcode or 0
    return 128 - code if code < 0 else code
