"""The scene of a recorded run after any of its steps: what a live view with a frame a step shows.

Rule: what is shown depends on the step alone, not on where one came from.  So what a view remembers
from frame to frame is made again from the NUM_WATCHED steps before.
"""

import gc
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from batcher.events import RestartEvent
from batcher.trace.timeline import MAX_STEPS

from ...screen.live import MAX_TREND, NUM_SAMPLES
from ...screen.live_picture import MAX_CELLS, Scene, Strips
from ...screen.live_state import Lately, Mark, Moment, SlotState, newest_ends
from ...screen.theme import Glyphs
from ...screen.view import GaugeReading, HeldBlocks, RunPlan
from .recording import Recording

NUM_WATCHED = MAX_CELLS
"""More steps than any mark or note is shown for, and as many as a strip has cells."""
SECONDS_PER_STEP = 0.125
"""Marks and notes are shown for as long as in a live view that makes a step in this time."""


class StepStrips(Strips):
    """Strips with a cell for each step after `step`, for which nobody looks at slots at rest."""

    def __init__(self, slots: Sequence[SlotState], glyphs: Glyphs, step: int) -> None:
        super().__init__(slots, glyphs)
        self.steps.append(step + 1)
        self.steps.popleft()
        self._until = [step + 1] * len(slots)  # up to which step each has its cells
        self._admitted = [slot.num_admitted for slot in slots]
        self._at_rest = [self._resting(slot) for slot in slots]

    def watch(self, step: int, marks: Mapping[int, Mark]) -> None:
        """Add `step`, with what has happened in the slots in which something has."""
        self.steps.append(step + 1)
        for number, mark in marks.items():
            slot, before = self._slots[number], self._admitted[number]
            admitted = self._admitted[number] = slot.num_admitted
            self._fill(number, step)
            share = float(slot.is_busy(step))
            self.cells[number] += self._cell(slot, mark, share, admitted - before, step)
            self._until[number] = step + 1
            self._at_rest[number] = self._resting(slot)

    def fill(self) -> None:
        """Complete the cells of all slots."""
        for number in range(len(self.cells)):
            self._fill(number, self.steps[-1])

    def _fill(self, number: int, until: int) -> None:
        """Add the cells of a slot in which nothing has happened since the last of them."""
        more = self._at_rest[number] * (until - self._until[number])
        self.cells[number] = (self.cells[number] + more)[-self._max_cells :]
        self._until[number] = until

    def _resting(self, slot: SlotState) -> str:
        """Return the cell of each step from the next one on in which nothing happens."""
        return self._cell(slot, "", float(slot.end is None), 0, self.steps[-1])


