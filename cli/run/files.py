"""The files that commands write: checked first, then locked, then grown line by line or replaced.

Rules: a file gets whole lines only, and a write that fails leaves nothing behind where that is
possible.  The run that writes a file holds a lock on the file itself: a kill ends the lock, and a
file that replaces a locked one is locked first.
"""

import errno
import fcntl
import io
import os
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Protocol, Self

import msgspec

from batcher.errors import BatchdecodeError
from batcher.whole_files import WholeFile

from ..errors import WriteError, reason_of
from ..screen.terminal import printable, printable_json
from ..signals import open_to_write, stdout_descriptor, write_some
from .urls import UrlError, check_upload, is_url, masked, read_start, shown, upload

NAMES_OF_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
BESIDE_RESULTS = (".run.json", ".run.sums")
NAMELESS = "a deleted file"


class OutputError(BatchdecodeError):
    """A file cannot be written, or must not be overwritten."""


class ResumeError(BatchdecodeError):
    """The results in the output file cannot be continued."""


class Sink(Protocol):
    """Takes whole lines, and writes them at once: a WriteError or BrokenPipeError if it cannot.

    is_file: lines go into a regular file as they are, and a failed write leaves nothing behind.
    """

    is_file: bool

    def write(self, lines: bytes) -> None: ...

    def close(self) -> None: ...


class FileSink:
    """Writes to a descriptor at once; a file ends with a whole line even when the disk is full.

    A packed file can be unpacked up to the last write.  Appending nothing to it leaves it as it is.
    A file for a URL is uploaded when it is closed; if that fails, the error names the file.
    size: bytes in the file, by what was written here.
    """

    def __init__(
        self,
        raw: io.FileIO,
        name: str,
        *,
        is_packed: bool = False,
        append: bool = False,
        url: str | None = None,
    ) -> None:
        status = os.fstat(raw.fileno())
        self.name, self.size, self.url = name, status.st_size, url
        self._raw, self._is_regular = raw, stat.S_ISREG(status.st_mode)
        self.is_file = self._is_regular and not is_packed and url is None
        # 31 writes the header of a .gz file without a time: the same lines are the same bytes.
        self._compressor = zlib.compressobj(wbits=31) if is_packed else None
        self._has_stream = not append

    def write(self, lines: bytes) -> None:
        if self._compressor is not None:
            self._has_stream = True
            packed = self._compressor.compress(lines)
            lines = packed + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        self._write(lines)

    def close(self) -> None:
        if self._compressor is not None and self._has_stream:
            self._write(self._compressor.flush(zlib.Z_FINISH))
        self._raw.close()
        if self.url is not None:
            try:
                upload(Path(self.name), self.url)
            except UrlError as error:
                kept = OSError(f"{error}; the file is kept as {self.name}")
                raise WriteError(shown(self.url), kept) from error
            self.discard()

    def discard(self) -> None:
        """Delete the file that was to be uploaded."""
        if self.url is not None:
            shutil.rmtree(Path(self.name).parent, ignore_errors=True)

    def _write(self, data: bytes) -> None:
        start = 0
        try:
            while start < len(data):
                if self._is_regular:
                    start += self._raw.write(memoryview(data)[start:]) or 0
                else:
                    start += write_some(self._raw.fileno(), data, start)
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._is_regular:  # cut off the torn end
                self._raw.seek(-start, os.SEEK_CUR)
                self._raw.truncate()
            raise WriteError(self.name, error) from error
        self.size += start


class TerminalJson:
    """Writes JSON to a terminal, with escapes for what would move the cursor or reorder a line."""

    is_file = False

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    def write(self, lines: bytes) -> None:
        self._write(printable_json(lines.decode()).encode())

    def close(self) -> None:
        """Leave the terminal open."""


def _temporary_place(url: str) -> Path:
    """Return the path for a file that waits for its upload to `url`, in a new folder."""
    import tempfile  # noqa: PLC0415 - for URLs only

    try:
        check_upload(url)
        return Path(tempfile.mkdtemp(prefix="batchdecode-"), shown(url).rpartition("/")[2])
    except OSError as error:
        raise OutputError(f"cannot write {shown(url)}: {reason_of(error)}") from error


