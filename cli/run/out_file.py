"""A file that a command writes: locked while a run has it, grown or replaced, checked at the end.

Rule: at any moment the file of a name is locked by the run that writes it.  The lock is on the file
itself: a kill ends it, and a file that takes the place of a locked one is locked before it does.
"""

import errno
import fcntl
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from batcher.whole_files import WholeFile

from ..errors import WriteError, reason_of
from .output import FileSink, OutputError, Sink, may_be_file, open_sink, packed
from .urls import is_url, shown

NAMELESS = "a file that has no name any more"
_OPENED = ("/dev/fd/", "/dev/std", "/proc/")  # descriptors, which others may write to


class OutFile:
    """A file that grows (`open`) or is replaced as a whole (`replace`); entered, it is locked.

    A file that is new is there from then on, but not if nothing was to be written after all.  A
    pipe, a device, a descriptor and a URL have no lock and no check.

    path: None for stdout.  is_plain: it is none of these.
    is_named: an option names it; of any other file no link is followed.

    Raises, when it is entered, opened or replaced:
        OutputError: another run has it, or it cannot be written.
    """

    def __init__(self, path: str | None, *, is_named: bool = True) -> None:
        self.path, self.name = path, None if path is None else shown(path)
        self._is_named = is_named
        self.is_plain = (
            path is not None
            and not is_url(path)
            and not path.startswith(_OPENED)
            and (may_be_file(path) or not is_named)
        )
        self._place = Path.cwd() / (path or "")  # wherever a model goes
        self._descriptor: int | None = None
        self._is_new = self._is_used = False
        self._grown: FileSink | None = None

    def __enter__(self) -> Self:
        self.lock()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_needless = self._is_new and (kind is not None or not self._is_used)
        if is_needless and self.is_in_place and not self.is_filled:
            self._place.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def is_filled(self) -> bool:
        """Whether it holds something, while it is locked."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_size > 0

    def lock(self) -> None:
        """Lock the file that has this name, which is made if there is none.

        Raises:
            OutputError: another run has it, or it cannot be opened.
        """
        while self.is_plain and not (self._descriptor is not None and self.is_in_place):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            flags |= 0 if self._is_named else os.O_NOFOLLOW | os.O_NONBLOCK
            try:
                with suppress(FileExistsError):
                    self._take(os.open(self._place, flags | os.O_EXCL, 0o666))
                    self._is_new = True
                    continue
                self._take(os.open(self._place, flags, 0o666))
            except BlockingIOError:
                raise OutputError(
                    f"{self.name} is being written by another run: wait for its end, or give "
                    "another name"
                ) from None
            except (OSError, ValueError) as error:
                raise OutputError(f"cannot write {self.name}: {reason_of(error)}") from error

    def open(self, *, append: bool = False) -> Sink:
        """Return a sink for the file, compressed if its name ends in .gz.

        append: behind what is there, which is lost otherwise.
        """
        self._is_used = True
        if self._descriptor is None:
            self.lock()
        if self._descriptor is None or self.path is None:
            return open_sink(self.path or "", append=append)
        if not append:
            os.ftruncate(self._descriptor, 0)
        raw = io.FileIO(self._descriptor, "a", closefd=False)
        self._grown = FileSink(raw, self.path)
        return packed(self._grown, self.path, is_new=not append)

    @contextmanager
    def replace(self, *, is_synced: bool = True) -> Iterator[Sink]:
        """Give a sink for all that the file is to hold, compressed if its name ends in .gz.

        Until the end, and after an error or a kill, the file is as it was.  A pipe or a device gets
        all at once.

        is_synced: wait until it is on the disk.

        Raises:
            WriteError: there is no room, or another file has taken the place of the locked one.
            BrokenPipeError: the reader of a pipe has gone.
        """
        path = self.path or ""
        if not self.is_plain:
            sink = open_sink(path)
            yield sink
            sink.close()
            return
        try:
            file = WholeFile(str(self._place), is_named=self._is_named)
        except (OSError, ValueError) as error:
            raise OutputError(f"cannot write {self.name}: {reason_of(error)}") from error
        with file:
            sink = packed(FileSink(file.raw, path), path, is_new=True)
            yield sink
            sink.close()
            try:
                is_locked = self._descriptor is not None
                if is_locked and os.path.lexists(self._place) and not self.is_in_place:
                    raise FileExistsError(errno.EEXIST, "another file has taken its place")
                with suppress(OSError):  # a file system that knows no locks, or it is the same file
                    fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.put(is_synced=is_synced)
                self._is_used = True
                if is_locked and not self.is_in_place:
                    self._take(os.dup(file.descriptor))
            except OSError as error:
                raise WriteError(path, error) from error

    def settle(self) -> None:
        """Make sure that what was written is on the disk, in the file that has this name.

        Raises:
            WriteError: it is not, or the file with this name is gone, or another one.
        """
        if self._descriptor is None or not self._is_used:
            return
        where = self.whereabouts()
        try:
            os.fsync(self._descriptor)
            if where != self.path:
                what = "deleted" if where == NAMELESS else "moved"
                raise FileNotFoundError(errno.ENOENT, f"it was {what} while it was written")
            if self._grown is not None:
                self._grown.check_size(os.fstat(self._descriptor).st_size)
        except OSError as error:
            raise WriteError(self.name or "", error) from error

    @property
    def has_foreign_lines(self) -> bool:
        """Whether others have written into it meanwhile, behind what was written here."""
        if self._descriptor is None or self._grown is None:
            return False
        return os.fstat(self._descriptor).st_size > self._grown.size

    @property
    def is_in_place(self) -> bool:
        """Whether a run that goes on finds what was written."""
        return self.whereabouts() == self.path

    def begin(self) -> None:
        """Do nothing: what is written is where it belongs; see StoredResults."""

    finish = save = begin

    def whereabouts(self) -> str:
        """Return where the file is: its path, or what has become of it since."""
        if self.path is None or self._descriptor is None:
            return self.path or "stdout"
        status = os.fstat(self._descriptor)
        with suppress(OSError):
            if os.path.samestat(status, self._place.stat(follow_symlinks=self._is_named)):
                return self.path
        if not status.st_nlink:
            return NAMELESS
        try:
            return str(Path(f"/proc/self/fd/{self._descriptor}").readlink())
        except OSError:  # where descriptors have no names
            return "a file with another name"

    def _take(self, descriptor: int) -> None:
        """Have this descriptor, locked, in the place of the one before.

        Raises:
            BlockingIOError: another run has locked the file.
            OSError: no option names it, and it is more than one name of a file.
        """
        error = None
        if not self._is_named and not is_alone(os.fstat(descriptor)):
            error = OSError(errno.EMLINK, "it is not a file with this name alone")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as locked:
            error = locked
        except OSError:  # a file system that knows no locks
            pass
        if error is not None:
            os.close(descriptor)
            raise error
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = descriptor


def is_alone(status: os.stat_result) -> bool:
    """Return whether this is a file, and has no second name that others may know it by."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1
