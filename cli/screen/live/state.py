"""What a run looks like now, kept from its events alone: nothing here is done per step."""

from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

from msgspec.structs import replace

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    DropEvent,
    FinishEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    RejectEvent,
    RequestEvent,
    Role,
    StepsEvent,
)
from batcher.timeline.records import is_follower, label_of

from .history import RunHistory
from .slots import SlotState

MAX_NOTES = 64
"""The most notes that are kept until somebody asks for them."""
MAX_ENDS = 8
"""The most ends that are kept."""
FAILED = ("error", "aborted")


class Note(NamedTuple):
    """Something that nobody should miss: what happened to which sequence."""

    kind: Literal["preempted", "failed"]
    label: str
    what: str


class RunState:
    """The slots of a run, and what has become of the requests so far.

    num_done: requests that came to an end, num_failed: outputs that failed.
    num_preempted: how often a sequence lost its slot, its companions not counted.
    num_asked, num_found: tokens that sequences were admitted with, and those found in blocks.
    held: what holds back the first of the queue; None if nothing does.
    notes: the newest of what nobody should miss; whoever shows them takes them out.
    ends: the sequences that ended last.
    history: the whole run, in little.
    """

    def __init__(self, batch_size: int) -> None:
        self.slots = [SlotState() for _ in range(batch_size)]
        self.num_done = self.num_failed = self.num_preempted = 0
        self.num_asked = self.num_found = 0
        self.held: BlockedEvent | None = None
        self.notes: deque[Note] = deque(maxlen=MAX_NOTES)
        self.ends: deque[FinishEvent] = deque(maxlen=MAX_ENDS)
        self.history = RunHistory(batch_size)
        # By id and index: of what waits, and of beams while they run.
        self._arrived: dict[tuple[str, int], ArriveEvent] = {}
        self._num_others: dict[str, int] = {}  # samples of a request that end before its last
        # By id, index and role: the tokens of those that were preempted and are not back.
        self._preempted: dict[tuple[str, int, Role], int] = {}
        self._num_finished_tokens = self._num_finished_max = 0
        self._num_arrived = self._num_arrived_max = 0

    def observe(self, events: Iterable[RequestEvent]) -> None:
        """Take in what happened, in the order it did."""
        for event in events:  # no `match`: it takes twice as long
            if type(event) is ArriveEvent:
                if event.index:
                    self._num_others[event.id] = self._num_others.get(event.id, 0) + 1
                self._arrived[event.id, event.index] = event
                self._num_arrived += 1
                self._num_arrived_max += event.max_tokens
            elif type(event) is AdmitEvent:
                self._admit(event)
            elif type(event) is FinishEvent:
                self._finish(event)
            else:
                self._observe_rare(event)

    def _observe_rare(self, event: RequestEvent) -> None:
        """Take in an event of a kind that is rare."""
        match event:
            case JumpEvent():
                self.slots[event.slot].num_extra += event.tokens
            case PrefillEvent():
                self.slots[event.slot].prefill(event)
            case PreemptEvent():
                self._preempt(event)
            case BlockedEvent():
                self.held = event
            case StepsEvent():
                self._note_standstills(event)
            case RejectEvent():
                self.num_done += 1
                self.num_failed += 1
                self.notes.append(Note("failed", event.id, f"failed: {event.reason}"))
            case DropEvent():
                self.num_failed -= event.reason == "error"
            case _:
                pass

    def num_tokens(self, step: int) -> int:
        """Return how many tokens the run has generated after `step`, those of all beams counted."""
        running = (slot.tokens_after(step) for slot in self.slots if slot.end is None)
        return self._num_finished_tokens + sum(self._preempted.values()) + sum(running)

    def num_tokens_left(self, step: int, num_queued: int) -> float:
        """Return how many tokens are probably to come after `step`, with `num_queued` waiting.

        As much of max_tokens is taken to be used as was by those that ended; those that run count
        as if they used all of it, or the short ones, which end first, would speak for all.
        """
        running = [slot for slot in self.slots if slot.end is None]
        running_max = sum(slot.max_tokens for slot in running)
        known = self._num_finished_max + running_max
        used = (self._num_finished_tokens + running_max) / known if known else 1.0
        usual = self._num_arrived_max / self._num_arrived if self._num_arrived else 0.0
        left = sum(max(slot.max_tokens * used - slot.tokens_after(step), 0.0) for slot in running)
        return left + max(num_queued * usual * used - sum(self._preempted.values()), 0.0)

    def num_busy(self, step: int) -> int:
        """Return how many slots were used in `step`."""
        return sum(slot.is_busy(step) for slot in self.slots)

    def open_stays(self) -> list[tuple[int, int]]:
        """Return the slots that are held and since when: the history does not know of them yet."""
        return [(n, slot.admitted) for n, slot in enumerate(self.slots) if slot.end is None]

    def _release(self, event: AdmitEvent | FinishEvent) -> None:
        """Forget what held back the sequence, which waits no more."""
        if self.held is not None and self.held.id == event.id and self.held.index == event.index:
            self.held = None

    def _admit(self, event: AdmitEvent) -> None:
        if self.held is not None:
            self._release(event)
        if self._preempted:
            self._preempted.pop((event.id, event.index, event.role), None)
        arrival: ArriveEvent | None = None  # as of a negative prompt, which asks for nothing
        if event.role == "sample":
            arrival = self._arrived.pop((event.id, event.index))
            self.num_asked += arrival.prompt_tokens + event.generated
            self.num_found += event.cached
        elif event.role == "beam":  # they share what has arrived
            arrival = self._arrived[event.id, 0]
        if arrival is not None and arrival.index == event.index and arrival.step < event.step:
            self.history.waited(arrival.step, event.step)
        self.slots[event.slot].admit(event, arrival)

    def _preempt(self, event: PreemptEvent) -> None:
        slot = self.slots[event.slot]
        if slot.arrival is not None and slot.arrival.index == event.index:
            waiting = replace(slot.arrival, step=event.step)  # from now on
            self._arrived[event.id, event.index] = waiting
        self._preempted[event.id, event.index, event.role] = event.generated
        self.history.held(event.slot, slot.admitted, event.step)
        slot.preempt(event)
        if event.role == "sample" or not is_follower(event):
            self.num_preempted += 1
            what = f"preempted for {label_of(event.for_id, event.for_index, 'sample')}"
            self.notes.append(Note("preempted", slot.label, what))

    def _note_standstills(self, event: StepsEvent) -> None:
        """Take back the tokens that rows did not get in the steps that computed prompts alone."""
        for step, num_decodes in enumerate(event.decodes, event.step):
            if num_decodes:
                continue
            for slot in self.slots:
                if slot.end is None and slot.first_token is not None and slot.first_token < step:
                    slot.num_extra -= 1

    def _finish(self, event: FinishEvent) -> None:
        if self.held is not None:
            self._release(event)
        if event.reason in FAILED:
            self.num_failed += event.reason == "error"
            label = label_of(event.id, event.index, event.role)
            what = "failed" if event.reason == "error" else event.reason
            self.notes.append(Note("failed", label, what))
        else:
            self.ends.append(event)
        num_kept = None
        if self._preempted:
            num_kept = self._preempted.pop((event.id, event.index, event.role), None)
        has_arrived = event.slot is not None and num_kept is None
        if num_kept is not None:
            self._num_finished_tokens += num_kept
        elif event.slot is not None:
            slot = self.slots[event.slot]
            slot.finish(event)
            self._num_finished_tokens += slot.num_tokens
            self._num_finished_max += slot.max_tokens
            self.history.held(event.slot, slot.admitted, event.step + 1)
        if event.role == "beam" or not has_arrived:
            has_arrived |= self._arrived.pop((event.id, event.index), None) is not None
        if event.role == "sample" or not is_follower(event):
            if self._num_others and self._num_others.get(event.id):
                self._note_other_sample(event.id)
            elif has_arrived or event.index == 0:  # of what never arrived, the first stands for all
                self.num_done += 1

    def _note_other_sample(self, request_id: str) -> None:
        """Count one sample less that ends before the last of its request."""
        self._num_others[request_id] -= 1
        if not self._num_others[request_id]:
            del self._num_others[request_id]
