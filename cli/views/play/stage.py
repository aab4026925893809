"""What the player shows: one run, or two beside each other, or one above the other, in step."""

from itertools import zip_longest

from batcher.explaining.differences import Parting, RunComparison, role_of
from batcher.trace.run import label_of

from ...screen.live_picture import Browser, Picture
from ...screen.terminal import counted
from ...screen.theme import LABEL, Glyphs, Line, line_width
from ..difference_text import decided
from .playback import Playback
from .recording import Recording

MIN_BESIDE = 60
"""Two runs are beside each other where each has so many columns."""
MAX_TOLD = 2
"""So many decisions of each run are told of, where the runs part."""


class Stage:
    """One run on the screen.

    num_runs: how many are on it.  parting_step: where two of them part, if they do.
    """

    num_runs = 1
    parting_step: int | None = None

    def __init__(self, recording: Recording, title: str, glyphs: Glyphs) -> None:
        self.recording = recording
        self._playback = Playback(recording, title, glyphs)
        self._picture = Picture(recording.longest)
        self._browser = Browser()
        self._wanted: str | None = None

    @property
    def num_steps(self) -> int:
        """How many steps there are to see."""
        return self.recording.num_steps

    def points_of_interest(self) -> list[int]:
        """Return the steps with a preemption, a failure or the last before a restart.

        And where the worst bubble begins.
        """
        restarts = (each.last_step for each in self.recording.timeline.restarts)
        found = {*self.recording.preemptions, *self.recording.failures, *restarts}
        bubble = self.recording.worst_bubble
        return sorted(found if bubble is None else {*found, bubble})

    def find(self, text: str) -> dict[int, str]:
        """Return who is admitted, by the steps, that has `text` in its name."""
        return self.recording.find(text)

    def look_at(self, label: str | None) -> None:
        """Let somebody be seen among the slots; with None see them all."""
        self._wanted = label
        if label is None:
            self._browser.press("escape", self._playback.scene)

    def look_at_parting(self) -> None:
        """Let those be seen about whom two runs part; one run does not."""

    def scroll(self, key: str) -> None:
        """Move through the slots, as a key says."""
        self._browser.press(key, self._playback.scene)

    def lines(self, step: int, width: int, height: int) -> list[Line]:
        """Return the picture after `step`, or after the last step there is."""
        scene = self._playback.seek(min(step, self.num_steps - 1))
        self._browser.found = self._wanted  # of each step anew: what it found is of another one
        self._browser.follow(scene)
        return self._picture.lines(scene, width, height, has_gantt=True, browser=self._browser)

    def note(self, step: int, width: int) -> Line:  # noqa: ARG002 - of two runs there is more to say
        """Return what there is to say of what is shown, in one line."""
        return self._browser.line(self._playback.scene, width)


class PairStage(Stage):
    """Two runs, step by step; of the one that ends first the last step stays."""

    num_runs = 2

    def __init__(
        self,
        recordings: tuple[Recording, Recording],
        comparison: RunComparison,
        titles: tuple[str, str],
        glyphs: Glyphs,
    ) -> None:
        names = (f"{letter}: {title}" for letter, title in zip("AB", titles, strict=True))
        self._stages = [Stage(*of_run, glyphs) for of_run in zip(recordings, names, strict=True)]
        self._rule = "│" if glyphs.dots else "|"
        self._parting = comparison.parting
        self._equality = _equality(comparison)
        if self._parting is not None:
            self.parting_step = self._parting.step

    @property
    def num_steps(self) -> int:
        """How many steps the longer one has."""
        return max(stage.num_steps for stage in self._stages)

    def points_of_interest(self) -> list[int]:
        """Return those of both, and where they part."""
        found = {step for stage in self._stages for step in stage.points_of_interest()}
        return sorted(found if self.parting_step is None else {*found, self.parting_step})

    def find(self, text: str) -> dict[int, str]:
        """Return who is admitted in either."""
        a, b = self._stages
        return b.find(text) | a.find(text)

    def look_at(self, label: str | None) -> None:
        """Let somebody be seen in both."""
        for stage in self._stages:
            stage.look_at(label)

    def look_at_parting(self) -> None:
        """Let those be seen about whom the runs part."""
        parting = self._parting
        if parting is None:
            return
        for stage, decisions in zip(self._stages, (parting.only_a, parting.only_b), strict=True):
            decision = next(iter(decisions or parting.only_a or parting.only_b))
            stage.look_at(label_of(decision.id, decision.index, role_of(decision)))

    def scroll(self, key: str) -> None:
        """Move through the slots of both."""
        for stage in self._stages:
            stage.scroll(key)

    def lines(self, step: int, width: int, height: int) -> list[Line]:
        """Return both pictures: beside each other if there is room, or else above each other."""
        a, b = self._stages
        half = (width - 3) // 2
        if half < MIN_BESIDE:
            above = a.lines(step, width, height - height // 2)
            blank: list[Line] = [[]] * (height - height // 2 - len(above))
            return [*above, *blank, *b.lines(step, width, height // 2)]
        lines: list[Line] = []
        nothing: Line = []
        left, right = a.lines(step, half, height), b.lines(step, half, height)
        for in_a, in_b in zip_longest(left, right, fillvalue=nothing):
            spare = max(half - line_width(in_a), 0)
            lines.append([*in_a, (f"{' ' * spare} {self._rule} ", LABEL), *in_b])
        return lines

    def note(self, step: int, width: int) -> Line:  # noqa: ARG002 - whoever shows it cuts it
        """Return where the schedules part, what each decides there, and which run is over."""
        parting = self._parting
        found: Line
        if parting is None:
            found = [(self._equality, "stop")]
        elif step < parting.step:
            found = [(f"the same up to step {parting.step:,}: d goes there", LABEL)]
        elif step > parting.step:
            ago = counted(step - parting.step, "step")
            found = [(f"they parted in step {parting.step:,}, {ago} ago", LABEL)]
        else:
            found = [("here they part: ", "failed"), (_told(parting), "")]
        for letter, stage in zip("AB", self._stages, strict=True):
            if step >= stage.num_steps:
                found.append((f"; {letter} ended in step {stage.num_steps - 1:,}", "stop"))
        return found


def _equality(comparison: RunComparison) -> str:
    """Return how far schedules are equal that part nowhere."""
    breaks = {"A": comparison.breaks_off_a, "B": comparison.breaks_off_b}
    found = {letter: step for letter, step in breaks.items() if step is not None}
    if not found:
        return "the schedules are equal"
    first = min(found, key=found.__getitem__)
    return f"equal up to step {found[first]:,}, where {first} breaks off"


def _told(parting: Parting) -> str:
    """Return what each of the runs decides where they part."""
    told = []
    for letter, decisions in (("A", parting.only_a), ("B", parting.only_b)):
        what = ", ".join(map(decided, decisions[:MAX_TOLD])) or "decides nothing else"
        told.append(f"{letter} {what}")
    return "; ".join(told)
