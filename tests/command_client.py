"""A command of the server in command_server.py, as a process: it says and returns the same.

It imports nothing that takes long, and is run so: `python -I -S command_client.py SOCKET ...`.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import sys


def ask(path, arguments, folder, environment, descriptors):
    """Have the server at `path` begin a command; return where it tells its process and status."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    os.umask(umask := os.umask(0))
    file_size = resource.getrlimit(resource.RLIMIT_FSIZE)
    told = repr((folder, environment, umask, file_size, arguments)).encode()
    socket.send_fds(connection, [len(told).to_bytes(8, "big")], descriptors)
    connection.sendall(told)
    return connection


def main(path, *arguments):
    """Have the server run the command here, and end as it does."""
    # A handler of Python's might wait until the server says something, so signals come by a pipe.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)
    folder = os.getcwd()  # noqa: PTH109 - pathlib is slow
    answers, told = ask(path, arguments, folder, dict(os.environ), [0, 1, 2]), b""
    while told.count(b"\n") < 2:  # its process, and its status
        ready = select.select([answers, reader] if b"\n" in told else [answers], [], [])[0]
        if answers in ready:
            more = answers.recv(64)
            if not more:
                sys.exit("the server of commands has gone")
            told += more
        elif reader in ready:
            for sent in os.read(reader, 64):
                _pass_on(int(told.split()[0]), sent)
    status = int(told.split()[1])
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _pass_on(process, sent):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, sent)


if __name__ == "__main__":
    main(*sys.argv[1:])
