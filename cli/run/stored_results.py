"""Results that go to a URL: a file of this machine, of which a store has parts while it grows.

No store takes a line at the end of what it has.  So a run writes, resumes and checks its results in
a file here, as ever; what comes to that is added to the parts there, and when the run has come to
its end all of it is put at the URL as one, with the files that stand beside results, and the parts
are removed.  Rule: at any moment the store alone has enough for a resume, on whatever machine.
"""

import fcntl
import hashlib
import io
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from threading import Condition, Thread
from typing import BinaryIO, Self

from ..errors import WriteError, reason_of
from ..screen.terminal import printable_lines
from .files import record_path, rest_path
from .intake import Waiting
from .out_file import OutFile
from .output import FileSink, GzipSink, OutputError, Sink
from .parts import Parts, Saved
from .problems import say
from .sums import sums_path
from .taking_over import unpack
from .urls import Store, StoreError, shown

LAST_SECONDS = 60.0  # for what is left of a run that was stopped


class StoredResults:
    """The results at a URL, while a run has them, with the methods of OutFile.

    path: where they are written on this machine, and the files beside them.
    is_filled: there is something that would be lost.

    waiting: entered while the store is waited for.
    is_continued, is_forced: what is there is gone on with; it may be lost.

    Raises, in what a run calls before it begins:
        OutputError: the store cannot be read or written, or this machine has no room.
    """

    def __init__(self, url: str, waiting: Waiting, *, is_continued: bool, is_forced: bool) -> None:
        self.name = shown(url)
        try:
            self._store = Store(url)
        except StoreError as error:
            raise OutputError(f"cannot write {self.name}: {error}") from error
        self._waiting = waiting
        self._is_continued, self._is_forced = is_continued, is_forced
        self._spool = Spool(self.name)
        self.path = str(self._spool.now / "results.jsonl")
        self._parts = Parts(self._store)
        self._uploads: Uploads | None = None
        self.is_filled = False
        self._is_tried = self._has_failed = self._is_finished = False
        self._has_parts = self._has_whole = False  # here, as far as is known
        self._before, self._earlier = Saved(), _digests(Saved(), self.path)

    def __enter__(self) -> Self:
        self._spool.__enter__()
        try:
            with self._waiting(), self._named(OutputError):
                Path(self.path).touch()
                self._look()
        except BaseException:
            self._spool.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._uploads is not None:
            self._uploads.stop()
            self._spool.keeps_before = False
            self._spool.keeps_now = not (self._is_finished or self._uploads.is_all_saved)
        elif self._is_tried:
            with suppress(StoreError):
                self._parts.remove_trial()
        self._spool.__exit__()

    # -- before a run, what one before it has left ---------------------------------------------

    def _look(self) -> None:
        """Find out what is there, have it here if it is gone on with, and claim the place."""
        store, parts = self._store, self._parts
        parts.look()
        size = store.size(store.path)
        self.is_filled = parts.is_there or bool(size)
        if self.is_filled and not self._is_forced:
            if parts.is_there:
                Path(record_path(self.path)).write_bytes(parts.read_record())
            elif store.size(f"{store.path}.run.json") is not None:
                record = store.read(f"{store.path}.run.json", 2**20)
                Path(record_path(self.path)).write_bytes(record)
            if not self._is_continued:
                return  # which is an error of its own
            if parts.is_there:
                parts.fetch(self.path)
                self._has_parts, self._before = True, parts.saved
            else:
                self._fetch_whole()
                self._has_whole = True
            self._earlier = _digests(self._before, self.path)
            if parts.is_there:
                self._take_over_spool()
        self._is_tried = True
        parts.try_writing()

    def _fetch_whole(self) -> None:
        """Have here what a run has left that has come to its end."""
        store = self._store
        with Path(self.path).open("r+b") as results:
            if store.path.endswith(".gz"):
                with tempfile.TemporaryFile() as packed:
                    store.get(store.path, packed)
                    unpack(packed, results)
            else:
                store.get(store.path, results)
        if store.size(f"{store.path}.run.sums") is not None:
            with Path(sums_path(self.path)).open("wb") as sums:
                store.get(f"{store.path}.run.sums", sums)
        sums_here = Path(sums_path(self.path))
        size_of_sums = sums_here.stat().st_size if sums_here.exists() else 0
        self._before = Saved(Path(self.path).stat().st_size, size_of_sums)

    def _take_over_spool(self) -> None:
        """Go on with what a killed run has left on this machine, if that is the same and more."""
        before = str(self._spool.before / Path(self.path).name)
        with suppress(FileNotFoundError):
            records = [Path(record_path(path)).read_bytes() for path in (before, self.path)]
            is_longer = Path(before).stat().st_size > self._before.results
            if (
                is_longer
                and records[0] == records[1]
                and _digests(self._before, before) == self._earlier
            ):
                self._spool.take_over()

    # -- a run -----------------------------------------------------------------------------------

    def open(self, *, append: bool) -> Sink:
        """Return a sink that takes no more once the store does not."""
        return _GuardedSink(OutFile(self.path).open(append=append), self._raise_failure)

    def begin(self) -> None:
        """Let the store know of the run."""
        parts = self._parts
        is_as_it_was = _digests(self._before, self.path) == self._earlier
        self._has_whole = self._has_whole and is_as_it_was
        with self._waiting(), self._named(OutputError):
            parts.claim()
            if self._has_parts and is_as_it_was:
                parts.put_record(self.path)
            elif not self._has_whole:
                parts.begin_anew(self.path)
        num_saved = self._before.results if self._has_whole else parts.saved.results
        self._uploads = Uploads(self.path, num_saved, self._add)

    def settle(self) -> None:
        """Have all in the store, as parts.

        Raises:
            WriteError: the store does not take it.
        """
        if self._uploads is not None:
            with self._waiting(), self._named(WriteError):
                self._uploads.flush()

    def finish(self) -> None:
        """Have all at the URL, and no parts.

        Raises:
            WriteError: the store does not take it.
        """
        store, parts = self._store, self._parts
        with self._waiting(), self._named(WriteError):
            if not self._has_whole:
                is_packed = store.path.endswith(".gz")
                with _packed(self.path) if is_packed else _opened(self.path) as whole:
                    store.put(store.path, whole)
                if Path(sums_path(self.path)).exists():
                    with _opened(sums_path(self.path)) as sums:
                        store.put(f"{store.path}.run.sums", sums)
            with _opened(record_path(self.path)) as record:
                store.put(f"{store.path}.run.json", record)
            self._is_finished = True
            try:
                parts.remove()
            except StoreError as error:
                if parts.is_there:
                    parts.put_record(self.path)  # which says that the run has come to its end
                say(printable_lines(f"warning: cannot remove {parts.folder}: {error}\n"))

    def save(self) -> None:
        """Have in the store what it takes of a run that was stopped; the rest stays here."""
        uploads = self._uploads
        if uploads is None or self._is_finished or uploads.is_all_saved:
            return
        try:
            uploads.flush(LAST_SECONDS)
        except StoreError as error:
            if not self._has_failed:
                say(printable_lines(f"error: cannot write {self.name}: {error}\n"))
        except KeyboardInterrupt:  # a second signal: whoever sends it does not want to wait
            return

    def whereabouts(self) -> str:
        """Return where the results are."""
        if self._is_finished:
            return self.name
        is_there = self._uploads is None or self._uploads.is_all_saved
        return self._parts.folder if is_there else self.path

    @property
    def has_foreign_lines(self) -> bool:
        """Return False: of parts that others wrote, none is read."""
        return False

    @property
    def is_in_place(self) -> bool:
        """Whether a run that goes on finds them: there, or here."""
        return True

    def _add(self) -> int:
        """Add what has come since; return how much is in the store then."""
        if self._has_whole:  # and it was not known that there would be more
            self._parts.begin_anew(self.path)
            self._has_whole = False
        else:
            self._parts.add(self.path)
        return self._parts.saved.results

    def _raise_failure(self) -> None:
        if self._uploads is not None and (error := self._uploads.error) is not None:
            self._has_failed = True
            raise WriteError(self.name, error)

    @contextmanager
    def _named(self, kind: type[OutputError] | type[WriteError]) -> Iterator[None]:
        """Let an error be of this kind, and say what cannot be written."""
        try:
            yield
        except StoreError as error:
            self._has_failed = True
            if kind is WriteError:
                raise WriteError(self.name, error) from error
            raise OutputError(f"cannot write {self.name}: {error}") from error
        except OSError as error:
            self._has_failed = True
            raise WriteError(self.path, error) from error


