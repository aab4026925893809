"""What a slot holds now, as it stands in the fold of the run's events."""

from typing import Literal

from batcher.trace.run import AdmissionRecord, RequestFold, RequestTimeline, StepDrafts
from batcher.trace.timeline import MAX_STEPS

MAX_LABEL = 200
"""The most of an id that is shown; a column shows less of it."""

NOBODY = RequestTimeline("", 0, "sample")

Mark = Literal["", "ended", "admitted", "preempted", "failed"]
"""What has happened in a slot; a later one of these hides those before it."""


class WorkerPace:
    """How far a worker is: `step` is the last that it has made; by default as far as the run."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = MAX_STEPS


class SlotState:
    """A slot's newest sequence, and how busy the slot was before it.

    Of the steps it is asked about, those count that its worker has made.
    name: its number, and of several workers which one it is of.
    num_left, num_steps: how many sequences have left the slot, and for how many steps they held it.
    mark: what has happened here since that was last asked for, but for an admission.
    """

    __slots__ = ("_fold", "_num_seen", "_number", "_pace", "mark", "name", "num_left", "num_steps")

    def __init__(self, number: int, fold: RequestFold, pace: WorkerPace, name: str) -> None:
        self._number, self._fold, self._pace, self.name = number, fold, pace, name
        self.num_left = self.num_steps = self._num_seen = 0
        self.mark: Mark = ""

    def own_step(self, step: int) -> int:
        """Return the last step that its worker has made by `step` of the run."""
        return min(step, self._pace.step)

    @property
    def request(self) -> RequestTimeline:
        """Its newest sequence; one that asks for nothing before the first."""
        return self._fold.slots.get(self._number, NOBODY)

    @property
    def _admission(self) -> AdmissionRecord | None:
        """How that came here; it may have gone on to another slot."""
        request = self._fold.slots.get(self._number, NOBODY)  # as below: asked in every frame
        for admission in reversed(request.admissions):
            if admission.event.slot == self._number:
                return admission
        return None

    @property
    def end(self) -> int | None:
        """The step after its last one here; None while it holds the slot."""
        admission = self._admission
        if admission is None:
            return 0
        if admission.preempt is not None:
            return admission.preempt.step
        finish = self._fold.slots[self._number].finish
        return None if finish is None else finish.step + 1

    @property
    def outcome(self) -> str | None:
        """Why it left the slot; None while it has not."""
        admission, finish = self._admission, self.request.finish
        if admission is not None and admission.preempt is not None:
            return "preempted"
        return None if finish is None else finish.reason

    @property
    def first_token(self) -> int | None:
        """The step that gave its first token here; None while there is none."""
        admission = self._admission
        return None if admission is None else admission.first_token

    @property
    def has_long_prefill(self) -> bool:
        """Whether it takes more than one step up to its first token, as far as is known."""
        admission = self._admission
        return admission is not None and admission.first_token != admission.event.step

    def drafts_of(self, step: int) -> StepDrafts | None:
        """Return the drafts that `step` verified for the newest sequence; None if there are none.

        Of the steps it has made, only the newest that had any is known.
        """
        admission, step = self._admission, self.own_step(step)
        drafts = None if admission is None else admission.drafts
        latest = None if drafts is None else drafts.latest
        return latest if latest is not None and latest.step == step else None

    @property
    def label(self) -> str:
        """What it is called, without the middle if that is very long."""
        label = self.request.label
        if len(label) > MAX_LABEL:
            return label[: MAX_LABEL // 2] + label[-MAX_LABEL // 2 :]
        return label

    @property
    def num_admitted(self) -> int:
        """How many sequences the slot has served, the newest included."""
        return self.num_left + (self.end is None)

    def take_mark(self) -> Mark:
        """Return what has happened here since the last call."""
        mark, self.mark = self.mark, ""
        num_seen, self._num_seen = self._num_seen, self.num_admitted
        is_hidden = mark in ("preempted", "failed")
        return "admitted" if self._num_seen > num_seen and not is_hidden else mark

    def is_prefilling(self, step: int) -> bool:
        """Return whether the newest sequence has no more than its first token after `step`."""
        first_token = self.first_token
        return first_token is None or first_token >= self.own_step(step)

    def is_busy(self, step: int) -> bool:
        """Return whether the slot was used in `step`, the last one made; -1 is before the first."""
        end = self.end
        return end is None or end > max(self.own_step(step), 0)

    def busy_steps(self, step: int) -> int:
        """Return in how many steps up to `step` the slot was used."""
        admission = self._admission
        if admission is None or self.end is not None:
            return self.num_steps
        return self.num_steps + self.own_step(step) + 1 - admission.event.step

    def tokens_after(self, step: int) -> int:
        """Return how many tokens the newest sequence has after `step`."""
        admission = self._admission
        lost = None if admission is None else admission.preempt
        return self.request.tokens_after(self.own_step(step)) if lost is None else lost.generated
