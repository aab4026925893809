"""What each step of a run computed and when it was, as far as its events tell.

Rule: a step whose time no event tells lasts as long as the one before it, 1.0 if there is none.
"""

from bisect import bisect_right
from operator import add

from batcher.errors import InvariantError
from batcher.events import StepsEvent

STEP_SECONDS = 1.0


class StepFigures:
    """The figures of the steps 0, 1, ... up to where StepsEvents tell them: lists by step.

    ends: when each ended, in seconds.  tokens: how many it computed.  decodes: how many of these
    were the next ones of rows that generate.  blocks: how many were held.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.tokens: list[int] = []
        self.decodes: list[int] = []
        self.blocks: list[int] = []
        self._known_steps: list[int] = []  # those whose start is known, ascending
        self._known_starts: list[float] = []

    def note_start(self, step: int, time: float) -> None:
        """Take note of when `step`, no earlier than all that are known, began."""
        if not self._known_steps or step > self._known_steps[-1]:
            self._known_steps.append(step)
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
        self.ends += event.ends
        self.tokens += map(add, event.decodes, event.prefills)
        self.decodes += event.decodes
        self.blocks += event.blocks

    def start_of(self, step: int) -> float:
        """Return when `step` began, or would have; in seconds."""
        number = bisect_right(self._known_steps, step) - 1
        known_step = self._known_steps[number] if number >= 0 else 0
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

    def _usual_duration(self) -> float:
        """Return how long the last step lasted that has figures, in seconds."""
        last = len(self.ends) - 1
        return self.ends[last] - self.start_of(last) if self.ends else STEP_SECONDS