class _GuardedSink:
    """Passes results on, unless `check` raises."""

    def __init__(self, results: Sink, check: Callable[[], None]) -> None:
        self._results, self._check = results, check
        self.is_file = results.is_file

    def write(self, lines: bytes) -> None:
        self._check()
        self._results.write(lines)

    def close(self) -> None:
        """End the file."""
        self._results.close()


def _digests(saved: Saved, output: str) -> list[bytes | None]:
    """Return what tells the files of results from others, up to what the store has of them."""
    sizes = (saved.results, output), (saved.sums, sums_path(output)), (None, rest_path(output))
    return [_digest(path, size) for size, path in sizes]


def _digest(path: str, size: int | None) -> bytes | None:
    """Return a digest of the first `size` bytes of a file, of all if that is None."""
    digest = hashlib.blake2b()
    left = size
    try:
        with Path(path).open("rb") as file:
            while left != 0 and (chunk := file.read(2**20 if left is None else min(2**20, left))):
                digest.update(chunk)
                left = None if left is None else left - len(chunk)
    except FileNotFoundError:
        return None if size is None else digest.digest()
    return digest.digest()


def _opened(path: str) -> BinaryIO:
    return Path(path).open("rb")


def _packed(path: str) -> BinaryIO:
    """Return a file without a name that holds what is at `path`, compressed."""
    packed = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by whoever asks for it
    raw = io.FileIO(packed.fileno(), "w", closefd=False)
    sink = GzipSink(FileSink(raw, tempfile.gettempdir()), is_needed=True)
    with Path(path).open("rb") as file:
        while chunk := file.read(2**20):
            sink.write(chunk)
    sink.close()
    return packed


