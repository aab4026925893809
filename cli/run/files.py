"""The files that commands write: checked first, then locked, and replaced whole or grown by lines.

Rules: only whole lines are written, and what did not get out whole is taken back where possible.
At any moment the file of a name is locked by the run that writes it.  The lock is on the file
itself: a kill ends it, and a file that takes the place of a locked one is locked before it does.
"""

import errno
import fcntl
import io
import os
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Protocol, Self

import msgspec

from batcher.errors import BatchdecodeError
from batcher.whole_files import WholeFile

from ..errors import WriteError, reason_of
from ..screen.terminal import printable, printable_json
from ..signals import open_to_write, stdout_descriptor, write_some
from .urls import UrlError, check_upload, is_url, masked, read_start, shown, upload

NAMES_OF_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


class OutputError(BatchdecodeError):
    """A file cannot be written, or should not be."""


class ResumeError(BatchdecodeError):
    """What is there cannot be continued."""


class Sink(Protocol):
    """Takes whole lines.

    is_file: they go into a regular file as they are, and what did not get out whole leaves nothing.
    """

    is_file: bool

    def write(self, lines: bytes) -> None:
        """Pass `lines` on at once.

        Raises:
            WriteError: there is no room for them, or nobody to take them.
            BrokenPipeError: whoever read them has gone.
        """

    def close(self) -> None:
        """Write what ends the file."""


class FileSink:
    """Writes to a descriptor at once; a file ends with a whole line even when the disk is full."""

    def __init__(self, raw: io.FileIO, name: str) -> None:
        self.name = name
        self._raw = raw
        status = os.fstat(raw.fileno())
        self.is_file = stat.S_ISREG(status.st_mode)
        self.size = status.st_size  # of the file, as far as we know

    def write(self, lines: bytes) -> None:
        """Write all of `lines`, or nothing of them to a file."""
        start = 0
        try:
            while start < len(lines):
                if self.is_file:
                    start += self._raw.write(memoryview(lines)[start:]) or 0
                else:
                    start += write_some(self._raw.fileno(), lines, start)
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.is_file:  # cut off the torn end
                self._raw.seek(-start, os.SEEK_CUR)
                self._raw.truncate()
            raise WriteError(self.name, error) from error
        self.size += start

    def close(self) -> None:
        self._raw.close()


class GzipSink:
    """Compresses what goes to another sink; after every write the file can be read up to there.

    is_needed: whether something must be written in any case, as in a new file.
    """

    is_file = False

    def __init__(self, sink: Sink, *, is_needed: bool) -> None:
        self.sink, self._is_needed = sink, is_needed
        # 31 gives the header of a .gz file, without a time: the same lines are the same bytes.
        self._compressor = zlib.compressobj(wbits=31)

    def write(self, lines: bytes) -> None:
        self._is_needed = True
        packed = self._compressor.compress(lines)
        self.sink.write(packed + self._compressor.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        if self._is_needed:
            self.sink.write(self._compressor.flush(zlib.Z_FINISH))
        self.sink.close()


class TerminalJson:
    """Writes JSON to a terminal, with escapes for what would move the cursor or reorder a line."""

    is_file = False

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    def write(self, lines: bytes) -> None:
        self._write(printable_json(lines.decode()).encode())

    def close(self) -> None:
        """Leave the terminal open."""


class UploadSink(FileSink):
    """Writes to a temporary file, which is uploaded when the sink is closed.

    If that fails, the file stays, and the error names it.
    """

    def __init__(self, url: str) -> None:
        self._url, self._place = url, _temporary_place(url)
        super().__init__(io.FileIO(self._place, "x"), str(self._place))
        self.is_file = False

    def close(self) -> None:
        """Upload the file.

        Raises:
            WriteError: the store does not take it.
        """
        super().close()
        try:
            upload(self._place, self._url)
        except UrlError as error:
            kept = OSError(f"{error}; the file is kept as {self._place}")
            raise WriteError(shown(self._url), kept) from error
        self.discard()

    def discard(self) -> None:
        shutil.rmtree(self._place.parent, ignore_errors=True)


def _temporary_place(url: str) -> Path:
    """Return where a file waits for its upload to `url`, in a new folder."""
    import tempfile  # noqa: PLC0415 - for URLs only

    try:
        check_upload(url)
        return Path(tempfile.mkdtemp(prefix="batchdecode-"), shown(url).rpartition("/")[2])
    except OSError as error:
        raise OutputError(f"cannot write {shown(url)}: {reason_of(error)}") from error


def open_sink(path: str, *, append: bool = False) -> Sink:
    """Return a sink for a pipe, a device or a URL, which gets all at its end; see OutFile."""
    if is_url(path):
        return packed(UploadSink(path), shown(path), is_new=True)

    def open_at_end(path: str, flags: int) -> int:  # if others cut the file, that leaves no hole
        return open_to_write(path, flags | os.O_APPEND)

    try:
        raw = io.FileIO(opened_as(path), "a" if append else "w", opener=open_at_end)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path}: {reason_of(error)}") from error
    return packed(FileSink(raw, path), path, is_new=not append)


