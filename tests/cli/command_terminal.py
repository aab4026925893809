"""A command on a terminal of its own, whose screen is looked at."""

import os
import pty
import subprocess
import sys
import termios
import time
from contextlib import suppress

from emulated_run import Screen
from process import ENVIRONMENT

IN_A_SESSION = """
import fcntl, termios
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
from cli.main import main
main()
"""


class CommandTerminal:
    """Runs a command, which is killed at the end if it has not ended.

    is_job: the command is in a session that has another terminal.  pipes: as of Popen, instead of
    the terminal.
    """

    def __init__(self, *arguments, folder=None, is_job=False, columns=80, **pipes):
        self.screen, self.written = Screen(columns, 24), b""
        self.ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, (24, columns))
        modes = self.modes  # Ctrl-C drops what is on its way: pyte is lost in half an escape
        modes[3] |= termios.NOFLSH
        termios.tcsetattr(self.theirs, termios.TCSANOW, modes)
        self.usual_modes = self.modes
        script = "from cli.main import main; main()" if is_job else IN_A_SESSION
        path = f"{folder}:{ENVIRONMENT['PYTHONPATH']}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            cwd=folder,
            env=ENVIRONMENT | {"CI": "", "TERM": "xterm-256color", "PYTHONPATH": path},
            **dict.fromkeys(("stdin", "stdout", "stderr"), self.theirs) | pipes,
            start_new_session=not is_job,
            process_group=0 if is_job else None,
        )
        os.set_blocking(self.ours, False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.close()

    def close(self):
        for fd in (self.ours, self.theirs):
            with suppress(OSError):  # it is closed already
                os.close(fd)

    @property
    def modes(self):
        return termios.tcgetattr(self.theirs)

    @property
    def takes_keys(self):
        return not self.modes[3] & (termios.ICANON | termios.ECHO)

    def read(self):
        """Take in some of what was written: a run may write faster than all of it is taken in."""
        with suppress(BlockingIOError):
            data = os.read(self.ours, 4096)
            self.written += data
            self.screen.stream.feed(data)
            return True
        return False

    def wait_for(self, is_so):
        deadline = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < deadline, self.screen.text()
            if not self.read():
                time.sleep(0.01)

    def see(self, text):
        self.wait_for(lambda: text in self.screen.text())

    def press(self, keys):
        os.write(self.ours, keys)

    def ended(self):
        self.wait_for(lambda: self.process.poll() is not None)
        while self.read():
            pass
        assert self.modes == self.usual_modes
        return self.process.returncode
