"""The files a run is to write: checked before the first of them is touched, and locked."""

import errno
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from batcher.page import is_page_start
from batcher.trace.files import is_trace_start

from ..errors import reason_of
from ..options import STDOUT
from .out_file import OutFile, is_alone
from .output import OutputError, may_be_file
from .run_options import RunOptions
from .urls import Store, StoreError, is_url, shown

_START_BYTES = 2**16

NamedPath = tuple[str, str | None]  # what a file is to the run, an option for example; its path


_WRITTEN_ANEW: dict[str, Callable[[bytes], object]] = {  # what tells ours from other files
    "--trace": is_trace_start,
    "--summary-json": re.compile(rb'\{\s*"requests":').match,
    "--report": is_page_start,
    "--metrics-file": re.compile(b"# HELP (vllm:|batchdecode_)").match,
    "--timeseries": re.compile(b"(worker,)?time,steps,running,").match,
}


@contextmanager
def locked_files(
    options: RunOptions, input_status: os.stat_result
) -> Iterator[Mapping[str, OutFile]]:
    """Give the files that a run writes besides its results, by option: locked, as they were.

    Results are looked after where it is known what run they are of, see `prepare`.

    Raises:
        OutputError: one of all files cannot be written, or is used twice, or holds something that
        would be lost.
    """
    named = {
        "--trace": options.trace,
        "--summary-json": None if options.summary_json == STDOUT else options.summary_json,
        "--report": options.report,
        "--metrics-file": options.metrics_file,
        "--timeseries": options.timeseries,
    }
    beside = []
    if options.output is not None and may_be_file(options.output):
        names = (".run.json", ".run.sums", ".rest")
        beside = [f"{shown(options.output)}{name}" for name in names]
    outputs = [
        ("--output", options.output),
        *[("what stands beside --output,", path) for path in beside],
        *named.items(),
    ]
    check_distinct(input_status, outputs, options.input)
    if options.metrics_file is not None and is_url(options.metrics_file):
        raise OutputError(
            f"--metrics-file {shown(options.metrics_file)}: it is for the node exporter of this "
            "machine, and so a file of it"
        )
    for name, path in outputs:
        if path is not None and path not in beside:
            check_writable(path)
            if name in _WRITTEN_ANEW and not options.force:
                check_replaceable(name, path, _WRITTEN_ANEW[name])
    for path in beside:
        _check_beside(path, is_forced=options.force)
    with ExitStack() as locked:
        yield {
            name: locked.enter_context(OutFile(path))
            for name, path in named.items()
            if path is not None
        }


def _check_beside(path: str, *, is_forced: bool) -> None:
    """Make sure that a file which no option names is not another one's: links are not followed.

    Raises:
        OutputError: it may be.
    """
    try:
        status = Path(path).lstat()
    except OSError:
        check_writable(path)
        return
    if stat.S_ISDIR(status.st_mode) or not (is_forced or is_alone(status)):
        raise OutputError(
            f"{path} is a link, or no file: a run with this --output writes there. Remove it, or "
            "give another --output"
        )


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
        if path is None or not may_be_file(path):
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

    Raises:
        OutputError: the file holds something else.
    """
    start = b""
    if is_url(path):
        try:
            store = Store(path)
            start = store.read(store.path, _START_BYTES) if store.size(store.path) else b""
        except StoreError as error:
            raise OutputError(f"cannot write {shown(path)}: {error}") from error
    elif _is_filled(path):
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


def _is_filled(path: str) -> bool:
    """Return whether `path` is a file that holds something; a device or pipe is not."""
    try:
        status = Path(path).stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0
