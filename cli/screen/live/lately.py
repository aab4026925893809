"""What has happened of late in a run: it is to be seen for a while, and then no more."""

from collections import deque
from collections.abc import Mapping
from itertools import islice

from batcher.events import FinishEvent
from batcher.timeline.records import FAILURES

from .slots import Mark
from .state import Note, RunState

MARK_SECONDS = {"ended": 0.0, "admitted": 0.5, "preempted": 3.0, "failed": 5.0}
"""How long it is to be seen at a slot what has happened there."""
NOTE_SECONDS = 10.0
MAX_NOTED = 16
MAX_ENDS = 8


class Lately:
    """Remembers marks and notes of a run for as long as they are shown.

    marks: what is to be seen at each slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.marks: list[str] = [""] * num_slots
        self._marked: dict[int, float] = {}  # until when the mark of a slot is shown
        self._noted: deque[tuple[float, Note]] = deque(maxlen=MAX_NOTED)  # until when

    def take(self, run: RunState, fresh: Mapping[int, Mark], now: float) -> None:
        """Take in what `run` has noted, and what has happened in slots, by their numbers."""
        marks, until = self.marks, self._marked
        for number in [number for number, end in until.items() if end <= now]:
            marks[number] = ""
            del until[number]
        for number, mark in fresh.items():
            is_new = number not in until or mark == marks[number]
            if mark and (mark in ("preempted", "failed") or is_new):
                marks[number], until[number] = mark, now + MARK_SECONDS[mark]
        while run.notes:
            self._noted.appendleft((now + NOTE_SECONDS, run.notes.popleft()))

    def notes(self, now: float) -> list[Note]:
        """Return the notes that are to be seen, newest first."""
        return [note for end, note in self._noted if end > now]


def newest_ends(run: RunState) -> list[FinishEvent]:
    """Return the last ends that were none by failure, newest first."""
    ends = (found.finish for found in reversed(run.ends) if found.finish is not None)
    return list(islice((end for end in ends if end.reason not in FAILURES), MAX_ENDS))
