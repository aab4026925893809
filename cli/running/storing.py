"""Files that are put at a URL as a whole: they grow here, and are there when they are complete."""

import io
import tempfile
from typing import Self

from ..errors import WriteError, reason_of
from .output import FileSink, OutputError, packed
from .urls import Store, shown


class StoredFile:
    """A file that is put at `url`; until then nothing of it is there.

    raw: what it is written to, unbuffered.

    Raises:
        OSError: there is no such store, or it takes no files; this machine has no room.
    """

    def __init__(self, url: str) -> None:
        self._store = Store(url)
        self._store.check_for_writing()
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed when it is left
        self.raw = io.FileIO(self._file.fileno(), "w", closefd=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def put(self) -> None:
        """Put it at the URL.

        Raises:
            StoreError: the store does not take it.
        """
        self._store.put(self._store.path, self._file)


class StoredSink:
    """A sink for what grows during a run, and is put at `url` when it is closed.

    Raises:
        OutputError: there is no such store, or it takes no files.
    """

    is_file = False

    def __init__(self, url: str) -> None:
        self._name = shown(url)
        try:
            self._file = StoredFile(url)
        except OSError as error:
            raise OutputError(f"cannot write {self._name}: {reason_of(error)}") from error
        self._sink = packed(FileSink(self._file.raw, self._name), self._name, is_new=True)

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
                self._file.put()
            except OSError as error:
                raise WriteError(self._name, error) from error
