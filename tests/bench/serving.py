"""A server under the load of wrk, where it is installed."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from workload import Row

TOOL = str(Path(sys.executable).with_name("batchdecode"))
LOAD_SECONDS = 60


@contextmanager
def server(*arguments):
    """Start `batchdecode serve` and give its address."""
    command = [TOOL, "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline() if process.stderr else ""
            found = re.search(r"http://\S+(?=/v1$)", line)
            if found is None:
                raise RuntimeError(line)
            yield found[0]
        finally:
            process.terminate()


def serving(folder):
    """Ask for eight tokens as fast as answers come, on 64 connections."""
    if shutil.which("wrk") is None:
        yield Row("serve: wrk is not installed", "not run", "")
        return
    script = folder / "post.lua"
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8})
    script.write_text(f"wrk.method, wrk.body = 'POST', '{body}'\n")
    for workers in (1, 2):
        arguments = ["-b", "64", "--max-queue", "10000", "--workers", str(workers)]
        with server(*arguments) as address:
            command = ["wrk", "-t1", "-c64", f"-d{LOAD_SECONDS}s", "--latency", "-s", str(script)]
            done = subprocess.run(
                [*command, f"{address}/v1/completions"], check=True, capture_output=True, text=True
            )
        told = re.findall(r"(?:99%|Requests/sec:|Non-2xx .*:) +(\S+)", done.stdout)
        name = f"serve, requests a second, --workers {workers}, p99 {told[0]}"
        yield Row(name, f"{float(told[1]):,.0f}", ">= 5,000, p99 < 1 s, on four cores")
