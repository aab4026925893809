"""The thread that adds to a store what has come to a file, so that no step waits for a store."""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Thread

from ..errors import reason_of
from .urls import StoreError

PART_BYTES, PART_SECONDS = 8 * 2**20, 30.0
"""Once so much has come, or for so long there was something, it is added."""
LOOK_SECONDS = 0.5


class Uploads:
    """Calls `add`, which adds what `path` has beyond what it returns, from a thread of its own.

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
                if not self._is_due() and asked == self._num_done:
                    continue
                if self._num_new() > 0:
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

    def _is_due(self) -> bool:
        num_new = self._num_new()
        if num_new <= 0:
            self._since = time.monotonic()
        return num_new >= PART_BYTES or time.monotonic() - self._since > PART_SECONDS
