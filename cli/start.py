"""The entry of the command: Ctrl-C ends it quietly from here on, before the slow imports."""

import signal


def main() -> None:
    """Run the command line; leave the process with its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .app import main as run  # noqa: PLC0415 - it takes a tenth of a second

    run()
