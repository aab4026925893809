"""batchdecode as a process of its own, and workloads for it.

`batchdecode` and `start` spare it the imports; COMMAND starts it anew, as a shell does.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from command_client import ask
from command_server import command_line

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from cli.main import main; main()"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("BATCHDECODE_")},
    "PYTHONPATH": str(ROOT),
    "COLUMNS": "80",
    "CI": "1",
}


def batchdecode(*arguments, cwd=None, stdin=b"", **environment):
    """Run the command to its end; stdout and stderr are bytes and text."""
    done = run_command(
        list(map(str, arguments)), str(cwd or Path.cwd()), ENVIRONMENT | environment, stdin, 60
    )
    done.stderr = done.stderr.decode()
    assert "Traceback" not in done.stderr
    return done


def refused(*arguments, **more):
    """Run a command that is refused before it has written anything; return what it says."""
    done = batchdecode(*arguments, **more)
    assert (done.returncode, done.stdout) == (2, b"")
    return done.stderr


def run_command(arguments, folder, environment, stdin, timeout):
    """Run a command of the server to its end, without a process for its client."""
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
    with suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as pipe:
        pipe.write(content)


def read_all(descriptor):
    with os.fdopen(descriptor, "rb") as pipe:
        return pipe.read()


def on_a_full_disk():
    return ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *command_line()]


def start(*arguments, cwd=None, command=None, **pipes):
    """Start the command; by default stdin is empty, stdout and stderr are pipes."""
    settings = {
        "env": ENVIRONMENT,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    return subprocess.Popen(
        [*(command or command_line()), *map(str, arguments)], cwd=cwd, **(settings | pipes)
    )


def lines_of(*requests):
    texts = [r if isinstance(r, str) else json.dumps(r) for r in requests]
    return "".join(f"{text}\n" for text in texts).encode()


def write(path, data):
    path.write_bytes(data)
    return str(path)


def results(data):
    return [json.loads(line) for line in data.splitlines()]


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def pretend_to_have_stopped(output, data=None):
    if data is not None:
        output.write_bytes(data)
    record = output.with_name(f"{output.name}.run.json")
    record.write_text(record.read_text().replace('"finished": true', '"finished": false'))


def workload(count, *, max_tokens=20, arrivals=None):
    """Return `count` requests of different lengths; `arrivals` makes a time of an index."""
    return [
        {
            "id": f"r{i}",
            "prompt": [i % 250 + 1, i // 250 + 1],
            "max_tokens": 1 + i * 7 % max_tokens,
            "ignore_eos": True,
            **({} if arrivals is None else {"arrival_time": arrivals(i)}),
        }
        for i in range(count)
    ]
