"""What is at a URL, as fsspec reaches it: which paths are one, its name, and what goes wrong.

Rule: no message has what only the owner of a URL should know, and each says in one line what a
store tells.  What may pass is tried again, a few times.
"""

import os
import re
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from ..errors import reason_of

if TYPE_CHECKING:
    from aiohttp import TraceConfig, TraceRequestEndParams, TraceRequestExceptionParams

PATIENCE = 60  # seconds, in which something comes of a server
_PATIENCE_OF_A_TRY = 15  # seconds, with a package that tries several times itself
TRIES, _TRIES_OF_BUCKETS = 4, 2  # s3fs and gcsfs each time try five times or six themselves
_CHUNK_BYTES, _MAX_CHUNKS = 2**23, 4  # of a file that are in memory, where packages take 500 MB
_MAX_PARTS, _UNIT = 10_000, 2**18  # S3 takes no more parts of a file, Google's store multiples
FIRST_WAIT = 1.0  # seconds, twice as many before each try after that
_MAX_REASON = 300  # characters
# fsspec's own form: a scheme, before it others that are applied to what it gives.
_IS_URL = re.compile(r"(?:[a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_URL = re.compile(r"\w+://[^\s'\"]+")
_OWNER, _SIGNATURE = re.compile(r"(?<=://)[^/@]*@"), re.compile(r"\?.*", re.DOTALL)
_BUCKETS = ("s3", "s3a", "gs", "gcs")
_FOLDERS = ("file", "local", "memory", "ftp", "sftp", "ssh", "smb", "hdfs")  # that must be made
_NO_SERVER_TO_WRITE_TO = ("http", "https")
_LOGGERS = ("fsspec", "s3fs", "gcsfs")  # each tells of an error before it raises it

AnyAnswer = TypeVar("AnyAnswer")


def is_url(path: str) -> bool:
    """Return whether `path` is one; a file of this machine that begins so is ./ and that."""
    return _IS_URL.match(path) is not None


def shown(path: str) -> str:
    """Return a URL as messages and pages name it, without password and query; a path as it is."""
    return _SIGNATURE.sub("", _OWNER.sub("", path)) if is_url(path) else path


def masked(text: str) -> str:
    """Return `text` with *** where a URL in it has what only its owner should know."""

    def mask(url: re.Match[str]) -> str:
        return _SIGNATURE.sub("?***", _OWNER.sub("***@", url[0]))

    return _URL.sub(mask, text)


class StoreError(OSError):
    """What a store cannot do, or does not allow; the message says it in one line."""


class Store:
    """The store that a URL leads to; paths are as it has them.

    name: as messages call the URL.  path: what it is about.

    Raises, in all its methods:
        StoreError: it cannot be done.
    """

    def __init__(self, url: str) -> None:
        self.name = shown(url)
        self._scheme = url.partition("://")[0].lower()
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415 - an extra
        except ImportError:
            how = "pip install 'batchdecode[fsspec]'"
            raise StoreError(f"URLs need fsspec: {how}") from None
        import logging  # noqa: PLC0415 - as in _tried

        for name in _LOGGERS:
            logger = logging.getLogger(name)
            if not logger.handlers:
                logger.addHandler(logging.NullHandler())
        try:
            self._files, self.path = url_to_fs(url, **_options(self._scheme))
        except ImportError as error:
            raise StoreError(_what_is_missing(self._scheme, error)) from error
        except Exception as error:  # each store has its own
            raise StoreError(_reason(error)) from error
        if self._scheme in _BUCKETS and "/" not in self.path.strip("/"):
            raise StoreError("that is a bucket: behind it goes the name of a file in it")

    def check_for_writing(self) -> None:
        """Make sure that a file can have this URL."""
        if self._scheme in _NO_SERVER_TO_WRITE_TO:
            raise StoreError("such a server takes no files; a store such as s3:// or gs:// does")
        if "::" in self._scheme:
            raise StoreError("what is written goes to one store, and not through another one")
        if self.name.endswith("/"):
            raise StoreError("it is a folder: behind it goes the name of a file")

    def get(self, path: str, file: BinaryIO) -> None:
        """Let the empty `file` hold what is at `path`."""
        place = f"/dev/fd/{file.fileno()}"

        def copy() -> None:
            try:
                self._files.get_file(path, place)
            except PermissionError as error:
                if error.filename == place and isinstance(error.__context__, Exception):
                    raise error.__context__ from None  # gcsfs would remove what it cannot fill
                raise

        self._tried(copy, _reason_of_reading)

    def read(self, path: str, num_bytes: int) -> bytes:
        """Return the beginning of what is at `path`, so many bytes at most."""
        return self._tried(lambda: self._files.cat_file(path, start=0, end=num_bytes), _reason)  # type: ignore[no-any-return]  # fsspec says nothing of its types

    def size(self, path: str) -> int | None:
        """Return how many bytes are at `path`; None if nothing is there.

        Raises:
            StoreError: it is a folder, too.
        """

        def ask() -> int | None:
            self._files.invalidate_cache()
            try:
                info = self._files.info(path)
            except FileNotFoundError:
                return None
            if info["type"] == "directory":
                if self._scheme in _BUCKETS:  # only a beginning that names have
                    return None
                raise IsADirectoryError("it is a folder")
            return int(info["size"])

        return self._tried(ask, _reason)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return how many bytes the files below `folder` have, by their names from there."""

        def ask() -> dict[str, int]:
            self._files.invalidate_cache()
            found = self._files.find(folder, detail=True)
            start = len(folder) + 1
            return {name[start:]: int(info["size"]) for name, info in found.items()}

        return self._tried(ask, _reason)

    def put(self, path: str, file: BinaryIO) -> None:
        """Let `path` hold all of `file`, in place of what was there."""

        def copy() -> None:
            size = os.fstat(file.fileno()).st_size
            if self._scheme in _FOLDERS:
                self._files.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH120 - no path of this machine
            self._files.put_file(f"/dev/fd/{file.fileno()}", path, **self._chunks(size))
            self._files.invalidate_cache()
            arrived = int(self._files.info(path)["size"])
            if arrived != size:
                raise OSError(f"of {size:,} bytes {arrived:,} have arrived")

        self._tried(copy, _reason)

    def _chunks(self, size: int) -> dict[str, int]:
        """Return how a store is to be sent a file of so many bytes."""
        if self._scheme not in _BUCKETS:
            return {}
        units = max(_CHUNK_BYTES // _UNIT, -(-size // (_MAX_PARTS * _UNIT)))
        return {"chunksize": units * _UNIT}

    def write(self, path: str, content: bytes) -> None:
        """Let `path` hold `content`, in place of what was there."""
        import tempfile  # noqa: PLC0415 - few files are elsewhere

        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.flush()
            self.put(path, file)

    def remove(self, paths: Iterable[str]) -> None:
        """Let nothing be at `paths` any more."""
        found = list(paths)
        if found:
            self._tried(lambda: self._files.rm(found), _reason)

    def remove_folder(self, path: str) -> None:
        """Let there be no folder at `path`, where a store knows of any."""

        def remove() -> None:
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

        if self._scheme in _FOLDERS:
            self._tried(remove, _reason)

    def _tried(
        self, call: Callable[[], AnyAnswer], reason: Callable[[Exception], str]
    ) -> AnyAnswer:
        """Return what `call` does, tried again while it is worth it.

        Raises:
            StoreError: it is not any more.
        """
        from tenacity import (  # noqa: PLC0415 - few files are elsewhere
            Retrying,
            retry_if_exception,
            stop_after_attempt,
            wait_exponential,
        )

        tries = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(_TRIES_OF_BUCKETS if self._scheme in _BUCKETS else TRIES),
            wait=wait_exponential(multiplier=FIRST_WAIT),
            reraise=True,
        )
        try:
            return tries(call)
        except Exception as error:  # each store has its own
            raise StoreError(reason(error)) from error


# What another try finds as it is, and what has taken its time already.
_LASTING = (
    PermissionError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    TimeoutError,
    TypeError,
    ValueError,
    ImportError,
)


def _may_pass(error: BaseException) -> bool:
    """Return whether another try may go better; a store has told its package to try before that."""
    if isinstance(error, _LASTING) or not isinstance(error, Exception):
        return False
    import errno  # noqa: PLC0415 - as in _tried

    no_room = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError) and error.errno in no_room:
        return False
    if "Timeout" in type(error).__name__:  # of packages, which have their own
        return False
    status = getattr(error, "status", getattr(error, "code", None))  # of aiohttp, of gcsfs
    return not (isinstance(status, int) and 400 <= status < 500)  # noqa: PLR2004 - HTTP's


def _what_is_missing(scheme: str, error: ImportError) -> str:
    """Return what to install for URLs that begin so."""
    from importlib.util import find_spec  # noqa: PLC0415 - after an error alone

    from fsspec.registry import known_implementations  # noqa: PLC0415 - as above

    package = known_implementations.get(scheme, {}).get("class", "fsspec").partition(".")[0]
    if find_spec(package) is not None:
        return _reason(error)
    return f"{scheme}:// needs {package}: pip install {package}"


def _options(scheme: str) -> dict[str, Any]:
    """Return what a store is to be told beside the URL: by default some wait for an hour."""
    if scheme in {"s3", "s3a"}:
        once = {"retries": {"total_max_attempts": 1}}  # of botocore: s3fs tries five times
        chunks = {"default_block_size": _CHUNK_BYTES, "max_concurrency": _MAX_CHUNKS}
        return {"config_kwargs": once, **chunks}
    if scheme not in {"http", "https", "gs", "gcs"}:
        return {}
    from aiohttp import ClientTimeout  # noqa: PLC0415 - these need it, no others

    if scheme in {"gs", "gcs"}:
        patience = _PATIENCE_OF_A_TRY
        timeout = ClientTimeout(total=None, sock_connect=patience, sock_read=patience)
        return {"requests_timeout": timeout, "session_kwargs": {"trace_configs": [_watched()]}}
    timeout = ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE)
    return {"client_kwargs": {"timeout": timeout}}


@cache
def _watched() -> "TraceConfig":
    """Return what gives a server up: one for all, as fsspec keeps one session for equal options."""
    return watching(Patience(PATIENCE))


def _reason_of_reading(error: Exception) -> str:
    """Return in one line why something could not be read."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, FileExistsError):  # a folder, which fsspec wants to make here
        return "it is a folder"
    return _reason(error)


def _reason(error: Exception) -> str:
    """Return in one line what went wrong, as far as the store tells."""
    if isinstance(error, TimeoutError) and not reason_of(error):
        return "nothing came for too long"
    told = _URL.sub(lambda url: shown(url[0]), reason_of(error))
    reason = " ".join(told.split())
    return reason[:_MAX_REASON] or type(error).__name__


_FAULT_OF_SERVER = 500  # statuses of HTTP from there on


class Patience:
    """How long a server may fail: so many seconds from the first failure since its last answer.

    A package that asks again by itself counts the tries of each request, and one file takes many:
    with the waits between, that adds up to ten minutes for a server that is not there.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._failing_since: float | None = None
        self._reason = ""

    def check(self) -> None:
        """Do nothing as long as there is some left; then begin anew.

        Raises:
            TimeoutError: there is none left; it says what went wrong last.
        """
        since = self._failing_since
        if since is not None and self._clock() - since > self._seconds:
            self._failing_since = None
            raise TimeoutError(self._reason)

    def note_answer(self) -> None:
        """Take note that the server is there."""
        self._failing_since = None

    def note_failure(self, reason: str) -> None:
        """Take note that a request has failed."""
        self._reason = reason
        if self._failing_since is None:
            self._failing_since = self._clock()


def watching(patience: Patience) -> "TraceConfig":
    """Return what has every request of a session of aiohttp look at `patience`, and tell it."""
    from aiohttp import TraceConfig  # noqa: PLC0415 - with an extra

    async def begin(*_: Any) -> None:
        patience.check()

    async def end(_session: Any, _context: Any, told: "TraceRequestEndParams") -> None:
        response = told.response
        if response.status < _FAULT_OF_SERVER:
            patience.note_answer()
        else:
            patience.note_failure(f"{response.status} {response.reason or ''}".rstrip())

    async def fail(_session: Any, _context: Any, told: "TraceRequestExceptionParams") -> None:
        if isinstance(told.exception, Exception):  # not one that breaks off what we do
            patience.note_failure(reason_of(told.exception))

    config = TraceConfig()
    config.on_request_start.append(begin)
    config.on_request_end.append(end)
    config.on_request_exception.append(fail)
    return config
