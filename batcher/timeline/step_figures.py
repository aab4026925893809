"""What each step of a run computed and when it was, as far as its events tell.

Rule: a step whose time no event tells lasts as long as the one before it, 1.0 if there is none.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from operator import add

from batcher.errors import InvariantError
from batcher.events import StepsEvent

STEP_SECONDS = 1.0


class StepFigures:
    """The figures of the steps 0, 1, ... up to where StepsEvents tell them: arrays by step.

    ends: when each ended, in seconds.  tokens: how many it computed.  decodes: how many of these
    were the next ones of rows that generate.  blocks: how many were held.  known_steps: those whose
    start events tell.
    """

    def __init__(self) -> None:
        self.ends = array("d")
        self.tokens, self.decodes, self.blocks = array("q"), array("q"), array("q")
        self.known_steps = array("q")
        self._known_starts = array("d")

    def note_start(self, step: int, time: float) -> None:
        """Take note of when `step`, no earlier than all that are known, began."""
        if not self.known_steps or step > self.known_steps[-1]:
            self.known_steps.append(step)
            self._known_starts.append(time)

    def add(self, event: StepsEvent) -> None:
        """Take in the figures of the next steps.

        Raises:
            InvariantError: they are of other steps, not whole, or time goes back.
        """
        lengths = {
            len(event.ends),
            len(event.decodes),
            len(event.prefills),
            len(event.rows),
            len(event.blocks),
        }
        if event.step != len(self.ends):
            raise InvariantError(
                f"figures of the steps from {event.step} on follow those of {len(self.ends)} steps"
            )
        if len(lengths) != 1:
            raise InvariantError(f"the figures of the steps from {event.step} on are not whole")
        times = [*self.ends[-1:], *event.ends]
        if times != sorted(times):
            raise InvariantError(f"time goes back in the steps from {event.step} on")
        try:
            self.tokens.extend(map(add, event.decodes, event.prefills))
            self.decodes.extend(event.decodes)
            self.blocks.extend(event.blocks)
        except OverflowError:
            raise InvariantError(
                f"no step can have the figures of the steps from {event.step} on"
            ) from None
        self.ends.extend(event.ends)

    def start_of(self, step: int) -> float:
        """Return when `step` began, or would have; in seconds."""
        number = bisect_right(self.known_steps, step) - 1
        known_step = self.known_steps[number] if number >= 0 else 0
        known_start = self._known_starts[number] if number >= 0 else 0.0
        if known_step == step or not step:
            return known_start
        if step <= len(self.ends):
            return self.ends[step - 1]
        if known_step < len(self.ends):
            known_step, known_start = len(self.ends), self.ends[-1]
        likely = known_start + (step - known_step) * self._usual_duration()
        return min([likely, *self._known_starts[number + 1 : number + 2]])

    def end_of(self, step: int) -> float:
        """Return when `step` ended; in seconds."""
        if step < len(self.ends):
            return self.ends[step]
        return min(self.start_of(step) + self._usual_duration(), self.start_of(step + 1))

    def is_standstill(self, step: int) -> bool:
        """Return whether rows that generate had no token in `step`, which computed prompts."""
        return step < len(self.decodes) and not self.decodes[step]

    def standstill_changes(self, steps: range) -> Iterator[int]:
        """Yield those of `steps` from which on rows that generate stand still, or do no longer."""
        for step in range(max(steps.start, 1), min(steps.stop, len(self.decodes) + 1)):
            if self.is_standstill(step) != self.is_standstill(step - 1):
                yield step

    def _usual_duration(self) -> float:
        """Return how long the last step lasted that has figures, in seconds."""
        last = len(self.ends) - 1
        return self.ends[last] - self.start_of(last) if self.ends else STEP_SECONDS
