"""Inputs that are elsewhere, as fsspec opens them: each is copied once into a file of this machine.

A run reads its input more than once and anywhere in it, which few stores allow at a bearable price.
"""

import io
import re
import tempfile
from typing import Any

from ..errors import reason_of
from .intake import InputError

PATIENCE = 60  # seconds, in which something comes of a server
_MAX_REASON = 300  # characters
_URL = re.compile(r"\w+://[^\s'\"]+")
_SECRETS = re.compile(r"(?<=://)[^/@]*@|\?.*", re.DOTALL)  # a password, and what signs a URL


def shown(url: str) -> str:
    """Return a URL as messages and pages name it, without what only its owner should know."""
    return _SECRETS.sub("", url)


def fetched(url: str) -> io.FileIO:
    """Return a file without a name, open at its start, that holds what is at `url`.

    Raises:
        InputError: fsspec, or what it needs for such a URL, is not installed; nothing is there; it
            may not be read, or breaks off; this machine has no room for it.
    """
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - an extra
    except ImportError:
        how = "pip install 'batchdecode[fsspec]'"
        raise InputError(f"cannot read {shown(url)}: URLs need fsspec: {how}") from None
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by whoever asks for it
    try:
        store, path = url_to_fs(url, **_options(url))
        store.get_file(path, f"/dev/fd/{file.fileno()}")
    except Exception as error:  # each store has its own
        file.close()
        raise InputError(f"cannot read {shown(url)}: {_reason(error)}") from error
    return file


def _options(url: str) -> dict[str, Any]:
    """Return what a store is to be told beside the URL."""
    if not url.startswith(("http://", "https://")):
        return {}
    from aiohttp import ClientTimeout  # noqa: PLC0415 - fsspec needs it for these alone

    timeout = ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE)
    return {"client_kwargs": {"timeout": timeout}}  # by default five minutes for all of it


def _reason(error: Exception) -> str:
    """Return in one line what went wrong, as far as the store tells."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, FileExistsError):  # a folder, which fsspec wants to make here
        return "it is a folder"
    if isinstance(error, TimeoutError):
        return f"nothing came for {PATIENCE} s"
    told = _URL.sub(lambda url: shown(url[0]), reason_of(error))
    reason = " ".join(told.split())
    return reason[:_MAX_REASON] or type(error).__name__
