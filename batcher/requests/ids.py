"""Duplicate ids, found exactly among millions of them in a few megabytes of memory.

The newest ids are in a dict.  When it is full they move to a temporary database on disk, which
vanishes with the registry.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from batcher.errors import BatchdecodeError, FieldProblem

if TYPE_CHECKING:
    from sqlite3 import Connection

MAX_RECENT = 50_000  # ids in the dict: about 6 MB


class IdRegistry:
    """The ids of a run and the lines they stand in; fewer than MAX_RECENT need no file."""

    def __init__(self) -> None:
        self._recent: dict[str, int] = {}
        self._old: Connection | None = None

    def add(self, request_id: str, line_number: int) -> int | None:
        """Take note of the id and return None; or return the line that has it already.

        Raises:
            BatchdecodeError: there is no room for the temporary file.
        """
        line = self._find(request_id)
        if line is None:
            self._recent[request_id] = line_number
            self._settle()
        return line

    def add_new(self, request_ids: Sequence[str], line_numbers: Sequence[int]) -> bool:
        """Take note of all these ids, or of none if one is not new; return whether it did.

        Raises:
            BatchdecodeError: there is no room for the temporary file.
        """
        new = dict(zip(request_ids, line_numbers, strict=True))
        if len(new) < len(request_ids) or not self._recent.keys().isdisjoint(new):
            return False
        if self._old is not None and any(self._find(name) is not None for name in new):
            return False
        self._recent |= new
        self._settle()
        return True

    def _find(self, request_id: str) -> int | None:
        line = self._recent.get(request_id)
        if line is not None or self._old is None:
            return line
        found = self._old.execute("SELECT line FROM ids WHERE id = ?", (request_id,)).fetchone()
        return None if found is None else int(found[0])

    def _settle(self) -> None:
        """Move the newest ids to the file if there are too many for memory."""
        if len(self._recent) < MAX_RECENT:
            return
        import sqlite3  # noqa: PLC0415 - few runs need it

        try:
            if self._old is None:
                # The empty name is that of a temporary file; what takes ids may be any thread.
                self._old = sqlite3.connect("", isolation_level=None, check_same_thread=False)
                self._old.execute("PRAGMA journal_mode = OFF")
                self._old.execute("CREATE TABLE ids (id TEXT PRIMARY KEY, line) WITHOUT ROWID")
            self._old.execute("BEGIN")
            self._old.executemany("INSERT INTO ids VALUES (?, ?)", sorted(self._recent.items()))
            self._old.execute("COMMIT")
        except sqlite3.Error as error:
            message = f"cannot write the ids read so far to a temporary file: {error}"
            raise BatchdecodeError(message) from error
        self._recent.clear()


def duplicate_id(request_id: str, first_line: int) -> FieldProblem:
    message = f"id `{request_id}` is already used on line {first_line}"
    return FieldProblem("duplicate-id", ("id",), message)
