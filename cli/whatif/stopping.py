"""How Ctrl-C, SIGTERM and a closed pipe end a command that writes all it has to say at its end."""

from collections.abc import Callable

from ..running.signals import Interrupted, StopSignals, die_of_closed_pipe
from ..running.stdout import user_code_prints_to_stderr


def until_stopped(command: Callable[[], int]) -> int:
    """Return the exit status of `command`, or that of a signal, which ends it at once."""
    with user_code_prints_to_stderr(), StopSignals() as stop:
        try:
            with stop.waiting():
                return command()
        except (Interrupted, KeyboardInterrupt):
            return stop.exit_status
        except BrokenPipeError:
            die_of_closed_pipe()
