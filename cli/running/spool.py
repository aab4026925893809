"""A folder of this machine for what goes to one URL, which one run at a time holds.

What a killed run leaves in it is found by the next one to that URL, and stays until that has begun.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Self

from ..errors import reason_of
from .output import OutputError


class Spool:
    """The folder for the URL that messages call `name`, while it is entered.

    now: where this run has its files.  before: where those of a killed one are, if there was any.
    keeps_now: whether `now` stays when it is left.  keeps_before: whether `before` does.

    Raises:
        OutputError: another run holds it, or there is no room for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        digest = blake2b(name.encode(errors="surrogateescape"), digest_size=8).hexdigest()
        self._folder = Path(tempfile.gettempdir(), f"batchdecode-{os.getuid()}-{digest}")
        self.now, self.before = self._folder / "now", self._folder / "before"
        self.keeps_now, self.keeps_before = False, True
        self._descriptor = -1

    def __enter__(self) -> Self:
        try:
            while not self._lock():
                pass
            if self.now.exists():
                shutil.rmtree(self.before, ignore_errors=True)
                self.now.rename(self.before)
            self.now.mkdir()
        except OSError as error:
            self._let_go()
            raise OutputError(f"cannot write {self._folder}: {reason_of(error)}") from error
        except OutputError:
            self._let_go()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            if not self.keeps_now:
                shutil.rmtree(self.now)
                if self.keeps_before and self.before.exists():
                    self.before.rename(self.now)
            shutil.rmtree(self.before, ignore_errors=True)
            if not self.now.exists():
                self._folder.rmdir()
        self._let_go()

    def take_over(self) -> None:
        """Go on with the files of the run before."""
        shutil.rmtree(self.now)
        self.before.rename(self.now)
        self.keeps_now = True

    def _lock(self) -> bool:
        """Return whether the folder is held: another run may have removed it in between.

        Raises:
            OutputError: another run holds it.
            OSError: it cannot be made.
        """
        with suppress(FileExistsError):
            self._folder.mkdir(0o700)
        self._let_go()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        self._descriptor = os.open(self._folder, flags)
        held = os.fstat(self._descriptor)
        if held.st_uid != os.getuid() or stat.S_IMODE(held.st_mode) & 0o077:
            raise OutputError(f"cannot write {self._folder}: others may write there, too")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"{self._name} is being written by another run") from None
        try:
            return os.path.samestat(held, self._folder.stat())
        except FileNotFoundError:
            return False

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
