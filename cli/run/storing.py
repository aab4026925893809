"""Files that are elsewhere: an input is copied here once, an output is put there at its end.

A run reads its input more than once and anywhere in it, which few stores allow at a bearable price.
"""

import io
import tempfile
from typing import BinaryIO

from ..errors import WriteError, reason_of
from .intake import InputError
from .output import FileSink, OutputError, packed
from .urls import Store, StoreError, shown


class StoredSink:
    """A sink for what grows here during a run, and is put at `url` as a whole when it is closed.

    Raises:
        OutputError: there is no such store, or it takes no files; this machine has no room.
    """

    is_file = False

    def __init__(self, url: str) -> None:
        self._name = shown(url)
        try:
            self._store = Store(url)
            self._store.check_for_writing()
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed at the end
        except OSError as error:
            raise OutputError(f"cannot write {self._name}: {reason_of(error)}") from error
        raw = io.FileIO(self._file.fileno(), "w", closefd=False)
        self._sink = packed(FileSink(raw, self._name), self._name, is_new=True)

    def write(self, lines: bytes) -> None:
        """Keep `lines`."""
        self._sink.write(lines)

    def close(self) -> None:
        """Put all at the URL.

        Raises:
            WriteError: the store does not take it.
        """
        with self._file:
            self._sink.close()
            try:
                self._store.put(self._store.path, self._file)
            except OSError as error:
                raise WriteError(self._name, error) from error


_copies: dict[str, BinaryIO] = {}  # files without a name, until the process ends


def fetched(url: str) -> io.FileIO:
    """Return a file without a name, open at its start, that holds what is at `url`.

    However often it is asked for, the store is asked once: so nothing changes in between.

    Raises:
        InputError: fsspec, or what it needs for such a URL, is not installed; nothing is there; it
            may not be read, or breaks off; this machine has no room for it.
    """
    if url not in _copies:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - kept, see _copies
        try:
            store = Store(url)
            store.get(store.path, file)
        except BaseException as error:
            file.close()
            if isinstance(error, StoreError):
                raise InputError(f"cannot read {shown(url)}: {error}") from error
            raise
        _copies[url] = file
    return io.FileIO(f"/dev/fd/{_copies[url].fileno()}")  # with a place of its own in the file
