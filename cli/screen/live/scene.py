"""All that one picture of a run shows, so that every part of it is drawn from the same thing.

Rule: a cell of a strip stands for all steps since the frame before, so what is drawn has all been
looked at.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from batcher.events import FinishEvent, Role

from ..cells import printable
from ..view import GaugeReading, RunPlan
from .facts import Moment
from .history import QueueDepths
from .slots import SlotState
from .state import Note, RunState
from .theme import HUES, Glyphs, Line, Part, bar, hue_of, shade

PHASES: dict[Role, str] = {"sample": "decode", "beam": "beam", "negative": "partner"}
"""What a row does after its prefill."""
NOBODY = "-"
MAX_CELLS = 256
"""The most cells a strip has."""
MAX_ALL_CELLS = 2**18
"""The most that all have together: of so many slots that this cuts them, few are ever seen."""
FIRST_IN_HUE = 0xE000  # private use
MANY = 2
"""So many admissions in a cell hide each other; it is shaded by how busy it was."""


class Strips:
    """What slots did between the last frames: a cell of text for each slot and each time between.

    cells: by slot.  steps: the first step of each cell, and the one after the last.
    parts: the glyph and the style of each character; it is the glyph, but for one of a request.
    """

    def __init__(self, slots: Sequence[SlotState], glyphs: Glyphs) -> None:
        self.cells = [""] * len(slots)
        self.steps: deque[int] = deque([0], maxlen=MAX_CELLS + 1)
        self._slots, self._glyphs = slots, glyphs
        self._max_cells = max(1, min(MAX_CELLS, MAX_ALL_CELLS // len(slots)))
        styles = {
            glyphs.marks["preempted"]: "preempted",
            glyphs.marks["failed"]: "failed",
            glyphs.admitted: "admitted",
            glyphs.nothing: "idle",
            **dict.fromkeys(glyphs.shades[:-1], "bubble"),
            glyphs.shades[-1]: "bar",
        }
        self.parts: dict[str, Part] = {glyph: (glyph, style) for glyph, style in styles.items()}
        self._in_hue: dict[Part, str] = {}
        for hue in HUES:
            for glyph in (*glyphs.turns, glyphs.prefill):
                cell = chr(FIRST_IN_HUE + len(self._in_hue))
                self.parts[cell], self._in_hue[glyph, hue] = (glyph, hue), cell
        self._before = [(0, 0, 0)] * len(slots)  # steps, steps busy and sequences admitted

    def extend(self, step: int, marks: Sequence[str]) -> None:
        """Add a cell for the steps up to `step`; `marks`: what has happened in each slot."""
        num_steps = step + 1 - self.steps[-1]
        if num_steps <= 0:
            return
        self.steps.append(step + 1)
        for number, (slot, mark) in enumerate(zip(self._slots, marks, strict=True)):
            busy, admitted = slot.busy_steps(step), slot.num_admitted
            steps_before, busy_before, admitted_before = self._before[number]
            made = slot.own_step(step) + 1
            self._before[number] = made, busy, admitted
            num_made = made - steps_before  # by its worker, which may have made none
            share = (busy - busy_before) / num_made if num_made else slot.is_busy(step)
            cell = self._cell(slot, mark, share, admitted - admitted_before, step)
            self.cells[number] = (self.cells[number] + cell)[-self._max_cells :]

    def _cell(self, slot: SlotState, mark: str, share: float, admitted: int, step: int) -> str:
        """Return what stands for the steps up to `step`, in which so many were admitted."""
        glyphs = self._glyphs
        if mark in ("preempted", "failed"):
            return glyphs.marks[mark]
        if admitted >= MANY:
            return shade(share, glyphs)
        if admitted:
            return glyphs.admitted
        if 2 * share < 1:
            return glyphs.nothing
        if slot.has_long_prefill and slot.is_prefilling(step):
            return self._in_hue[glyphs.prefill, hue_of(slot.request.id)]
        return self._in_hue[glyphs.turns[(slot.num_admitted - 1) % 2], hue_of(slot.request.id)]


@dataclass
class Scene:
    """A run as it stands.

    marks: what has happened of late in each slot.  notes: what nobody should miss, newest first.
    ends: who has ended of late, newest first.
    busy: the share of the slots that was used, from frame to frame.
    queued: how long the queue was, from frame to frame; depths: in all of the run.
    found: the slot of whom a person has looked for.
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
    queued: deque[int] = field(default_factory=deque)
    depths: QueueDepths = field(default_factory=QueueDepths)
    found: int | None = None

    @property
    def has_unicode(self) -> bool:
        """Whether more than ASCII can be shown."""
        return bool(self.glyphs.dots)

    def name(self, text: str) -> str:
        """Return `text`, somebody's id, safe to print; `?` is what cannot be shown."""
        name = printable(text)
        return name if self.has_unicode else name.encode("ascii", "replace").decode("ascii")

    def is_busy(self, slot: SlotState) -> bool:
        """Return whether `slot` is used in the step that is shown."""
        return slot.is_busy(self.moment.slot_step)

    def request(self, slot: SlotState) -> str:
        """Return what the sequence in `slot` is called."""
        return self.name(slot.label) if self.is_busy(slot) else NOBODY

    def phase(self, slot: SlotState) -> str:
        """Return prefill, then what it does; in the step that ended it, why it ended."""
        if not self.is_busy(slot):
            return "idle"
        if slot.outcome is not None:
            return slot.outcome
        return "prefill" if slot.is_prefilling(self.moment.step) else PHASES[slot.request.role]

    def progress(self, slot: SlotState) -> str:
        """Return the tokens generated, of how many at most; nothing where none are."""
        most = slot.request.max_tokens if self.is_busy(slot) else 0
        return f"{slot.tokens_after(self.moment.step)}/{most}" if most else ""

    def drafts(self, slot: SlotState) -> str:
        """Return how many drafts the step that is shown accepted, of how many; "" without any."""
        found = slot.drafts_of(self.moment.slot_step)
        return f"{found.accepted}/{found.drafted}" if found is not None else ""

    def share(self, slot: SlotState) -> float:
        """Return how much of its max_tokens the sequence in `slot` has generated, of 1."""
        most = slot.request.max_tokens if self.is_busy(slot) else 0
        return slot.tokens_after(self.moment.step) / most if most else 0.0

    def bar(self, slot: SlotState, width: int) -> Line:
        """Return the bar of the sequence in `slot`; blank where nobody is."""
        if not self.is_busy(slot):
            return [(" " * width, "")]
        return bar(self.share(slot), width, self.glyphs, hue_of(slot.request.id))


def phase_style(phase: str) -> str:
    """Return the style of a phase, or of a reason for an end."""
    if phase in ("beam", "partner"):
        return "decode"
    if phase in ("error", "aborted", "lost"):
        return "failed"
    return "stop" if phase in ("length", "unused") else phase