def packed(file: FileSink, path: str, *, is_new: bool) -> Sink:
    return GzipSink(file, is_needed=is_new) if path.endswith(".gz") else file


def opened_as(path: str) -> str:
    """Return where `path` is: stdout may not be descriptor 1 for now, see signals.py."""
    return f"/dev/fd/{stdout_descriptor()}" if path in NAMES_OF_STDOUT else path


def may_be_file(path: str) -> bool:
    try:
        mode = Path(opened_as(path)).stat().st_mode
    except (OSError, ValueError):
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def stdout_sink() -> Sink:
    return FileSink(io.FileIO(stdout_descriptor(), "w", closefd=False), "stdout")


def stdout_json_sink() -> Sink:
    sink = stdout_sink()
    return TerminalJson(sink.write) if os.isatty(stdout_descriptor()) else sink


BESIDE_RESULTS = (".run.json", ".run.sums", ".rest")
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
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def is_filled(self) -> bool:
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
            try:
                yield sink
            except BaseException:
                if isinstance(upload_sink := getattr(sink, "sink", sink), UploadSink):
                    upload_sink.discard()
                raise
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
        where, problem = self.whereabouts(), None
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise WriteError(self.name or "", error) from error
        if where != self.path:
            problem = f"it was {'deleted' if where == NAMELESS else 'moved'} while it was written"
        elif self._grown is not None:
            num_more = os.fstat(self._descriptor).st_size - self._grown.size
            if num_more < 0:
                problem = f"{-num_more:,} bytes were cut off while it was written"
            elif num_more > 0:
                problem = f"others have written {num_more:,} bytes into it meanwhile"
        if problem is not None:
            raise WriteError(self.name or "", OSError(problem))

    @property
    def has_foreign_lines(self) -> bool:
        if self._descriptor is None or self._grown is None:
            return False
        return os.fstat(self._descriptor).st_size > self._grown.size

    @property
    def is_in_place(self) -> bool:
        return self.whereabouts() == self.path

    def finish(self) -> None:
        """Do nothing more: the results of a run are complete; see UploadedResults."""

    def whereabouts(self) -> str:
        """Return where the file is: its path, or what has become of it since."""
        if self.path is None or self._descriptor is None:
            return self.name or "stdout"
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
        """Have this descriptor, locked, in the place of the one before."""
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