class Playback:
    """Shows a recording; `scene` is that of `step`, once one was sought.

    glyphs: what it is drawn with.
    """

    def __init__(self, recording: Recording, title: str, glyphs: Glyphs) -> None:
        run = recording.timeline.run
        self.recording, self.step = recording, -1
        blocks = run.scheduling.get("kv_blocks")
        self._num_blocks = blocks if blocks is None else blocks * run.workers
        self._has_blocks = self._num_blocks is not None or any(recording.timeline.figures.blocks)
        plan = RunPlan(
            title,
            run.policy,
            recording.timeline.num_slots,
            recording.num_requests,
            is_timed=bool(run.step_time),
            num_workers=run.workers,
        )
        self._state = recording.state_before(0)
        self._told = recording.events_from(0)
        self._ahead = next(self._told, None)
        self._held = set[int]()  # the slots that are, after the step
        self._lately = Lately(recording.timeline.num_slots)
        self._samples: deque[tuple[int, int]] = deque(maxlen=NUM_SAMPLES + 1)  # step and tokens
        self._strips = StepStrips(self._state.slots, glyphs, -1)
        self.scene = Scene(
            self._state,
            plan,
            GaugeReading(0.0, recording.timeline.num_slots, None, None),
            glyphs,
            self._strips,
            Moment(-1, 0, 0.0, None, None),
            marks=[],
            notes=[],
            ends=[],
            busy=deque(maxlen=MAX_TREND),
            queued=deque(maxlen=MAX_TREND),
            depths=recording.depths,
        )
        self._begin(0)

    @property
    def last_step(self) -> int:
        """The last step of the run."""
        return self.recording.num_steps - 1

    def seek(self, step: int) -> Scene:
        """Return the scene after `step`, one of the run; the one before it is gone."""
        first = max(step - NUM_WATCHED + 1, 0)
        with _nothing_collected():
            if not first <= self.step + 1 <= step + 1:
                chapter = self.recording.chapter_before(first)
                if not self.recording.step_of(chapter) <= self.step + 1 <= first:
                    self._state = self.recording.state_before(chapter)
                    self._told = self.recording.events_from(chapter)
                    self._ahead = next(self._told, None)
                self._take_before(first)
                self._begin(first)
            while self.step < step:
                self._watch(self.step + 1, is_sampled=self.step + 1 >= step - NUM_SAMPLES)
        self._look()
        return self.scene

    def _take_before(self, step: int) -> set[int]:
        """Take in what was told with the steps before `step`; return the slots it was about."""
        slots = set[int]()
        while self._ahead is not None and self._ahead[0] < step:
            for event in self._ahead[1]:
                self._state.fold.take(event)
                slot = getattr(event, "slot", None)
                if slot is not None:
                    slots.add(slot)
                elif isinstance(event, RestartEvent):
                    batch = self.recording.timeline.run.batch
                    first = (event.worker or 0) * batch
                    slots.update(range(first, first + batch))
            self._state.keep_up()
            self._ahead = next(self._told, None)
        self._state.catch_up()
        return slots

    def _begin(self, step: int) -> None:
        """Remember nothing of the steps before `step`."""
        state, scene = self._state, self.scene
        self.step = step - 1
        state.notes.clear()
        for slot in state.slots:
            slot.take_mark()
        self._held = {number for number, slot in enumerate(state.slots) if slot.end is None}
        self._samples.clear()
        self._samples.append((self.step, state.num_tokens(self.step)))
        self._lately = Lately(len(state.slots))
        self._strips = StepStrips(state.slots, scene.glyphs, self.step)
        scene.run, scene.marks, scene.strips = state, self._lately.marks, self._strips
        scene.busy.clear()
        scene.queued.clear()

    def _watch(self, step: int, *, is_sampled: bool) -> None:
        """Take in the next step."""
        self.step, state = step, self._state
        touched = self._take_before(MAX_STEPS if step == self.last_step else step + 1)
        marks = {number: state.slots[number].take_mark() for number in touched}
        self._strips.watch(step, marks)
        num_busy = len(self._held - touched) + sum(state.slots[n].is_busy(step) for n in touched)
        self._held -= touched
        self._held |= {number for number in touched if state.slots[number].end is None}
        self.scene.busy.append(num_busy / len(state.slots))
        self.scene.queued.append(self.recording.depths.at(step))
        self._lately.take(state, marks, step * SECONDS_PER_STEP)
        if is_sampled:
            self._samples.append((step, state.num_tokens(step)))

    def _look(self) -> None:
        """Let the scene be how things stand after the last step."""
        scene, state, step = self.scene, self._state, self.step
        self._strips.fill()
        scene.notes = self._lately.notes(step * SECONDS_PER_STEP)
        scene.ends = newest_ends(state)
        (first_step, first_tokens), (_, num_tokens) = self._samples[0], self._samples[-1]
        num_new, speed = num_tokens - first_tokens, None
        if scene.plan.is_timed:
            speed = num_new / max(self._end_of(step) - self._end_of(first_step), 1e-9)
        rate = num_new / max(1, step - first_step)
        scene.moment = Moment(step, num_tokens, rate, speed, None)
        scene.gauges = self._read_gauges()

    def _read_gauges(self) -> GaugeReading:
        """Return what the trace tells of what events do not tell a live view."""
        step, blocks = self.step, self.recording.timeline.figures.blocks
        num_free = len(self._state.slots) - len(self._held)
        use = None
        if self._has_blocks and step < len(blocks):
            free = None if self._num_blocks is None else self._num_blocks - blocks[step]
            use = HeldBlocks(blocks[step], free)
        queue = self.recording.depths.at(step), self.recording.num_coming(step)
        next_up, found = None, self.recording.admission_after(step)
        if found is not None and found.waits_from <= step:
            next_up = found.label if found.step == step + 1 or not num_free else None
        return GaugeReading(self._end_of(step), num_free, next_up, use, *queue)

    def _end_of(self, step: int) -> float:
        """Return when `step` ended, in seconds; -1 is before the first."""
        return self.recording.timeline.figures.end_of(step) if step >= 0 else 0.0


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Make what lives on without looking for garbage in it: of 200,000 that wait it is half."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
