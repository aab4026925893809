"""What a command has imported by the time it ends: that is how long it takes to start."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from process import ENVIRONMENT, ROOT, batchdecode, lines_of, workload

MODULES = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from cli.main import main
main()
"""


def modules_of(*arguments):
    """Return what a command has imported when it ends; without -S, so has an editable install."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", MODULES, *map(str, arguments)],
        env=ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(ROOT), *packages])},
        capture_output=True,
        check=True,
    )
    return set(done.stderr.decode().splitlines()[-1].split())


def test_the_version_imports_typer_and_no_command():
    modules = modules_of("--version")
    assert modules & {"numpy", "rich", "yaml", "batcher.settings", "cli.command"} == set()
    assert {name for name in modules if name.startswith("cli.commands.")} == set()


@pytest.mark.parametrize("command", ["schema", "run"])
def test_help_of_a_command_imports_no_other(command):
    modules = modules_of(command, "--help")
    commands = {name for name in modules if name.startswith("cli.commands.")}
    assert commands == {"cli.commands.help" if command == "schema" else "cli.commands.run"}
    assert modules & {"numpy", "rich"} == set()


UNUSED = {
    *("rich", "email", "asyncio", "ssl", "logging", "socket", "tempfile", "yaml"),
    *("batcher.remote.protocol", "batcher.scheduling.kv_cache"),
    *("batcher.requests.problems", "batcher.requests.json_spans"),
    *("numpy.random", "numpy.ma", "fractions", "concurrent", "multiprocessing", "llguidance"),
    *("batcher.engine.rows", "batcher.decoding.constraints", "batcher.models.callables"),
    "batcher.decoding.sampling",
    *("batcher.requests.result_rows", "batcher.requests.schema", "batcher.timing.profiles"),
    *("batcher.planning", "csv", "prometheus_client", "opentelemetry", "cli.run.spans"),
    *("batcher.explaining.story", "cli.run.exporters"),
    *("cli.screen.live", "cli.views", "cli.planning", "cli.commands.trace"),
}


def test_a_plain_run_imports_nothing_that_it_does_not_ask_for(tmp_path):
    requests = tmp_path / "requests.jsonl"
    requests.write_bytes(lines_of(*workload(3)))
    modules = modules_of("run", requests, "-o", tmp_path / "results.jsonl")
    assert {"numpy", "batcher.engine"} <= modules
    assert modules & UNUSED == set()


def test_what_a_run_asks_for_is_there_to_be_imported():
    assert {name for name in UNUSED if find_spec(name) is None} == set()


GARBAGE_IS_COLLECTED = """
import gc
def model(prefixes):
    return [int(gc.isenabled()) for _ in prefixes]
"""


def test_garbage_is_collected_once_the_run_has_begun(tmp_path):
    (tmp_path / "asked.py").write_text(GARBAGE_IS_COLLECTED)
    requests = lines_of({"prompt": [1], "max_tokens": 2})
    done = batchdecode("run", "-q", "--model", "asked:model", cwd=tmp_path, stdin=requests)
    assert json.loads(done.stdout)["tokens"] == [1, 1]
