"""How many positions the steps of a run computed, and how many of them were padding.

Rule: what a step had the model compute counts, whatever came of it.
"""

from msgspec import Struct

from batcher.events import DraftEvent, Event, FinishEvent, JumpEvent, RunEvent, StepsEvent
from batcher.metrics.steps import is_untimed
from batcher.trace.records import AdmissionRecord, RequestTimeline

_NEVER = -1


class Positions(Struct, frozen=True, kw_only=True):
    """total: how many positions were computed.  padding: how many of them held no token."""

    total: int
    padding: int


class PositionCount:
    """Takes in what the events of a run say of its positions.

    Where a run tells of its steps, they say it.  In any other a sequence computes what it begins
    with in the step of its admission, and in every later one the token it was given last, with
    those that a constraint has forced behind it, and drafts.

    begun: what sequences began with and was not cached, less one for each: for the steps of their
    admissions.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._has_steps = self._is_padded = False
        self._told = self._padding = 0
        self._jumped = self._drafted = 0
        self._last_jumps: dict[tuple[str, int], tuple[int, int]] = {}  # the step, and the tokens

    def take(self, event: Event, found: RequestTimeline | None) -> None:
        """Take in an event that tells of `found`; of admissions and ends others are told."""
        match event:
            case RunEvent():
                self._is_padded = event.layout == "padded"
                self._has_steps = self._is_padded or not is_untimed(event)
            case StepsEvent():
                self._told += sum(event.decodes) + sum(event.prefills)
                self._padding += sum(event.prefill_padding) if self._is_padded else 0
            case DraftEvent():
                self._drafted += event.tokens
            case JumpEvent() if found is not None and found.admission is not None:
                self._jump(event, found, found.admission)
            case _:
                pass

    def _jump(self, event: JumpEvent, found: RequestTimeline, admission: AdmissionRecord) -> None:
        """Take in the tokens that a sequence computes in the next step."""
        admit = admission.event
        is_first = event.step == admit.step and event.tokens == admission.num_jumped
        if is_first and admit.tokens:
            return  # it began with them
        num_tokens = event.tokens * found.num_rows
        self._jumped += num_tokens
        self._last_jumps[event.id, event.index] = event.step, num_tokens

    def finish(self, event: FinishEvent) -> None:
        """Take in that a sequence has ended: what it was to compute next, it does not."""
        step, num_tokens = self._last_jumps.pop((event.id, event.index), (_NEVER, 0))
        if step == event.step:
            self._jumped -= num_tokens

    def positions(self, num_steps: int, busy_slot_steps: int) -> Positions:
        """Return what was computed in the first `num_steps`, in which slots were so busy."""
        if self._has_steps:
            return Positions(total=self._told + self._padding, padding=self._padding)
        pending = sum(n for step, n in self._last_jumps.values() if step + 1 >= num_steps)
        beside = self._jumped - pending + self._drafted
        return Positions(total=busy_slot_steps + self.begun + beside, padding=0)