class UploadedResults(OutFile):
    """Results in a temporary folder, with what stands beside them; uploaded once they are complete.

    Until then they stay there, and a run can be resumed there.

    waiting: entered during the upload; a signal breaks that off.
    """

    def __init__(self, url: str, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._url, self._waiting, self._is_uploaded = url, waiting, False
        super().__init__(str(_temporary_place(url)))
        self.name = shown(url)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and self.is_filled and not self._is_uploaded:
            from .problems import say  # noqa: PLC0415 - it is heavy

            say(f"the results so far are kept as {printable(str(self._place))}\n")
        super().__exit__(kind, *rest)
        if self._is_uploaded:
            shutil.rmtree(self._place.parent, ignore_errors=True)
        else:
            with suppress(OSError):  # it has results
                self._place.parent.rmdir()

    def finish(self) -> None:
        """Upload the results, then their record and their checksums.

        Raises:
            WriteError: the store does not take one of them.
        Interrupted: a signal came.
        """
        name, question, query = self._url.partition("?")
        try:
            with self._waiting():
                for ending in ("", *BESIDE_RESULTS):
                    file = self._place.with_name(self._place.name + ending)
                    if file.exists():
                        upload(file, f"{name}{ending}{question}{query}")
        except UrlError as error:
            raise WriteError(self.name or "", error) from error
        self._is_uploaded = True
        self.path = self.name  # as messages call it from here on

    def resuming(self, command: str) -> str:
        return command.replace(quote(masked(self._url)), quote(str(self._place)))


def is_alone(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


# -- checks before a file is touched

_START_BYTES = 2**16
NamedPath = tuple[str, str | None]  # what a file is to the run, an option for example; its path


def check_distinct(
    input_status: os.stat_result, outputs: Iterable[NamedPath], input_path: str | None = None
) -> None:
    """Make sure that no two of the run's files are one and the same.

    input_path: tells of an input at a URL where it is.
    """
    used: dict[object, str] = {(input_status.st_dev, input_status.st_ino): "the input"}
    if input_path is not None and is_url(input_path):
        used[_identity(input_path)] = "the input"
    for name, path in outputs:
        if path is None or not may_be_file(path):
            continue  # two streams may well go to one terminal, or to /dev/null
        key = _identity(path)
        if key in used:
            raise OutputError(
                f"{name} {shown(path)} is {used[key]} too: they must be different files"
            )
        used[key] = name


def _identity(path: str) -> object:
    if is_url(path):
        scheme, _, rest = shown(path).partition("://")
        if scheme not in {"file", "local"}:
            return {"s3a": "s3", "gcs": "gs"}.get(scheme, scheme), rest
        path = rest
    try:
        status = Path(path).stat()
    except OSError:
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


def check_writable(path: str) -> None:
    """Make sure that the file `path` can be opened for writing; what it holds stays.

    Of a URL that there is a store for it; that is not asked.
    """
    try:
        if is_url(path):
            check_upload(path)
        elif not Path(path).exists():
            folder = Path(os.path.realpath(path)).parent
            next(folder.iterdir(), None)  # which is an error unless it is a folder
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        elif may_be_file(path):
            os.close(os.open(path, os.O_WRONLY))
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {shown(path)}: {reason_of(error)}") from error


def check_replaceable(
    name: str, path: str, is_ours: Callable[[bytes], object] | None = None
) -> None:
    """Make sure that nothing is lost if `path` is written anew; `name` is what it is to the run.

    is_ours: tells from the beginning of what a file holds whether we have written that; None where
    a person may have written, or mended, it.
    """
    start = b""
    if is_url(path):
        try:
            start = read_start(path, _START_BYTES)
        except UrlError as error:
            raise OutputError(f"cannot write {shown(path)}: {error}") from error
    else:
        size = 0
        with suppress(OSError):
            status = Path(path).stat()
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0  # others hold nothing
        if size:
            with Path(path).open("rb") as file:
                start = file.read(_START_BYTES)
    if not start:
        return
    if shown(path).endswith(".gz"):
        with suppress(zlib.error):
            start = zlib.decompressobj(wbits=31).decompress(start)
    if is_ours is None or not is_ours(start):
        raise OutputError(
            f"{name} {shown(path)}: the file holds something that would be lost: --force "
            "overwrites it, or give another name"
        )


# -- answers: text or JSON on stdout, or bytes where --output says

LINES_OF_BLOCK = 256


def print_text(text: str) -> None:
    """Write an answer for people to stdout; what its encoding lacks becomes escapes."""
    stdout = sys.__stdout__ or sys.stdout  # the other one may lead to stderr
    _write(stdout_sink(), text.encode(stdout.encoding, "backslashreplace"))


def print_json(answer: object) -> None:
    """Write an answer for programs to stdout, as indented JSON."""
    _write(stdout_json_sink(), msgspec.json.format(msgspec.json.encode(answer)) + b"\n")


@contextmanager
def output_sink(path: str | OutFile | None) -> Iterator[Sink]:
    """Give what --output leads to, a file that is written as a whole; None is stdout."""
    if path is None:
        yield stdout_sink()
    else:
        file = OutFile(path) if isinstance(path, str) else path
        with file.replace() as sink:
            yield sink


def check_no_terminal(what: str, path: str | None) -> None:
    """Make sure that `what`, which is for a browser, does not go to a terminal; None is stdout."""
    if path is None and os.isatty(1):
        raise BatchdecodeError(f"{what} is for a browser: give -o FILE.html")


def write_lines(lines: Iterable[bytes], sink: Sink) -> None:
    """Write `lines` to `sink`, many at once."""
    remaining = iter(lines)
    while block := b"".join(islice(remaining, LINES_OF_BLOCK)):
        sink.write(block)


def _write(sink: Sink, content: bytes) -> None:
    sink.write(content)
    sink.close()
