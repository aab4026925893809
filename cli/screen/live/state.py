"""What a run looks like now, kept from its events alone: nothing here is done per step."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from batcher.errors import InvariantError
from batcher.events import FinishEvent, RejectEvent, RestartEvent, RunEvent
from batcher.trace.run import (
    FAILURES,
    AdmissionRecord,
    FoldNews,
    RequestFold,
    RequestTimeline,
    StepDrafts,
    is_follower,
    label_of,
)
from batcher.trace.timeline import Timeline
from batcher.trace.worker_folds import WorkerFolds

from ..summary import RESTART_REASONS
from .history import RunHistory
from .slots import Mark, SlotState, WorkerPace

MAX_NOTES = 64
"""The most notes that are kept until somebody asks for them."""
MAX_ENDS = 5_000
"""The most sequences that are kept after their end."""
MAX_UNSEEN = 500
"""What the fold has come to know waits for the next frame, but no more than so much."""
USUAL_ENDS = ("stop", "length")


class Note(NamedTuple):
    """Something that nobody should miss: what happened to which sequence."""

    kind: Literal["preempted", "failed"]
    label: str
    what: str


class RunState:
    """The slots of a run, and what has become of the requests so far.

    num_done: requests that came to an end, num_failed: outputs that failed.
    num_preempted: how often a sequence lost its slot, those that came along with it not counted.
    most_done: the largest share of the run that was shown as done.
    restarts: the workers that were replaced.
    notes: the newest of what nobody should miss; whoever shows them takes them out.
    ends: the sequences that have ended, as far as they are kept.
    history: the whole run, in little.
    only_fold, workers: the sequences of the run, of one worker, or else of several; whoever has its
    events feeds them, before `catch_up`.
    news: of the fold, since then.
    paces: how far each worker is, which whoever has the events says where there are several.
    """

    def __init__(self, batch_size: int, num_workers: int = 1) -> None:
        """Begin with nothing in `batch_size` slots, those of all workers."""
        self.only_fold = RequestFold() if num_workers == 1 else None
        self.workers = WorkerFolds(num_workers) if num_workers > 1 else None
        self.news = self.fold.news = FoldNews()
        self.paces = [WorkerPace() for _ in range(num_workers)]
        self.slots = [
            slot
            for worker in range(num_workers)
            for slot in self._slots_of(worker, batch_size // num_workers)
        ]
        self.num_done = self.num_failed = self.num_preempted = 0
        self.most_done = 0.0
        self.restarts: list[RestartEvent] = []
        self.notes: deque[Note] = deque(maxlen=MAX_NOTES)
        self.ends: deque[RequestTimeline] = deque(maxlen=MAX_ENDS)
        self._drafts: deque[StepDrafts] = deque(maxlen=MAX_ENDS)
        self._dropped: deque[tuple[str, int]] = deque(maxlen=MAX_ENDS)
        self.history = RunHistory(batch_size)
        self._num_asked = self._num_found = 0  # by those that have left a slot
        self._num_others: dict[str, int] = {}  # samples of a request that end before its last
        self._preempted: list[RequestTimeline] = []  # those that may not be back
        self._num_finished_tokens = self._num_finished_max = 0

    @property
    def fold(self) -> RequestFold | WorkerFolds:
        """The sequences of the run, whatever number of workers it has."""
        fold = self.only_fold or self.workers
        if fold is None:
            raise InvariantError("a run has no worker")
        return fold

    def _slots_of(self, worker: int, num_slots: int) -> Iterator[SlotState]:
        """Yield the slots of a worker."""
        first, fold = worker * num_slots, self.fold
        own = fold if isinstance(fold, RequestFold) else fold.workers[worker]
        whose = f"w{worker} " if len(self.paces) > 1 else ""
        for number in range(first, first + num_slots):
            yield SlotState(number, own, self.paces[worker], f"{whose}{number}")

    def keep_up(self) -> None:
        """Take in what the fold has come to know, if it is much."""
        if len(self.news.ended) + len(self.news.withdrawn) >= MAX_UNSEEN:
            self.catch_up()

    def catch_up(self) -> None:
        """Take in what the fold has come to know."""
        news = self.news
        for sample in news.samples:
            self._num_others[sample.id] = self._num_others.get(sample.id, 0) + 1
        for event in news.withdrawn:
            if isinstance(event, RejectEvent):
                self.num_done += 1
                self.num_failed += 1
                self.notes.append(Note("failed", event.id, f"failed: {event.reason}"))
            else:
                self.num_failed -= event.reason == "error"
                self._dropped.append((event.id, event.index))
        for request, admission in news.preempted:
            self._note_preemption(request, admission)
        self.ends.extend(news.ended)
        self._drafts.extend(news.drafts)
        self._finish_all(news.ended)
        for restart in news.restarts:
            self.restarts.append(restart)
            what = f"replaced: {RESTART_REASONS[restart.reason]}"
            self.notes.append(Note("failed", f"w{restart.worker or 0}", what))
        for taken in (news.samples, news.withdrawn, news.preempted, news.ended, news.restarts):
            taken.clear()
        news.drafts.clear()

    def keep_ends(self, most: int) -> None:
        """Keep no more than so many, and nothing that `timeline` alone asks for."""
        self.ends = deque(maxlen=most)
        self._drafts, self._dropped = deque(maxlen=0), deque(maxlen=0)

    def timeline(self, run: RunEvent, num_steps: int) -> Timeline:
        """Return what a gantt shows of the sequences that are kept."""
        sequences = [*self.ends, *self.fold.open]
        return Timeline.from_sequences(
            run, num_steps, sequences, self._drafts, self.restarts, set(self._dropped)
        )

    @property
    def num_asked(self) -> int:
        """How many tokens sequences were admitted with."""
        return self._num_asked + sum(_asked(request) for _, request in self._running())

    @property
    def num_found(self) -> int:
        """How many of these were found in blocks."""
        asked = [request for _, request in self._running() if _asked(request)]
        return self._num_found + sum(r.admissions[-1].event.cached for r in asked)

    def num_tokens(self, step: int) -> int:
        """Return how many tokens the run has generated after `step`, those of all beams counted."""
        slots = self.slots
        running = sum(r.tokens_after(slots[n].own_step(step)) for n, r in self._running())
        return self._num_finished_tokens + self._num_kept() + running

    def num_tokens_left(self, step: int, num_queued: int) -> float:
        """Return how many tokens are probably to come after `step`, with `num_queued` waiting.

        As much of max_tokens is taken to be used as was by those that ended; those that run count
        as if they used all of it, or the short ones, which end first, would speak for all.
        """
        running = self._running()
        running_max = sum(request.max_tokens for _, request in running)
        known = self._num_finished_max + running_max
        used = (self._num_finished_tokens + running_max) / known if known else 1.0
        fold = self.fold
        usual = fold.num_wanted / fold.num_arrived if fold.num_arrived else 0.0
        left = sum(
            max(request.max_tokens * used - self.slots[number].tokens_after(step), 0.0)
            for number, request in running
        )
        return left + max(num_queued * usual * used - self._num_kept(), 0.0)

    @property
    def num_running(self) -> int:
        """How many slots are held; what has ended with the last step holds none any more."""
        return len(self._running())

    def num_busy(self, step: int) -> int:
        """Return how many slots were used in `step`."""
        return sum(slot.is_busy(step) for slot in self.slots)

    def open_spans(self) -> list[tuple[int, int]]:
        """Return the slots that are held and since when: the history does not know of them yet."""
        return [(n, request.admissions[-1].event.step) for n, request in self._running()]

    def _running(self) -> list[tuple[int, RequestTimeline]]:
        """Return the slots that are held, with the sequences that hold them."""
        return [
            (number, request)
            for number, request in list(self.fold.slots.items())
            if request.finish is None
            and request.admission is not None
            and request.admission.event.slot == number  # or else it has gone on to another one
        ]

    def _num_kept(self) -> int:
        """Return how many tokens those have that were preempted and are not back."""
        self._preempted = [r for r in self._preempted if r.admission is None and not r.finish]
        return sum(request.tokens_after(0) for request in self._preempted)

    def _note_preemption(self, request: RequestTimeline, admission: AdmissionRecord) -> None:
        """Take in that a sequence has lost its slot."""
        preempt = admission.preempt
        if preempt is None:
            return
        self._leave(request, admission, preempt.step, "preempted")
        if request not in self._preempted:
            self._preempted.append(request)
        if not is_follower(request):
            self.num_preempted += 1
            other = label_of(preempt.for_id, preempt.for_index, "sample")
            gave_way = f"preempted for {other}"
            what = "preempted: no block left" if other == request.label else gave_way
            self.notes.append(Note("preempted", request.label, what))

    def _finish_all(self, ended: Sequence[RequestTimeline]) -> None:
        """Take in that sequences have ended: what `_finish` does, for the usual ones in one go."""
        slots, has_others = self.slots, bool(self._num_others)
        held: list[int] = []  # slot, start and end of one after the other
        num_tokens = num_max = num_asked = num_found = num_rare = 0
        for request in ended:
            end, admission, arrive = request.finish, request.admission, request.arrive
            if (
                has_others
                or end is None
                or admission is None
                or arrive is None
                or request.role != "sample"
                or end.reason not in USUAL_ENDS
            ):
                num_rare += 1
                self._finish(request)
                continue
            admit = admission.event
            start, until, slot = admit.step, end.step + 1, slots[admit.slot]
            if not slot.mark:
                slot.mark = "ended"
            slot.num_left += 1
            slot.num_steps += until - start
            held += (admit.slot, start, until)
            num_tokens += end.tokens
            num_max += request.max_tokens
            num_asked += arrive.prompt_tokens + admit.generated
            num_found += admit.cached
        self.history.held(held)
        self.num_done += len(ended) - num_rare
        self._num_finished_tokens += num_tokens
        self._num_finished_max += num_max
        self._num_asked += num_asked
        self._num_found += num_found

    def _finish(self, request: RequestTimeline) -> None:
        """Take in that a sequence has ended."""
        end, admission = request.finish, request.admission
        if end is None:
            return
        if end.reason == "lost":
            self._lose(request, end)
            return
        has_failed = end.reason in FAILURES
        if has_failed:
            self.num_failed += end.reason == "error"
            what = "failed" if end.reason == "error" else end.reason
            self.notes.append(Note("failed", request.label, what))
        self._num_finished_tokens += request.tokens_after(end.step)
        if admission is not None:
            self._num_finished_max += request.max_tokens
            self._leave(request, admission, end.step + 1, "failed" if has_failed else "ended")
        if request.role != "sample" and is_follower(request):
            return
        if self._num_others and self._num_others.get(end.id):
            self._num_others[end.id] -= 1
            if not self._num_others[end.id]:
                del self._num_others[end.id]
        elif request.arrive is not None or end.index == 0:
            self.num_done += 1  # of what never arrived, the first stands for all

    def _lose(self, request: RequestTimeline, end: FinishEvent) -> None:
        """Take in that a sequence has ended with its worker: it is to be decoded again."""
        self._num_finished_tokens += request.tokens_after(end.step)
        if request.admission is not None:
            self._leave(request, request.admission, end.step + 1, "failed")
        is_other = request.role != "sample" and is_follower(request)
        if not is_other and self._num_others.get(end.id):
            self._num_others[end.id] -= 1

    def _leave(
        self, request: RequestTimeline, admission: AdmissionRecord, until: int, mark: Mark
    ) -> None:
        """Take in that a sequence has left a slot, and what that is called."""
        admit = admission.event
        start, slot = admit.step, self.slots[admit.slot]
        if (mark != "ended" and slot.mark != "failed") or not slot.mark:
            slot.mark = mark
        slot.num_left += 1
        slot.num_steps += until - start
        self.history.held((admit.slot, start, until))
        arrive = request.arrive
        if arrive is not None and request.role == "sample":
            self._num_asked += arrive.prompt_tokens + admit.generated
            self._num_found += admit.cached


def _asked(request: RequestTimeline) -> int:
    """Return how many tokens a sample was last admitted with."""
    if request.arrive is None or request.role != "sample":
        return 0
    return request.arrive.prompt_tokens + request.admissions[-1].event.generated


MARK_SECONDS = {"ended": 0.0, "admitted": 0.5, "preempted": 3.0, "failed": 5.0}
"""How long it is to be seen at a slot what has happened there."""
NOTE_SECONDS = 10.0
MAX_NOTED = 16
MAX_NEWEST = 8


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
    return list(islice((end for end in ends if end.reason not in FAILURES), MAX_NEWEST))
