"""What a slot holds now, kept from events alone: nothing here is done per step."""

from typing import Literal

from batcher.events import AdmitEvent, ArriveEvent, FinishEvent, PreemptEvent, PrefillEvent, Role
from batcher.timeline.records import label_of

MAX_LABEL = 200
"""The most of an id that is kept; a column shows less of it."""

Mark = Literal["", "ended", "admitted", "preempted", "failed"]
"""What has happened in a slot; a later one of these hides those before it."""


class SlotState:
    """A slot's newest sequence, and how busy the slot was before it.

    name: the id, the index and the role of the sequence.
    arrival: what it asked for; None for a negative prompt, which asks for nothing.
    first_token: the step that gave its first token in this slot; None while there is none.
    end: the step after its last one; None while it holds the slot.
    max_tokens: 0 for a negative prompt, which generates none.
    num_extra: how many tokens it has beside one for each step from its first token on: those it
    brought along and those that were forced, less the steps in which it stood still.
    outcome: why it ended; None while it has not.
    num_admitted: how many sequences the slot has served, the newest included.
    num_steps: for how many steps those before the newest held the slot.
    mark: what has happened here since that was last asked for.
    """

    __slots__ = (
        "admitted",
        "arrival",
        "end",
        "first_token",
        "mark",
        "max_tokens",
        "name",
        "num_admitted",
        "num_extra",
        "num_steps",
        "num_tokens",
        "outcome",
    )

    def __init__(self) -> None:
        self.name: tuple[str, int, Role] = "", 0, "sample"
        self.arrival: ArriveEvent | None = None
        self.admitted = 0
        self.end: int | None = 0
        self.first_token: int | None = None
        self.max_tokens = self.num_tokens = self.num_extra = self.num_admitted = self.num_steps = 0
        self.outcome: str | None = None
        self.mark: Mark = ""

    def admit(self, event: AdmitEvent, arrival: ArriveEvent | None) -> None:
        """Let the sequence of `event` take over the slot; `arrival` says what it asked for."""
        if self.end is not None:
            self.num_steps += self.end - self.admitted
        self.num_admitted += 1
        self.admitted, self.arrival = event.step, arrival
        self.max_tokens = 0 if arrival is None else arrival.max_tokens
        self.num_extra = event.generated
        self.first_token = None if event.left else event.step
        self.name = event.id, event.index, event.role
        self.end = self.outcome = None
        if self.mark in ("", "ended"):
            self.mark = "admitted"

    @property
    def role(self) -> Role:
        """What the sequence is for."""
        return self.name[2]

    @property
    def label(self) -> str:
        """What the sequence is called, without its middle if that is very long."""
        label = label_of(*self.name)
        if len(label) > MAX_LABEL:
            return label[: MAX_LABEL // 2] + label[-MAX_LABEL // 2 :]
        return label

    def finish(self, event: FinishEvent) -> None:
        """Let the sequence leave the slot.

        A beam has made as many tokens as it had steps, whatever it passes on as a result.
        """
        if event.role == "beam":
            self.num_tokens = self.tokens_after(event.step)
        else:
            self.num_tokens = event.tokens
        self.end, self.outcome = event.step + 1, event.reason
        if event.reason in ("error", "aborted"):
            self.mark = "failed"
        elif not self.mark:
            self.mark = "ended"

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
        if self.mark != "failed":
            self.mark = "preempted"

    def take_mark(self) -> Mark:
        """Return what has happened here since the last call."""
        mark, self.mark = self.mark, ""
        return mark

    def is_prefilling(self, step: int) -> bool:
        """Return whether the newest sequence has no more than its first token after `step`."""
        return self.first_token is None or self.first_token >= step

    def is_busy(self, step: int) -> bool:
        """Return whether the slot was used in `step`, the last one made; -1 is before the first."""
        return self.end is None or self.end > max(step, 0)

    def busy_steps(self, step: int) -> int:
        """Return in how many steps up to `step` the slot was used."""
        return self.num_steps + (step + 1 if self.end is None else self.end) - self.admitted

    def tokens_after(self, step: int) -> int:
        """Return how many tokens the newest sequence has after `step`."""
        if self.end is not None:
            return self.num_tokens
        if self.role == "negative":
            return 0
        num_steps = 0 if self.first_token is None else step - self.first_token + 1
        return num_steps + self.num_extra