class Spool:
    """The folder of this machine for what goes to a URL, which one run at a time holds.

    What a killed run leaves in it stays until the next run to that URL has begun.
    name: as messages call the URL.

    now: where this run has its files.  before: where those of a killed one are, if there was any.
    keeps_now: whether `now` stays when it is left.  keeps_before: whether `before` does.

    Raises:
        OutputError: another run holds it, or there is no room for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        digest = blake2b(name.encode(errors="surrogateescape"), digest_size=8).hexdigest()
        self._folder = Path(tempfile.gettempdir(), f"batchdecode-{os.getuid()}-{digest}")
        self.now, self.before = self._folder / "now", self._folder / "before"
        self.keeps_now, self.keeps_before = False, True
        self._descriptor = -1

    def __enter__(self) -> Self:
        try:
            while not self._lock():
                pass
            if self.now.exists():
                shutil.rmtree(self.before, ignore_errors=True)
                self.now.rename(self.before)
            self.now.mkdir()
        except OSError as error:
            self._let_go()
            raise OutputError(f"cannot write {self._folder}: {reason_of(error)}") from error
        except OutputError:
            self._let_go()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            if not self.keeps_now:
                shutil.rmtree(self.now)
                if self.keeps_before and self.before.exists():
                    self.before.rename(self.now)
            shutil.rmtree(self.before, ignore_errors=True)
            if not self.now.exists():
                self._folder.rmdir()
        self._let_go()

    def take_over(self) -> None:
        """Go on with the files of the run before."""
        shutil.rmtree(self.now)
        self.before.rename(self.now)
        self.keeps_now = True

    def _lock(self) -> bool:
        """Return whether the folder is held: another run may have removed it in between.

        Raises:
            OutputError: another run holds it.
            OSError: it cannot be made.
        """
        with suppress(FileExistsError):
            self._folder.mkdir(0o700)
        self._let_go()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        self._descriptor = os.open(self._folder, flags)
        held = os.fstat(self._descriptor)
        if held.st_uid != os.getuid() or stat.S_IMODE(held.st_mode) & 0o077:
            raise OutputError(f"cannot write {self._folder}: others may write there, too")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"{self._name} is being written by another run") from None
        try:
            return os.path.samestat(held, self._folder.stat())
        except FileNotFoundError:
            return False

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


PART_BYTES, PART_SECONDS = 8 * 2**20, 30.0
"""Once so much has come, or for so long there was something, it is added."""
LOOK_SECONDS = 0.5


class Uploads:
    """Calls `add`, which adds what `path` has beyond what it returns, from a thread of its own.

    So no step waits for a store.

    add: returns how many bytes of `path` are in the store after that, or raises a StoreError.
    error: why it failed last, None if it has not; it is called again only by `flush`.
    """

    def __init__(self, path: str, num_saved: int, add: Callable[[], int]) -> None:
        self._path, self._add = Path(path), add
        self.error: StoreError | None = None
        self._num_saved, self._since = num_saved, time.monotonic()
        self._changed = Condition()
        self._num_asked = self._num_done = 0
        self._is_over = False
        Thread(target=self._work, name="uploads", daemon=True).start()

    @property
    def is_all_saved(self) -> bool:
        """Whether the store has all of the file."""
        return self._num_new() == 0

    def flush(self, seconds: float | None = None) -> None:
        """Have all added that there is, and wait for that, or for so long.

        Raises:
            StoreError: it could not be added, or not in time.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            self._num_asked += 1
            wanted = self._num_asked
            self._changed.notify_all()
            while self._num_done < wanted:
                if deadline is not None and time.monotonic() > deadline:
                    raise StoreError(f"the store has not answered within {seconds:g} s")
                self._changed.wait(LOOK_SECONDS)
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Add nothing more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._num_asked == self._num_done and not self._is_over:
                    self._changed.wait(LOOK_SECONDS)
                if self._is_over:
                    return
                asked = self._num_asked
                if asked == self._num_done and self.error is not None:
                    continue
            try:
                num_new, now = self._num_new(), time.monotonic()
                if num_new <= 0:
                    self._since = now
                is_due = num_new >= PART_BYTES or now - self._since > PART_SECONDS
                if not is_due and asked == self._num_done:
                    continue
                if num_new > 0:
                    self._num_saved = self._add()
                self.error = None
            except StoreError as error:
                self.error = error
            except Exception as error:  # noqa: BLE001 - whatever it is, the run must hear of it
                self.error = StoreError(f"{self._path}: {reason_of(error)}")
            with self._changed:
                self._since, self._num_done = time.monotonic(), asked
                self._changed.notify_all()

    def _num_new(self) -> int:
        return self._path.stat().st_size - self._num_saved