def open_sink(path: str, *, append: bool = False) -> FileSink:
    """Return a sink for a pipe, a device or a URL, without lock or check; see OutFile."""
    is_packed = shown(path).endswith(".gz")
    if is_url(path):
        place = str(_temporary_place(path))
        return FileSink(io.FileIO(place, "x"), place, is_packed=is_packed, url=path)

    def open_at_end(path: str, flags: int) -> int:  # if others cut the file, that leaves no hole
        return open_to_write(path, flags | os.O_APPEND)

    try:
        raw = io.FileIO(opened_as(path), "a" if append else "w", opener=open_at_end)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path}: {reason_of(error)}") from error
    return FileSink(raw, path, is_packed=is_packed, append=append)


def opened_as(path: str) -> str:
    """Return the path to open for `path`: stdout may not be descriptor 1 now, see signals.py."""
    return f"/dev/fd/{stdout_descriptor()}" if path in NAMES_OF_STDOUT else path


def may_be_file(path: str) -> bool:
    try:
        mode = Path(opened_as(path)).stat().st_mode
    except (OSError, ValueError):
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def stdout_sink() -> Sink:
    return FileSink(io.FileIO(stdout_descriptor(), "w", closefd=False), "stdout")


class OutFile:
    """An output file: grown with `open` or replaced whole with `replace`; entering it locks it.

    Entering creates a missing file; leaving deletes it again if nothing was written.  Pipes,
    devices, descriptors and URLs are neither locked nor checked.

    path: None for stdout.  name: the path as messages show it.  is_plain: the file can be locked.
    is_named: an option names the file; any other file must be a regular file and no link.

    Raises, when it is entered, opened or replaced:
        OutputError: another run holds the file, or it cannot be written.
    """

    def __init__(self, path: str | None, *, is_named: bool = True) -> None:
        self.path, self.name = path, None if path is None else shown(path)
        self._is_named = is_named
        self.is_plain = (
            path is not None
            and not is_url(path)
            and not path.startswith(("/dev/fd/", "/dev/std", "/proc/"))
            and (may_be_file(path) or not is_named)
        )
        self._place = Path.cwd() / (path or "")  # a model may change the current folder
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

    def show_in_browser(self) -> None:
        import webbrowser  # noqa: PLC0415 - for --open only

        if not webbrowser.open(self._place.as_uri()):
            sys.stderr.write(
                f"warning: no browser opened {printable(self.name or '')}: open it yourself, or "
                "set BROWSER (with %s for the page if it has arguments)\n"
            )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def is_filled(self) -> bool:
        return self._descriptor is not None and os.fstat(self._descriptor).st_size > 0

    def lock(self) -> None:
        """Lock the file at the path, and create a missing one."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        flags |= 0 if self._is_named else os.O_NOFOLLOW | os.O_NONBLOCK
        while self.is_plain and not (self._descriptor is not None and self.is_in_place):
            try:
                try:
                    self._hold(os.open(self._place, flags | os.O_EXCL, 0o666))
                    self._is_new = True
                except FileExistsError:
                    self._hold(os.open(self._place, flags, 0o666))
            except BlockingIOError:
                raise OutputError(
                    f"{self.name} is being written by another run: wait until that run ends, or "
                    "use another name"
                ) from None
            except (OSError, ValueError) as error:
                raise OutputError(f"cannot write {self.name}: {reason_of(error)}") from error

    def open(self, *, append: bool = False) -> Sink:
        """Return a sink, compressed if the name ends in .gz; empty the file unless `append`."""
        self._is_used = True
        if self._descriptor is None:
            self.lock()
        if self._descriptor is None or self.path is None:
            return open_sink(self.path or "", append=append)
        if not append:
            os.ftruncate(self._descriptor, 0)
        raw, is_packed = io.FileIO(self._descriptor, "a", closefd=False), self.path.endswith(".gz")
        self._grown = FileSink(raw, self.path, is_packed=is_packed, append=append)
        return self._grown

    @contextmanager
    def replace(self, *, is_synced: bool = True) -> Iterator[Sink]:
        """Yield a sink for the new content, compressed if the name ends in .gz.

        The file keeps its content until the end, and after an error or a kill.  A pipe or a device
        gets the content at once.

        is_synced: wait until the content is on the disk.

        Raises:
            WriteError: the disk is full, or another file has taken the place of the locked one.
            BrokenPipeError: the reader of a pipe has gone.
        """
        path = self.path or ""
        if not self.is_plain:
            sink = open_sink(path)
            try:
                yield sink
            except BaseException:
                sink.discard()
                raise
            sink.close()
            return
        try:
            file = WholeFile(str(self._place), is_named=self._is_named)
        except (OSError, ValueError) as error:
            raise OutputError(f"cannot write {self.name}: {reason_of(error)}") from error
        with file:
            sink = FileSink(file.raw, path, is_packed=path.endswith(".gz"))
            yield sink
            sink.close()
            try:
                is_locked = self._descriptor is not None
                if is_locked and os.path.lexists(self._place) and not self.is_in_place:
                    raise FileExistsError(errno.EEXIST, "another file has taken its place")
                with suppress(OSError):  # the file system has no locks, or it is the same file
                    fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.put(is_synced=is_synced)
                self._is_used = True
                if is_locked and not self.is_in_place:
                    self._hold(os.dup(file.descriptor))
            except OSError as error:
                raise WriteError(path, error) from error

    def settle(self) -> None:
        """Sync the file, and verify that it is the one at its path and has the size written.

        Raises:
            WriteError: it is not.
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
        elif self._num_foreign_bytes < 0:
            problem = f"{-self._num_foreign_bytes:,} bytes were cut off while it was written"
        elif self._num_foreign_bytes:
            problem = f"another program wrote {self._num_foreign_bytes:,} bytes into it meanwhile"
        if problem is not None:
            raise WriteError(self.name or "", OSError(problem))

    @property
    def _num_foreign_bytes(self) -> int:
        if self._descriptor is None or self._grown is None:
            return 0
        return os.fstat(self._descriptor).st_size - self._grown.size

    @property
    def has_foreign_lines(self) -> bool:
        return self._num_foreign_bytes > 0

    @property
    def is_in_place(self) -> bool:
        return self.whereabouts() == self.path

    def finish(self) -> None:
        """Do nothing more: the results of a run are complete; see UploadedResults."""

    def whereabouts(self) -> str:
        """Return the path of the file, or the place it has moved to, or NAMELESS."""
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
        except OSError:  # no /proc
            return "a file with another name"

    def _hold(self, descriptor: int) -> None:
        """Lock `descriptor`, and hold it in place of the one before."""
        error = None
        if not self._is_named and not is_alone(os.fstat(descriptor)):
            error = OSError(errno.EMLINK, "not a regular file, or it has several links")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as locked:
            error = locked
        except OSError:  # the file system has no locks
            pass
        if error is not None:
            os.close(descriptor)
            raise error
        self.close()
        self._descriptor = descriptor


