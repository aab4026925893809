"""The pager that a page of the documentation is read in: $PAGER, or else less or more."""

import os
import shutil
import signal
import subprocess

from rich.pager import Pager

from ..printing import print_text

_NOT_STARTED = (126, 127)  # what a shell says of a program that it cannot run, or not find


class ChosenPager(Pager):
    """Shows a text in that pager; where none can be started, on the terminal itself."""

    def show(self, content: str) -> None:
        """Show a text, and come back when its reader has left it."""
        installed = filter(shutil.which, ("less", "more"))
        os.environ.setdefault("LESS", "FRX")  # as git has it: colors, and no pager for what fits
        command = os.environ.get("PAGER", "").strip() or next(installed, None)
        if command is None or _status_of(command, content) in _NOT_STARTED:
            print_text(content)


def _status_of(command: str, content: str) -> int:
    """Return the exit status of a pager, which has Ctrl-C to itself and may leave a text unread."""
    interrupted = signal.signal(signal.SIGINT, lambda *_: None)  # not ignored: a child would, too
    unread = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        text = content.encode(errors="backslashreplace")
        return subprocess.run(command, shell=True, input=text, check=False).returncode  # noqa: S602 - as $PAGER is meant
    finally:
        signal.signal(signal.SIGINT, interrupted)
        signal.signal(signal.SIGPIPE, unread)
