"""Replace a file as a whole: its name leads to the old content or to all of the new one.

Rule: an incomplete file has no name, so that nothing is left of it, not even after a kill.
"""

import io
import os
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

OF_THE_SYSTEM = ("/dev/", "/proc/")  # devices, and descriptors that are open already


class WholeFile:
    """A file that replaces `path`, with the same owner and permissions, when `put` is called.

    A link is followed.  Files that cannot be replaced are written in place: devices, pipes, files
    of other users, and files in a folder where none can be created.  On a file system without
    nameless files (NFS) the new file has a name in the folder of `path`, which a kill leaves.

    raw: the new file, unbuffered.  descriptor: of `raw`.
    is_named: a person has named the path; any other link or special file is replaced.

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
        """Close the file; without `put` the old one stays as it was."""
        self._opened.close()

    def put(self, *, is_synced: bool = True) -> None:
        """Replace the old file; is_synced: after the new one is on the disk.

        Raises:
            OSError: the disk is full, or the folder is gone.
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
        """Open a file that can replace the old one, or raise an OSError."""
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
    """Return whether `path` is free, or a regular file that may be written."""
    if path.startswith(OF_THE_SYSTEM):
        return False
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        return True
    return stat.S_ISREG(mode) and os.access(path, os.W_OK)
