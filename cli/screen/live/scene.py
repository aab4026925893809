"""All that one picture of a run shows, so that every part of it is drawn from the same thing."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from batcher.events import FinishEvent, Role

from ..cells import printable
from .facts import GaugeReading, Moment, RunPlan
from .slots import SlotState
from .state import Note, RunState
from .strips import Strips
from .theme import Glyphs, Line, bar

PHASES: dict[Role, str] = {"sample": "decode", "beam": "beam", "negative": "partner"}
"""What a row does after its prefill."""
NOBODY = "-"


@dataclass
class Scene:
    """A run as it stands.

    marks: what has happened of late in each slot.  notes: what nobody should miss, newest first.
    ends: who has ended of late, newest first.
    busy: the share of the slots that was used, from frame to frame.
    """

    run: RunState
    plan: RunPlan
    gauges: GaugeReading
    glyphs: Glyphs
    strips: Strips
    moment: Moment
    marks: Sequence[str]
    notes: Sequence[Note]
    ends: Sequence[FinishEvent]
    busy: deque[float]

    @property
    def has_unicode(self) -> bool:
        """Whether more than ASCII can be shown."""
        return bool(self.glyphs.dots)

    def name(self, text: str) -> str:
        """Return `text`, somebody's id, safe to print; `?` is what cannot be shown."""
        name = printable(text)
        return name if self.has_unicode else name.encode("ascii", "replace").decode("ascii")

    def is_busy(self, slot: SlotState) -> bool:
        """Return whether `slot` was used in the last step."""
        return slot.is_busy(self.moment.step)

    def request(self, slot: SlotState) -> str:
        """Return what the sequence in `slot` is called."""
        return self.name(slot.label) if self.is_busy(slot) else NOBODY

    def phase(self, slot: SlotState) -> str:
        """Return prefill, then what it does; in the step that ended it, why it ended."""
        if not self.is_busy(slot):
            return "idle"
        if slot.outcome is not None:
            return slot.outcome
        return "prefill" if slot.is_prefilling(self.moment.step) else PHASES[slot.role]

    def progress(self, slot: SlotState) -> str:
        """Return the tokens generated, of how many at most; nothing where none are."""
        if not self.is_busy(slot) or not slot.max_tokens:
            return ""
        return f"{slot.tokens_after(self.moment.step)}/{slot.max_tokens}"

    def share(self, slot: SlotState) -> float:
        """Return how much of its max_tokens the sequence in `slot` has generated, of 1."""
        if not self.is_busy(slot) or not slot.max_tokens:
            return 0.0
        return slot.tokens_after(self.moment.step) / slot.max_tokens

    def bar(self, slot: SlotState, width: int) -> Line:
        """Return the bar of the sequence in `slot`; blank where nobody is."""
        if not self.is_busy(slot):
            return [(" " * width, "")]
        style = "prefill" if slot.is_prefilling(self.moment.step) else "bar"
        return bar(self.share(slot), width, self.glyphs, style)


def phase_style(phase: str) -> str:
    """Return the style of a phase, or of a reason for an end."""
    if phase in ("beam", "partner"):
        return "decode"
    if phase in ("error", "aborted"):
        return "failed"
    return "stop" if phase in ("length", "unused") else phase
