"""Results of a run that goes on, as a store has them: objects that are written once, in order.

```text
URL.parts/writer              names the run that writes here
URL.parts/0/00000.jsonl       whole lines of results, those of 00001.jsonl go on from there
URL.parts/0/00000.sums        their checksums
URL.parts/0/rest              results whose turn has not come, see taking_over.py
URL.parts/0/run.json          the record of the run
```

Rule: a folder counts once it has a run.json, and of several the one with the largest number.  So
what changes earlier results, as a resume may, is there at once, and a crash loses nothing.
"""

import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .files import record_path, rest_path
from .sums import sums_path
from .urls import Store, StoreError

_CHUNK_BYTES = 2**20
_PART = re.compile(r"(\d+)/(\d+)\.jsonl")
_RECORD = re.compile(r"(\d+)/run\.json")


class Saved(NamedTuple):
    """How much of a file of results, and of that of its sums, is in the store."""

    results: int = 0
    sums: int = 0


class Parts:
    """What there is of the results at the URL of `store` while they are not whole.

    folder: as messages call it.  is_there: a run has left some.
    saved: how much of the local file they have.
    """

    def __init__(self, store: Store) -> None:
        self.folder = f"{store.name}.parts/"
        self.saved = Saved()
        self._store, self._path = store, f"{store.path}.parts"
        self._writer = os.urandom(16).hex().encode()
        self._sizes: dict[str, int] = {}
        self._generation = -1
        self._num_parts = 0

    @property
    def is_there(self) -> bool:
        """Whether a run has left some, or this one has begun to."""
        return self._generation >= 0

    def look(self) -> None:
        """Find out what is there.

        Raises:
            StoreError: that cannot be read.
        """
        self._sizes = self._store.sizes(self._path)
        found = [int(match[1]) for name in self._sizes if (match := _RECORD.fullmatch(name))]
        self._generation = max(found, default=-1)

    def read_record(self) -> bytes:
        """Return the record of the run that has left these."""
        return self._store.read(f"{self._path}/{self._generation}/run.json", 2**20)

    def fetch(self, output: str) -> None:
        """Put together what is there, as the file `output` and those beside it.

        Raises:
            StoreError: it cannot be read, or a part is missing.
            OSError: there is no room for it.
        """
        numbers = sorted(
            int(match[2])
            for name in self._sizes
            if (match := _PART.fullmatch(name)) and int(match[1]) == self._generation
        )
        for number in range(len(numbers)):
            if numbers[number] != number:
                raise StoreError(f"{self.folder}{self._generation}/{number:05}.jsonl is missing")
        with Path(output).open("ab") as results, Path(sums_path(output)).open("ab") as sums:
            for number in numbers:
                self._append(f"{number:05}.jsonl", results)
                if f"{self._generation}/{number:05}.sums" in self._sizes:
                    self._append(f"{number:05}.sums", sums)
            self.saved = Saved(results.tell(), sums.tell())
        self._num_parts = len(numbers)
        if f"{self._generation}/rest" in self._sizes:
            with Path(rest_path(output)).open("ab") as rest:
                self._append("rest", rest)

    def try_writing(self) -> None:
        """Make sure that something can be written there, long before there is something.

        Raises:
            StoreError: nothing can.
        """
        self._store.write(f"{self._path}/starting", b"\n")

    def remove_trial(self) -> None:
        """Leave nothing there of a run that has not begun.

        Raises:
            StoreError: that may not be.
        """
        self._store.remove([f"{self._path}/starting"])
        if not self._sizes:
            self._store.remove_folder(self._path)

    def claim(self) -> None:
        """Write down that this run writes here; one before it, if it goes on, finds that.

        Raises:
            StoreError: nothing can be written there, or another run has in between.
        """
        self._store.write(f"{self._path}/writer", self._writer)
        sizes = self._store.sizes(self._path)
        changed = {name for name, _ in sizes.items() ^ self._sizes.items()}
        if changed - {"starting", "writer"}:
            raise StoreError("another run is writing it")

    def begin_anew(self, output: str) -> None:
        """Let what `output` has now be all there is.

        Raises:
            StoreError: it cannot be written.
        """
        names = [name for name in self._store.sizes(self._path) if name[:1].isdigit()]
        numbers = [int(name.partition("/")[0]) for name in names]
        self._generation = max(numbers, default=-1) + 1
        self.saved, self._num_parts = Saved(), 0
        self._add(output)
        if Path(rest_path(output)).exists():
            with Path(rest_path(output)).open("rb") as rest:
                self._store.put(self._place("rest"), rest)
        self.put_record(output)
        with suppress(StoreError):  # they do not count any more
            self._store.remove(f"{self._path}/{name}" for name in names)

    def put_record(self, output: str) -> None:
        """Let the record be the one that stands beside `output`.

        Raises:
            StoreError: it cannot be written.
        """
        with Path(record_path(output)).open("rb") as record:
            self._store.put(self._place("run.json"), record)

    def add(self, output: str) -> None:
        """Add what `output` has by now, up to the end of its last line.

        Raises:
            StoreError: it cannot be written, or another run writes there.
        """
        try:
            writer = self._store.read(f"{self._path}/writer", 2 * len(self._writer))
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise StoreError(f"what this run has written there is gone: {error}") from error
        if writer != self._writer:
            raise StoreError("another run goes on with it")
        self._add(output)

    def remove(self) -> None:
        """Leave nothing there, the record first.

        Raises:
            StoreError: that may not be.
        """
        if self.is_there:
            self._store.remove([self._place("run.json")])
        names = self._store.sizes(self._path)
        self._store.remove([f"{self._path}/{name}" for name in names])
        self._store.remove_folder(self._path)
        self._generation = -1

    def _add(self, output: str) -> None:
        end = _end_of_lines(output, self.saved.results)
        if end == self.saved.results:
            return
        end_of_sums = 0  # those of a line go before it
        if Path(sums_path(output)).exists():
            end_of_sums = Path(sums_path(output)).stat().st_size
            with _part_of(sums_path(output), self.saved.sums, end_of_sums) as part:
                self._store.put(self._place(f"{self._num_parts:05}.sums"), part)
        with _part_of(output, self.saved.results, end) as part:
            self._store.put(self._place(f"{self._num_parts:05}.jsonl"), part)
        self.saved = Saved(end, end_of_sums)
        self._num_parts += 1

    def _append(self, name: str, file: BinaryIO) -> None:
        """Write what is there by this name to the end of `file`."""
        with tempfile.TemporaryFile() as copy:
            self._store.get(self._place(name), copy)
            num_bytes = os.fstat(copy.fileno()).st_size
            if num_bytes != (wanted := self._sizes[f"{self._generation}/{name}"]):
                raise StoreError(f"of {wanted:,} bytes of {name} {num_bytes:,} have come")
            shutil.copyfileobj(copy, file, _CHUNK_BYTES)

    def _place(self, name: str) -> str:
        return f"{self._path}/{self._generation}/{name}"


def _end_of_lines(path: str, start: int) -> int:
    """Return where the last whole line of `path` ends, which has some up to `start` at least."""
    with Path(path).open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > start:
            begin = max(start, end - _CHUNK_BYTES)
            file.seek(begin)
            place = file.read(end - begin).rfind(b"\n")
            if place >= 0:
                return begin + place + 1
            end = begin
    return start


def _part_of(path: str, start: int, end: int) -> BinaryIO:
    """Return a file without a name that holds the bytes of `path` from `start` up to `end`."""
    part = tempfile.TemporaryFile()  # noqa: SIM115 - closed by whoever asks for it
    with Path(path).open("rb") as file:
        file.seek(start)
        while start < end and (chunk := file.read(min(_CHUNK_BYTES, end - start))):
            start += part.write(chunk)
    part.flush()
    return part
