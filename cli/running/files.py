"""The files a run is to write: checked before the first of them is touched, and locked."""

import errno
import fcntl
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from batcher.formats.page import is_page_start
from batcher.formats.trace import is_trace_start

from ..commands.run import RunOptions
from ..errors import WriteError, reason_of
from ..options import STDOUT
from .output import OutputError, Sink, opened_as
from .urls import Store, StoreError, is_url, shown

_START_BYTES = 2**16
_NAMELESS = "a file that has no name any more"

NamedPath = tuple[str, str | None]  # what a file is to the run, an option for example; its path


_WRITTEN_ANEW: dict[str, Callable[[bytes], object]] = {  # what tells ours from other files
    "--trace": is_trace_start,
    "--summary-json": re.compile(rb'\{\s*"requests":').match,
    "--report": is_page_start,
    "--metrics-file": re.compile(b"# HELP (vllm:|batchdecode_)").match,
    "--timeseries": re.compile(b"(worker,)?time,steps,running,").match,
}


def check_files(options: RunOptions, input_status: os.stat_result) -> None:
    """Make sure that all files can be written, none is used twice, and nothing of others is lost.

    Results are looked after where it is known what run they are of, see `prepare`.

    Raises:
        OutputError: one cannot, or is, or would be.
    """
    outputs = [
        ("--output", options.output),
        *[("what stands beside --output,", path) for path in side_files(options.output)],
        ("--trace", options.trace),
        ("--summary-json", None if options.summary_json == STDOUT else options.summary_json),
        ("--report", options.report),
        ("--metrics-file", options.metrics_file),
        ("--timeseries", options.timeseries),
    ]
    check_distinct(input_status, outputs, options.input)
    if options.metrics_file is not None and is_url(options.metrics_file):
        raise OutputError(
            f"--metrics-file {shown(options.metrics_file)}: it is for the node exporter of this "
            "machine, and so a file of it"
        )
    for name, path in outputs:
        if path is not None:
            check_writable(path)
            if name in _WRITTEN_ANEW and not options.force:
                check_replaceable(name, path, _WRITTEN_ANEW[name])


def side_files(output: str | None) -> list[str]:
    """Return the files that a run with these results writes beside them."""
    if output is None or not _may_be_file(output):
        return []
    return [
        f"{shown(output)}{ending}"
        for ending in (".run.json", ".run.json.new", ".run.sums", ".rest", ".rest.new", ".new")
    ] + ([f"{output}.new.gz"] if output.endswith(".gz") else [])


def record_path(output: str) -> str:
    """Return where it stands what run the results in `output` are of."""
    return f"{output}.run.json"


def rest_path(output: str) -> str:
    """Return where results are that are known, but whose turn in `output` has not come."""
    return f"{output}.rest"


def check_distinct(
    input_status: os.stat_result, outputs: Iterable[NamedPath], input_path: str | None = None
) -> None:
    """Make sure that no two of the run's files are one and the same.

    input_path: tells of an input at a URL where it is.

    Raises:
        OutputError: two of them are.
    """
    used: dict[object, str] = {(input_status.st_dev, input_status.st_ino): "the input"}
    if input_path is not None and is_url(input_path):
        used[_identity(input_path)] = "the input"
    for name, path in outputs:
        if path is None or not _may_be_file(path):
            continue  # two streams may well go to one terminal, or to /dev/null
        key = _identity(path)
        if key in used:
            raise OutputError(
                f"{name} {shown(path)} is {used[key]} too: they must be different files"
            )
        used[key] = name


