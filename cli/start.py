"""The entry of the command: what is quick to answer, and Ctrl-C before the slow imports."""

import os
import sys

import batcher

COMPLETION_VARIABLE = "_BATCHDECODE_COMPLETE"


def main() -> None:
    """Run the command line; leave the process with its exit status."""
    is_for_a_shell = COMPLETION_VARIABLE in os.environ
    if sys.argv[1:] == ["--version"] and not is_for_a_shell and _has_shown_version():
        return
    import gc  # noqa: PLC0415 - --version starts without them
    import signal  # noqa: PLC0415 - as above

    gc.disable()  # until a command is carried out: what is imported is no garbage
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the command quietly from here on
    from .boundary import main as run  # noqa: PLC0415 - it takes a tenth of a second

    run()


def _has_shown_version() -> bool:
    """Show the version; whether that went well: if not, the app says so."""
    if sys.stdout is None:
        return False
    try:
        sys.stdout.write(f"batchdecode {batcher.__version__}\n")
        sys.stdout.flush()
    except OSError:
        return False
    return True
