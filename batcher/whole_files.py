"""Files that are written as a whole: under a name is what was there before, or all that is new.

Rule: what is not whole yet has no name, so that nothing is left of it, not even by a kill.
"""

import io
import os
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

OF_THE_SYSTEM = ("/dev/", "/proc/")  # devices, and descriptors that somebody has opened


class WholeFile:
    """A file that takes the place of `path`, with its owner and permissions, when it is put there.

    A link is followed.  Written to at once is what no other file can take the place of: a device or
    a pipe, a file of somebody else, one in a folder where nothing can be made.  Where a file system
    knows no files without a name (NFS), it has one in the folder of `path`, which a kill leaves.

    raw: what it is written to, unbuffered.  descriptor: that of the file.
    is_named: a person has named it; any other file is replaced, not followed or written to.

    Raises:
        OSError, ValueError: `path` cannot be written.
    """

    def __init__(self, path: str, *, is_named: bool = True) -> None:
        folder, name = os.path.split(path)
        self._place = Path(os.path.realpath(path if is_named else folder), "" if is_named else name)
        self._aside = f".batchdecode-{os.urandom(8).hex()}.new"
        self._has_name = False
        self._folder: int | None = None
        self._opened = ExitStack()
        if not is_named:
            self._open_aside()
        elif _is_replaceable(path):
            with suppress(PermissionError):
                self._open_aside()
        if self._folder is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self.descriptor = os.open(path, flags, 0o666)
            self._opened.callback(os.close, self.descriptor)
        self.raw = io.FileIO(self.descriptor, "w", closefd=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close it; unless it was put in its place, all is as it was."""
        self._opened.close()

    def put(self, *, is_synced: bool = True) -> None:
        """Let it take its place; make sure before that all is on the disk, if it is to be synced.

        Raises:
            OSError: there is no room for it, or the folder is gone.
        """
        if (folder := self._folder) is None:
            return
        if is_synced:
            os.fsync(self.descriptor)
        if not self._has_name:
            nameless = f"/proc/self/fd/{self.descriptor}"
            os.link(nameless, self._aside, src_dir_fd=folder, dst_dir_fd=folder)
            self._has_name = True
        os.replace(self._aside, self._place.name, src_dir_fd=folder, dst_dir_fd=folder)
        self._has_name = False
        if is_synced:
            os.fsync(folder)  # so that the name is on the disk, too

    def _open_aside(self) -> None:
        """Open a file that can take the place of the one that is there.

        Raises:
            OSError: there can be none.
        """
        with ExitStack() as opened:
            folder = os.open(self._place.parent, os.O_RDONLY)
            opened.callback(os.close, folder)
            try:
                descriptor = os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o666, dir_fd=folder)
            except OSError:
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
                descriptor = os.open(self._aside, flags, 0o666, dir_fd=folder)
                self._has_name = True
            opened.callback(self._forget, folder, descriptor)
            with suppress(FileNotFoundError):
                before = self._place.lstat()
                if stat.S_ISREG(before.st_mode):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            self._folder, self.descriptor = folder, descriptor
            self._opened = opened.pop_all()

    def _forget(self, folder: int, descriptor: int) -> None:
        os.close(descriptor)
        if self._has_name:
            os.unlink(self._aside, dir_fd=folder)


def _is_replaceable(path: str) -> bool:
    """Return whether another file may take the place of `path`, or there is none yet."""
    if path.startswith(OF_THE_SYSTEM):
        return False
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        return True
    return stat.S_ISREG(mode) and os.access(path, os.W_OK)
