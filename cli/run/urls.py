"""Files at URLs, by fsspec: an input is downloaded once, an output is uploaded once at its end.

Rule: no message shows the secrets of a URL: passwords, signatures and queries.
"""

import os
import re
from pathlib import Path
from typing import Any

from ..errors import reason_of

# As fsspec has them: a scheme, and before it others that wrap it.
_IS_URL = re.compile(r"(?:[a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_URL = re.compile(r"\w+://[^\s'\"]+")
_OWNER, _SIGNATURE = re.compile(r"(?<=://)[^/@]*@"), re.compile(r"\?.*", re.DOTALL)
_SILENCE_SECONDS = 60  # of a web server
_MAX_REASON = 300  # characters


class UrlError(OSError):
    """A URL cannot be read or written; the message is one line."""


def is_url(path: str) -> bool:
    """Return whether `path` is a URL; ./NAME is a local file with such a name."""
    return _IS_URL.match(path) is not None


def shown(path: str) -> str:
    """Return a URL without its password and query, for messages; return a path unchanged."""
    return _SIGNATURE.sub("", _OWNER.sub("", path)) if is_url(path) else path


def masked(text: str) -> str:
    """Return `text` with *** in place of the passwords and queries of its URLs."""

    def mask(url: re.Match[str]) -> str:
        return _SIGNATURE.sub("?***", _OWNER.sub("***@", url[0]))

    return _URL.sub(mask, text)


def check_upload(url: str) -> None:
    """Raise a UrlError if `url` alone shows that no file can be uploaded to it."""
    if url.lower().startswith(("http://", "https://")):
        raise UrlError("a web server takes no files: use a store such as s3:// or gs://")
    if "::" in url.partition("://")[0]:
        raise UrlError("an output goes to one store, not through another one")
    if shown(url).endswith("/"):
        raise UrlError("it is a folder: add the name of a file")
    _file_system(url)


def read_start(url: str, num_bytes: int) -> bytes:
    """Return the first bytes of the file at `url`, b"" if there is no file, or raise a UrlError."""
    files, path = _file_system(url)
    try:
        with files.open(path, "rb") as file:
            return bytes(file.read(num_bytes))
    except FileNotFoundError:
        return b""
    except Exception as error:  # each store has its own
        raise UrlError(_reason(error)) from error


_copies: dict[str, int] = {}  # URL -> descriptor of a file without a name


def copy_of(url: str) -> int:
    """Return the descriptor of a local copy of the file at `url`, which is downloaded only once.

    Raises:
        UrlError: the file cannot be read, or the disk is full.
    """
    if url not in _copies:
        import tempfile  # noqa: PLC0415 - for URLs only

        files, path = _file_system(url)
        with tempfile.TemporaryDirectory(prefix="batchdecode-") as folder:
            copy = Path(folder, "copy")
            try:
                files.get_file(path, str(copy))
            except FileNotFoundError as error:
                raise UrlError("there is no such file") from error
            except Exception as error:  # each store has its own
                raise UrlError(_reason(error)) from error
            if copy.is_dir():
                raise UrlError("it is a folder")
            _copies[url] = os.open(copy, os.O_RDONLY)
    return _copies[url]


def upload(file: Path, url: str) -> None:
    """Replace the file at `url` by a local one, or raise a UrlError."""
    files, path = _file_system(url)
    try:
        files.makedirs(files._parent(path), exist_ok=True)  # noqa: SLF001 - as fsspec's docs do
        files.put_file(str(file), path)
    except Exception as error:  # each store has its own
        raise UrlError(_reason(error)) from error


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for `url`, and the path in that."""
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - an extra
    except ImportError:
        raise UrlError("URLs need fsspec: pip install 'batchdecode[fsspec]'") from None
    import logging  # noqa: PLC0415 - for URLs only

    for name in ("fsspec", "s3fs", "gcsfs"):  # they print an error before they raise it
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())
    scheme, options = url.partition("://")[0].lower(), dict[str, Any]()
    try:
        if scheme in {"http", "https"}:
            from aiohttp import ClientTimeout  # noqa: PLC0415 - for web servers only

            # by default a download may take five minutes in all
            silence = _SILENCE_SECONDS
            timeout = ClientTimeout(total=None, sock_connect=silence, sock_read=silence)
            options = {"client_kwargs": {"timeout": timeout}}
        files, path = url_to_fs(url, **options)
    except ImportError as error:
        from fsspec.registry import known_implementations  # noqa: PLC0415 - after an error

        package = known_implementations.get(scheme, {}).get("class", "fsspec").partition(".")[0]
        if package == "fsspec":
            raise UrlError(_reason(error)) from error
        raise UrlError(f"{scheme}:// needs {package}: pip install {package}") from error
    except Exception as error:  # each store has its own
        raise UrlError(_reason(error)) from error
    if scheme in {"s3", "s3a", "gs", "gcs"} and "/" not in path.strip("/"):
        raise UrlError("that is a bucket: add the name of a file in it")
    return files, path


def _reason(error: Exception) -> str:
    if isinstance(error, UrlError):
        return str(error)
    if isinstance(error, TimeoutError) and not reason_of(error):
        return "the server did not answer in time"
    said = _URL.sub(lambda url: shown(url[0]), reason_of(error))
    return " ".join(said.split())[:_MAX_REASON] or type(error).__name__
