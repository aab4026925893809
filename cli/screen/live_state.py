"""What a run looks like now, kept from its events alone: nothing here is done per step."""

from collections import deque
from collections.abc import Iterable, Iterator

from batcher.events import AdmitEvent, ArriveEvent, FinishEvent, RequestEvent

MAX_STRIP = 256
"""The most steps a strip shows, so the most spans a slot has to remember."""
MAX_LABEL = 200
"""The most of an id that is kept; a column shows less of it."""


class SlotState:
    """A slot's newest request, and the spans of steps it served before.

    label: the request's id, without its middle if that is very long.
    end: the step after the request's last one; None while it holds the slot.
    outcome: why it ended; None while it has not.
    num_admitted: how many requests the slot has served, the newest included.
    """

    __slots__ = (
        "admitted",
        "end",
        "label",
        "max_tokens",
        "num_admitted",
        "num_tokens",
        "outcome",
        "spans",
    )

    def __init__(self) -> None:
        self.label = ""
        self.admitted = 0
        self.end: int | None = 0
        self.max_tokens = self.num_tokens = self.num_admitted = 0
        self.outcome: str | None = None
        self.spans: deque[tuple[int, int]] = deque(maxlen=MAX_STRIP)

    def admit(self, event: AdmitEvent, max_tokens: int) -> None:
        """Let the request of `event` take over the slot."""
        if self.num_admitted and self.end is not None:
            self.spans.append((self.admitted, self.end))
        self.num_admitted += 1
        self.admitted, self.max_tokens = event.step, max_tokens
        self.label = label = event.id
        if len(label) > MAX_LABEL:
            self.label = label[: MAX_LABEL // 2] + label[-MAX_LABEL // 2 :]
        self.end = self.outcome = None

    def is_busy(self, step: int) -> bool:
        """Return whether the slot was used in `step`, the last one made."""
        return self.end is None or self.end > step

    def tokens_after(self, step: int) -> int:
        """Return how many tokens the newest request has after `step`, one for each of its steps."""
        return step - self.admitted + 1 if self.end is None else self.num_tokens

    def newest_spans(self, step: int) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of the spans up to `step`, end exclusive, the newest first."""
        if self.num_admitted:
            yield self.admitted, step + 1 if self.end is None else self.end
        yield from reversed(self.spans)


class RunState:
    """The slots and the counts of a run."""

    def __init__(self, batch_size: int) -> None:
        self.slots = [SlotState() for _ in range(batch_size)]
        self.num_done = self.num_failed = 0
        self._max_tokens: dict[int, int] = {}  # of requests that wait, by index
        self._num_finished_tokens = 0

    def observe(self, events: Iterable[RequestEvent]) -> None:
        """Take in what happened, in the order it did."""
        for event in events:  # no `match`: it takes twice as long
            if type(event) is ArriveEvent:
                self._max_tokens[event.index] = event.max_tokens
            elif type(event) is AdmitEvent:
                self.slots[event.slot].admit(event, self._max_tokens.pop(event.index))
            elif type(event) is FinishEvent:
                self._finish(event)
            else:
                self.num_done += 1
                self.num_failed += 1

    def num_tokens(self, step: int) -> int:
        """Return how many tokens the run has generated after `step`."""
        running = (slot for slot in self.slots if slot.end is None)
        return self._num_finished_tokens + sum(step + 1 - slot.admitted for slot in running)

    def num_busy(self, step: int) -> int:
        """Return how many slots were used in `step`."""
        return sum(slot.is_busy(step) for slot in self.slots)

    def _finish(self, event: FinishEvent) -> None:
        self.num_done += 1
        self.num_failed += event.reason == "error"
        if event.slot is None:
            self._max_tokens.pop(event.index, None)
            return
        slot, num_tokens = self.slots[event.slot], event.tokens
        slot.end, slot.outcome, slot.num_tokens = event.step + 1, event.reason, num_tokens
        self._num_finished_tokens += num_tokens
