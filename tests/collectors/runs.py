"""Runs of batchdecode that others watch, and what these are asked."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from cli.main import main; main()"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
LIMITS = ("-b", "4", "--kv-blocks", "30", "--block-size", "1")  # some are preempted
PATIENCE = 60  # seconds


def requests(number):
    """Return so many lines; every third request is for two samples."""
    return "".join(
        json.dumps(
            {
                "id": f"r{i}",
                "prompt": [i + 1, 7, 7, 7],
                "max_tokens": 1 + i * 7 % 20,
                "ignore_eos": True,
                **({"n": 2, "temperature": 1.0} if i % 3 == 0 else {}),
            }
        )
        + "\n"
        for i in range(number)
    ).encode()


def start(folder, *options, **environment):
    """Start a run in `folder` that reads requests from a pipe, and goes on until that is closed."""
    return subprocess.Popen(
        [
            *COMMAND,
            "run",
            "-o",
            "results",
            "--trace",
            "trace",
            "--summary-json",
            "summary",
            *options,
        ],
        cwd=folder,
        env=ENVIRONMENT | environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def wait_for(what):
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found
