"""One run at a time for one file of results: two would write into each other's lines."""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Self

from ..errors import WriteError
from .output import OutputError

_NAMELESS = "a file that has no name any more"


class OutputLock:
    """Holds the file of results `path` while it is entered; None or no plain file needs no lock.

    The file is there from then on, but not after an error that left it as empty as it was made.

    Raises:
        OutputError: another run holds it, or it cannot be opened.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._descriptors: list[int] = []
        self._is_new = False

    def __enter__(self) -> Self:
        if self._path is not None:
            self._is_new = not Path(self._path).exists()
            self.renew()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        path = Path(self._path or "")
        if kind is not None and self._is_new and path.is_file() and not path.stat().st_size:
            path.unlink()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def settle(self) -> None:
        """Make sure that what was written is on the disk, in the file that has this name.

        Raises:
            WriteError: it is not, or the file with this name is gone, or another one.
        """
        if self._descriptors:
            where = self.whereabouts()
            try:
                os.fsync(self._descriptors[-1])
                if where != self._path:
                    what = "deleted" if where == _NAMELESS else "moved"
                    raise FileNotFoundError(errno.ENOENT, f"it was {what} while it was written")
            except OSError as error:
                raise WriteError(self._path or "", error) from error

    def whereabouts(self) -> str:
        """Return where the results are: the path, or what has become of the file since."""
        if self._path is None or not self._descriptors:
            return self._path or "stdout"
        held = os.fstat(self._descriptors[-1])
        with suppress(OSError):
            if os.path.samestat(held, Path(self._path).stat()):
                return self._path
        if not held.st_nlink:
            return _NAMELESS
        try:
            return str(Path(f"/proc/self/fd/{self._descriptors[-1]}").readlink())
        except OSError:  # where descriptors have no names
            return "a file with another name"

    def renew(self) -> None:
        """Hold the file that has this name now: mending a .gz file puts another in its place."""
        if self._path is None or (Path(self._path).exists() and not Path(self._path).is_file()):
            return
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {error.strerror}") from error
        if any(
            os.path.samestat(os.fstat(descriptor), os.fstat(held)) for held in self._descriptors
        ):
            os.close(descriptor)
            return
        self._descriptors.append(descriptor)
        with suppress(OSError):  # a file system that knows no locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"{self._path} is being written by another run"
                raise OutputError(message) from None
