"""A server for clients that nobody here wrote."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def url():
    command = [sys.executable, "-m", "cli", "serve", "--port", "0", "--served-model-name", "story"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline()
        yield re.search(r"http://\S+", line)[0]
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")