class UploadedResults(OutFile):
    """Results and their record in a temporary folder, uploaded when they are complete.

    An unfinished run leaves them in the folder, and can be resumed there.

    waiting: entered during the upload; a signal interrupts it.
    """

    def __init__(self, url: str, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._url, self._waiting, self._is_uploaded = url, waiting, False
        super().__init__(str(_temporary_place(url)))
        self.name = shown(url)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and self.is_filled and not self._is_uploaded:
            sys.stderr.write(f"the results so far are kept as {printable(str(self._place))}\n")
        super().__exit__(kind, *rest)
        if self._is_uploaded:
            shutil.rmtree(self._place.parent, ignore_errors=True)
        else:
            with suppress(OSError):  # it has results
                self._place.parent.rmdir()

    def finish(self) -> None:
        """Upload the results, then their record and their checksums.

        Raises:
            WriteError: the store refuses a file.
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
        self.path = self.name  # as messages show it from here on

    def resuming(self, command: Sequence[str]) -> list[str]:
        """Return `command` with the local results as its output."""
        url, place = masked(self._url), str(self._place)
        local = {f"{option}{url}": f"{option}{place}" for option in ("", "--output=", "-o")}
        return [local.get(word, word) for word in command]


def is_alone(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


# -- checks before a file is touched

_START_BYTES = 2**16


def check_distinct(
    input_statuses: Iterable[os.stat_result],
    outputs: Iterable[tuple[str, str | None]],
    input_paths: Iterable[str | None] = (),
) -> None:
    """Raise an OutputError if two files of a command are the same, other than two inputs.

    outputs: the option that names each file, and its path.  input_paths: the URLs matter.
    """
    used: dict[object, str] = {
        (status.st_dev, status.st_ino): "the input" for status in input_statuses
    }
    for path in input_paths:
        if path is not None and is_url(path):
            used[_identity(path)] = "the input"
    for name, path in outputs:
        if path is None or not may_be_file(path):
            continue  # two streams may go to one terminal, or to /dev/null
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
    """Raise an OutputError if `path` cannot be written; the file keeps its content.

    The store of a URL must be known here; it is not contacted.
    """
    try:
        if is_url(path):
            check_upload(path)
        elif not Path(path).exists():
            folder = Path(os.path.realpath(path)).parent
            next(folder.iterdir(), None)  # an error unless it is a folder
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        elif may_be_file(path):
            os.close(os.open(path, os.O_WRONLY))
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {shown(path)}: {reason_of(error)}") from error


def check_replaceable(
    name: str, path: str, is_ours: Callable[[bytes], object] | None = None
) -> None:
    """Raise an OutputError if overwriting `path` would lose data. name: its option.

    is_ours: recognizes, from its first bytes, a file that this option has written; None if a
    person may have written or edited the file.
    """
    start = b""
    if is_url(path):
        try:
            start = read_start(path, _START_BYTES)
        except UrlError as error:
            raise OutputError(f"cannot write {shown(path)}: {error}") from error
    elif Path(path).is_file():
        with Path(path).open("rb") as file:
            start = file.read(_START_BYTES)
    if not start:
        return
    if shown(path).endswith(".gz"):
        with suppress(zlib.error):
            start = zlib.decompressobj(wbits=31).decompress(start)
    if is_ours is None or not is_ours(start):
        raise OutputError(
            f"{name} {shown(path)}: the file has content of another kind: use --force to "
            "overwrite it, or use another name"
        )


# -- answers: text or JSON on stdout, or bytes to --output


def print_text(text: str) -> None:
    """Print an answer for people to stdout, with escapes for what its encoding lacks."""
    stdout = sys.__stdout__ or sys.stdout  # the other one may lead to stderr
    stdout_sink().write(text.encode(stdout.encoding, "backslashreplace"))


def print_json(answer: object) -> None:
    """Print an answer for programs to stdout, as indented JSON."""
    sink = stdout_sink()
    if os.isatty(stdout_descriptor()):
        sink = TerminalJson(sink.write)
    sink.write(msgspec.json.format(msgspec.json.encode(answer)) + b"\n")


@contextmanager
def output_sink(path: str | OutFile | None) -> Iterator[Sink]:
    """Yield a sink for --output: stdout if `path` is None, or a file to be replaced."""
    if path is None:
        yield stdout_sink()
    else:
        file = OutFile(path) if isinstance(path, str) else path
        with file.replace() as sink:
            yield sink


def check_no_terminal(what: str, path: str | None) -> None:
    """Raise a BatchdecodeError if `what`, which is for a browser, would go to a terminal."""
    if path is None and os.isatty(1):
        raise BatchdecodeError(f"{what} cannot be shown in a terminal; use -o FILE.html")


def check_can_open(path: str | None) -> None:
    """Raise a BatchdecodeError if --open cannot show the page at `path`; None: a temporary file."""
    import webbrowser  # noqa: PLC0415 - for --open only

    if path is None and not os.isatty(1):
        raise BatchdecodeError("--open needs a terminal as stdout, or -o FILE.html")
    if path is not None and (path.endswith(".gz") or not OutFile(path).is_plain):
        raise BatchdecodeError(
            f"--open needs a regular file that does not end in .gz, not {shown(path)}"
        )
    try:
        webbrowser.get()
    except webbrowser.Error:
        raise BatchdecodeError(
            "--open found no browser: set BROWSER to the command that starts one, or drop --open"
        ) from None


def write_lines(lines: Iterable[bytes], sink: Sink) -> None:
    """Write `lines` to `sink`, 256 at once."""
    remaining = iter(lines)
    while block := b"".join(islice(remaining, 256)):
        sink.write(block)
