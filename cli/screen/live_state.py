"""What a run looks like now, kept from its events alone: nothing here is done per step."""

from collections import deque
from collections.abc import Iterable, Iterator

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    DropEvent,
    FinishEvent,
    HoldEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    RejectEvent,
    RequestEvent,
    Role,
    StepsEvent,
)
from batcher.timeline.stays import is_follower, label_of

MAX_STRIP = 256
"""The most steps a strip shows, so the most spans a slot has to remember."""
MAX_LABEL = 200
"""The most of an id that is kept; a column shows less of it."""


class SlotState:
    """A slot's newest sequence, and the spans of steps it served before.

    label: what the sequence is called, without its middle if that is very long.
    first_token: the step that gave its first token in this slot; None while there is none.
    end: the step after its last one; None while it holds the slot.
    max_tokens: 0 for a negative prompt, which generates none.
    num_extra: how many tokens it has beside one for each step from its first token on: those it
    brought along and those that were forced, less the steps in which it stood still.
    outcome: why it ended; None while it has not.
    num_admitted: how many sequences the slot has served, the newest included.
    """

    __slots__ = (
        "admitted",
        "end",
        "first_token",
        "label",
        "max_tokens",
        "num_admitted",
        "num_extra",
        "num_tokens",
        "outcome",
        "role",
        "spans",
    )

    def __init__(self) -> None:
        self.label = ""
        self.admitted = 0
        self.end: int | None = 0
        self.first_token: int | None = None
        self.max_tokens = self.num_tokens = self.num_extra = self.num_admitted = 0
        self.role: Role = "sample"
        self.outcome: str | None = None
        self.spans: deque[tuple[int, int]] = deque(maxlen=MAX_STRIP)

    def admit(self, event: AdmitEvent, max_tokens: int) -> None:
        """Let the sequence of `event` take over the slot."""
        if self.num_admitted and self.end is not None:
            self.spans.append((self.admitted, self.end))
        self.num_admitted += 1
        self.admitted, self.max_tokens = event.step, max_tokens
        self.num_extra, self.role = event.generated, event.role
        self.first_token = None if event.left else event.step
        self.label = label = label_of(event.id, event.index, event.role)
        if len(label) > MAX_LABEL:
            self.label = label[: MAX_LABEL // 2] + label[-MAX_LABEL // 2 :]
        self.end = self.outcome = None

    def finish(self, event: FinishEvent) -> None:
        """Let the sequence leave the slot.

        A beam has made as many tokens as it had steps, whatever it passes on as a result.
        """
        if event.role == "beam":
            self.num_tokens = self.tokens_after(event.step)
        else:
            self.num_tokens = event.tokens
        self.end, self.outcome = event.step + 1, event.reason

    def prefill(self, event: PrefillEvent) -> None:
        """Take in that a step computed what the sequence begins with, or what was forced on it."""
        if self.first_token is not None:
            self.num_extra -= event.left > 0  # a step without a token
        elif not event.left:
            self.first_token = event.step

    def preempt(self, event: PreemptEvent) -> None:
        """Let the sequence leave the slot for the queue."""
        self.num_tokens = event.generated
        self.end, self.outcome = event.step, "preempted"

    def is_prefilling(self, step: int) -> bool:
        """Return whether the newest sequence has no more than its first token after `step`."""
        return self.first_token is None or self.first_token >= step

    def is_busy(self, step: int) -> bool:
        """Return whether the slot was used in `step`, the last one made."""
        return self.end is None or self.end > step

    def tokens_after(self, step: int) -> int:
        """Return how many tokens the newest sequence has after `step`."""
        if self.end is not None:
            return self.num_tokens
        if self.role == "negative":
            return 0
        num_steps = 0 if self.first_token is None else step - self.first_token + 1
        return num_steps + self.num_extra

    def newest_spans(self, step: int) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of the spans up to `step`, end exclusive, the newest first."""
        if self.num_admitted:
            yield self.admitted, step + 1 if self.end is None else self.end
        yield from reversed(self.spans)


class RunState:
    """The slots of a run, and how many requests are done and outputs failed.

    held: what holds back the first of the queue; None if nothing does.
    """

    def __init__(self, batch_size: int) -> None:
        self.slots = [SlotState() for _ in range(batch_size)]
        self.num_done = self.num_failed = 0
        self.held: HoldEvent | None = None
        # By id and index: of what waits, and of beams while they run.
        self._max_tokens: dict[tuple[str, int], int] = {}
        self._num_others: dict[str, int] = {}  # samples of a request that end before its last
        # By id, index and role: the tokens of those that were preempted and are not back.
        self._preempted: dict[tuple[str, int, Role], int] = {}
        self._num_finished_tokens = 0

    def observe(self, events: Iterable[RequestEvent]) -> None:
        """Take in what happened, in the order it did."""
        for event in events:  # no `match`: it takes twice as long
            if type(event) is ArriveEvent:
                if event.index:
                    self._num_others[event.id] = self._num_others.get(event.id, 0) + 1
                self._max_tokens[event.id, event.index] = event.max_tokens
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
            case HoldEvent():
                self.held = event
            case StepsEvent():
                self._note_standstills(event)
            case RejectEvent():
                self.num_done += 1
                self.num_failed += 1
            case DropEvent():
                self.num_failed -= event.reason == "error"
            case _:
                pass

    def num_tokens(self, step: int) -> int:
        """Return how many tokens the run has generated after `step`, those of all beams counted."""
        running = (slot.tokens_after(step) for slot in self.slots if slot.end is None)
        return self._num_finished_tokens + sum(self._preempted.values()) + sum(running)

    def num_busy(self, step: int) -> int:
        """Return how many slots were used in `step`."""
        return sum(slot.is_busy(step) for slot in self.slots)

    def _release(self, event: AdmitEvent | FinishEvent) -> None:
        """Forget what held back the sequence, which waits no more."""
        if self.held is not None and self.held.id == event.id and self.held.index == event.index:
            self.held = None

    def _admit(self, event: AdmitEvent) -> None:
        self._release(event)
        if self._preempted:
            self._preempted.pop((event.id, event.index, event.role), None)
        if event.role == "sample":
            max_tokens = self._max_tokens.pop((event.id, event.index))
        else:  # beams share what has arrived, and negative prompts generate nothing
            max_tokens = self._max_tokens[event.id, 0] if event.role == "beam" else 0
        self.slots[event.slot].admit(event, max_tokens)

    def _preempt(self, event: PreemptEvent) -> None:
        slot = self.slots[event.slot]
        if event.role == "sample":
            self._max_tokens[event.id, event.index] = slot.max_tokens
        self._preempted[event.id, event.index, event.role] = event.generated
        slot.preempt(event)

    def _note_standstills(self, event: StepsEvent) -> None:
        """Take back the tokens that rows did not get in the steps that computed prompts alone."""
        for step, num_decodes in enumerate(event.decodes, event.step):
            if num_decodes:
                continue
            for slot in self.slots:
                if slot.end is None and slot.first_token is not None and slot.first_token < step:
                    slot.num_extra -= 1

    def _finish(self, event: FinishEvent) -> None:
        self._release(event)
        self.num_failed += event.reason == "error"
        num_kept = self._preempted.pop((event.id, event.index, event.role), None)
        has_arrived = event.slot is not None and num_kept is None
        if num_kept is not None:
            self._num_finished_tokens += num_kept
        elif event.slot is not None:
            slot = self.slots[event.slot]
            slot.finish(event)
            self._num_finished_tokens += slot.num_tokens
        if event.role == "beam" or not has_arrived:
            has_arrived |= self._max_tokens.pop((event.id, event.index), None) is not None
        if event.role == "sample" or not is_follower(event):
            if self._num_others.get(event.id):
                self._note_other_sample(event.id)
            elif has_arrived or event.index == 0:  # of what never arrived, the first stands for all
                self.num_done += 1

    def _note_other_sample(self, request_id: str) -> None:
        """Count one sample less that ends before the last of its request."""
        self._num_others[request_id] -= 1
        if not self._num_others[request_id]:
            del self._num_others[request_id]
