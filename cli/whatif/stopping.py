"""How Ctrl-C, SIGTERM and a closed pipe end a command that writes all it has to say at its end."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout

from cli.running.signals import Interrupted, StopSignals, die_of_closed_pipe


def until_stopped(command: Callable[[], int]) -> int:
    """Return the exit status of `command`, or that of a signal, which ends it at once."""
    with redirect_stdout(sys.stderr), StopSignals() as stop:  # a model may print; it is no answer
        try:
            with stop.waiting():
                return command()
        except (Interrupted, KeyboardInterrupt):
            return stop.exit_status
        except BrokenPipeError:
            die_of_closed_pipe()
