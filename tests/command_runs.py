"""Commands of command_server.py that are run to their end, without a process for the client."""

import contextlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

from command_client import ask
from command_server import command_line


def run_command(arguments, folder, environment, stdin, timeout):
    """Run a command to its end, with pipes for its streams, as subprocess.run does."""
    *_, path = command_line()
    (its_in, ours_in), (ours_out, its_out), (ours_err, its_err) = (os.pipe() for _ in range(3))
    its = [its_in, its_out, its_err]
    try:
        connection = ask(path, (*arguments,), folder, environment, its)
    finally:
        for descriptor in its:
            os.close(descriptor)
    with ThreadPoolExecutor(3) as threads, connection, connection.makefile() as answers:
        threads.submit(write_all, ours_in, stdin)
        said = [threads.submit(read_all, descriptor) for descriptor in (ours_out, ours_err)]
        connection.settimeout(timeout)
        _, status = answers.readline(), int(answers.readline())
        return subprocess.CompletedProcess([*arguments], status, *(each.result() for each in said))


def write_all(descriptor, content):
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as pipe:
        pipe.write(content)


def read_all(descriptor):
    with os.fdopen(descriptor, "rb") as pipe:
        return pipe.read()
