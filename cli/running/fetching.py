"""Inputs that are elsewhere: each is copied once into a file of this machine.

A run reads its input more than once and anywhere in it, which few stores allow at a bearable price.
"""

import io
import tempfile

from .intake import InputError
from .urls import Store, StoreError, shown

_copies: dict[str, io.FileIO] = {}  # files without a name, until the process ends


def fetched(url: str) -> io.FileIO:
    """Return a file without a name, open at its start, that holds what is at `url`.

    However often it is asked for, the store is asked once: so nothing changes in between.

    Raises:
        InputError: fsspec, or what it needs for such a URL, is not installed; nothing is there; it
            may not be read, or breaks off; this machine has no room for it.
    """
    if url not in _copies:
        _copies[url] = _copy_of(url)
    return io.FileIO(f"/dev/fd/{_copies[url].fileno()}")  # with a place of its own in the file


def _copy_of(url: str) -> io.FileIO:
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - kept, see _copies
    try:
        store = Store(url)
        store.get(store.path, file)
    except BaseException as error:
        file.close()
        if isinstance(error, StoreError):
            raise InputError(f"cannot read {shown(url)}: {error}") from error
        raise
    return file
