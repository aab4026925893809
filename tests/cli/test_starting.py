"""What a command has imported by the time it ends: that is how long it takes to start."""

import subprocess
import sys

import pytest
from process import COMMAND, ENVIRONMENT

MODULES = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from cli.start import main
main()
"""


def modules_of(*arguments, **environment):
    """Return what is imported in the process of a command when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", MODULES, *map(str, arguments)],
        env=ENVIRONMENT | environment,
        capture_output=True,
        check=True,
    )
    return set(done.stderr.decode().splitlines()[-1].split())


def test_the_version_is_told_by_almost_nothing():
    assert (
        modules_of("--version") & {"typer", "typing", "numpy", "signal", "batcher.errors"} == set()
    )


def test_the_version_is_the_same_from_the_parser_of_options():
    shown = subprocess.run([*COMMAND, "--version"], capture_output=True, check=True)
    parsed = subprocess.run([*COMMAND, "--version", "run"], capture_output=True, check=True)
    assert (shown.stdout, shown.stderr) == (parsed.stdout, b"")


@pytest.mark.parametrize("command", ["profiles", "schema"])
def test_help_of_a_command_imports_no_other(command):
    modules = modules_of(command, "--help")
    commands = {name for name in modules if name.startswith("cli.commands.")}
    assert commands == {f"cli.commands.{command}"} | commands & {"cli.commands.arguments"}
    assert "numpy" not in modules