def _identity(path: str) -> object:
    """Return what two names of one file have in common."""
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

    Raises:
        OutputError: it cannot.
    """
    try:
        if is_url(path):
            Store(path).check_for_writing()
        elif not Path(path).exists():
            folder = Path(os.path.realpath(path)).parent
            next(folder.iterdir(), None)  # which is an error unless it is a folder
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        elif _may_be_file(path):
            os.close(os.open(path, os.O_WRONLY))
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {shown(path)}: {reason_of(error)}") from error


def check_replaceable(
    name: str, path: str, is_ours: Callable[[bytes], object] | None = None
) -> None:
    """Make sure that nothing is lost if `path` is written anew; `name` is what it is to the run.

    is_ours: tells from the beginning of what a file holds whether we have written that; None where
    a person may have written, or mended, it.

    Raises:
        OutputError: the file holds something else.
    """
    start = _start_of_stored(path) if is_url(path) else _start_of(path)
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


def _start_of(path: str) -> bytes:
    """Return how the file `path` begins; nothing if there is none, or it is a device or pipe."""
    if not _is_filled(path):
        return b""
    with Path(path).open("rb") as file:
        return file.read(_START_BYTES)


def _start_of_stored(url: str) -> bytes:
    """Return how what is at `url` begins; nothing if nothing is there.

    Raises:
        OutputError: it cannot be read.
    """
    try:
        store = Store(url)
        return store.read(store.path, _START_BYTES) if store.size(store.path) else b""
    except StoreError as error:
        raise OutputError(f"cannot write {shown(url)}: {error}") from error


def _is_filled(path: str) -> bool:
    """Return whether `path` is a file that holds something; a device or pipe is not."""
    try:
        status = Path(path).stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _may_be_file(path: str) -> bool:
    """Return whether writing to `path` changes a file, or would have to."""
    try:
        mode = Path(opened_as(path)).stat().st_mode
    except (OSError, ValueError):
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


class OutputLock:
    """Holds the file of results `path` while it is entered; None or no plain file needs no lock.

    See ResultsFile for what it does besides.

    Two runs at a time would write into each other's lines.

    The file is there from then on, but not after an error that left it as empty as it was made.

    Raises:
        OutputError: another run holds it, or it cannot be opened.
    """

    def __init__(self, path: str | None) -> None:
        self.path = self.name = path
        self._descriptors: list[int] = []
        self._is_new = False

    def __enter__(self) -> Self:
        if self.path is not None:
            self._is_new = not Path(self.path).exists()
            self.renew()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        path = Path(self.path or "")
        if kind is not None and self._is_new and path.is_file() and not path.stat().st_size:
            path.unlink()
        for descriptor in self._descriptors:
            os.close(descriptor)

    @property
    def is_filled(self) -> bool:
        """Whether there are results, or something else that would be lost."""
        if self.path is None:
            return False
        return Path(rest_path(self.path)).exists() or _is_filled(self.path)

    def guarded(self, results: Sink) -> Sink:
        """Return `results`: a file here fails by itself."""
        return results

    def begin(self) -> None:
        """Nothing: what is written is where it belongs."""

    def settle(self) -> None:
        """Make sure that what was written is on the disk, in the file that has this name.

        Raises:
            WriteError: it is not, or the file with this name is gone, or another one.
        """
        if self._descriptors:
            where = self.whereabouts()
            try:
                os.fsync(self._descriptors[-1])
                if where != self.path:
                    what = "deleted" if where == _NAMELESS else "moved"
                    raise FileNotFoundError(errno.ENOENT, f"it was {what} while it was written")
            except OSError as error:
                raise WriteError(self.path or "", error) from error

    def finish(self) -> None:
        """Nothing: what was written is where it belongs."""

    def save(self) -> None:
        """Nothing: what was written is where a run that goes on finds it."""

    @property
    def is_in_place(self) -> bool:
        """Whether a run that goes on finds the results."""
        return self.whereabouts() == self.path

    def whereabouts(self) -> str:
        """Return where the results are: the path, or what has become of the file since."""
        if self.path is None or not self._descriptors:
            return self.path or "stdout"
        held = os.fstat(self._descriptors[-1])
        with suppress(OSError):
            if os.path.samestat(held, Path(self.path).stat()):
                return self.path
        if not held.st_nlink:
            return _NAMELESS
        try:
            return str(Path(f"/proc/self/fd/{self._descriptors[-1]}").readlink())
        except OSError:  # where descriptors have no names
            return "a file with another name"

    def renew(self) -> None:
        """Hold the file that has this name now: mending a .gz file puts another in its place."""
        if self.path is None or (Path(self.path).exists() and not Path(self.path).is_file()):
            return
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}") from error
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
                message = f"{self.path} is being written by another run"
                raise OutputError(message) from None
