"""Where a person looks in a picture, as the keys say: at which slots, and for which request."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from batcher.trace.run import RequestTimeline

from ..cells import counted, cut_middle, pad
from ..keyboard import InputLine
from .scene import Scene
from .theme import LABEL, Line, line_width

Found = RequestTimeline | str
"""A sequence, or the id of a request that is still to come."""

BROWSING_KEYS = (
    ("arrows, page up, page down", "scroll through the slots, a row each"),
    ("home, end", "the first slots, the last ones"),
    ("/", "find a request by its id, or by a part of it"),
    ("n, N", "the next slot with such a request, the one before"),
    ("escape", "all slots at once again"),
    ("?", "these keys, or the slots again"),
)
MAX_SHOWN = 40
"""The most cells of an id in the last line."""


class Browser:
    """What a person looks at in a run.

    found: whom the person has looked for; None for nobody.
    has_help: whether the keys are shown instead of the slots.
    upcoming: finds a request that is still to come, by its id or a part of that.
    knows_upcoming: whether there are no others to come than it finds.
    """

    def __init__(
        self,
        upcoming: Callable[[str], str | None] = lambda _: None,
        knows_upcoming: Callable[[], bool] = lambda: False,
    ) -> None:
        self.found: Found | None = None
        self.has_help = False
        self._upcoming, self._knows_upcoming = upcoming, knows_upcoming
        self._first_slot: int | None = None  # the first that is a row; None if all are shown
        self._num_rows = 1
        self._wanted = ""
        self._prompt: InputLine | None = None
        self._message = ""
        self._followed: int | None = None  # the slot of `found` when it was last looked at

    def press(self, key: str, scene: Scene) -> bool:
        """Do what a key asks for; return whether it asks for anything here."""
        if self._prompt is not None:
            if not self._prompt.press(key):
                self._prompt = None
        elif key == "?":
            self.has_help = not self.has_help
        elif key == "escape":
            self._first_slot, self.found, self.has_help, self._message = None, None, False, ""
        elif key == "/":
            self._prompt = InputLine("find ", partial(self._find, scene))
            self._message, self.has_help = "", False
        elif key in ("n", "N") and self._wanted:
            self._go_on(scene, 1 if key == "n" else -1)
        else:
            return self._scroll(key, len(scene.run.slots))
        return True

    def paste(self, text: str) -> None:
        """Add `text` to what is typed; it is nothing but text, so elsewhere it does nothing."""
        if self._prompt is not None:
            self._prompt.paste(text)

    @property
    def is_typing(self) -> bool:
        """Whether a person types whom to find, so that other keys do nothing else."""
        return self._prompt is not None

    @property
    def is_used(self) -> bool:
        """Whether there may be something to say of where a person looks."""
        is_elsewhere = self._first_slot is not None or self.found is not None
        return is_elsewhere or self._prompt is not None or bool(self._message)

    def rows(self, num_slots: int, num_rows: int) -> range | None:
        """Return the slots that are looked at, of which so many have room; None for all of them."""
        if self._first_slot is None or num_rows < 1 or num_rows >= num_slots:
            self._first_slot = None
            return None
        self._num_rows = num_rows
        self._first_slot = min(self._first_slot, num_slots - num_rows)
        return range(self._first_slot, self._first_slot + num_rows)

    def follow(self, scene: Scene) -> None:
        """Go where whom the person has looked for is by now."""
        if isinstance(self.found, str):  # it may have come
            self._settle(self.found, self._whole(self.found, scene), scene)
        slot = slot_of(self.found)
        if slot is not None and slot != self._followed:
            self._show(slot)
        self._followed = scene.found = slot

    def line(self, scene: Scene, width: int) -> Line:
        """Return what there is to say of it in one line of at most `width`; [] for nothing."""
        if self._prompt is not None:
            text, title = scene.name(self._prompt.typed), self._prompt.title
            room = max(width - len(title) - 1, 1)
            return [(title, LABEL), (cut_middle(text, room, scene.glyphs.cut), ""), ("_", "")]
        if self.found is not None:
            text = told(scene, self.found)
        elif self._message:
            text = self._message
        elif self._first_slot is not None:
            last = min(self._first_slot + self._num_rows, len(scene.run.slots)) - 1
            text = f"slots {self._first_slot:,} to {last:,} of {len(scene.run.slots):,}"
        else:
            return []
        return [(cut_middle(text, width, scene.glyphs.cut), "found")]

    def _find(self, scene: Scene, typed: str) -> None:
        """Find what was typed."""
        self._wanted, self.found, self._followed = typed, None, None
        if typed:
            self._look_for(typed, scene)

    def _look_for(self, wanted: str, scene: Scene) -> None:
        """Find somebody by the whole id, or else by a part of it."""
        parts = (found for found in self._everyone(wanted, scene) if wanted in name_of(found))
        self._settle(wanted, self._whole(wanted, scene) or next(parts, None), scene)

    def _whole(self, wanted: str, scene: Scene) -> Found | None:
        """Return somebody by the whole id; None if nobody known has it."""
        everyone = self._everyone(wanted, scene)
        return next((found for found in everyone if name_of(found) == wanted), None)

    def _settle(self, wanted: str, found: Found | None, scene: Scene) -> None:
        """Take somebody as found, or say that nobody is."""
        self.found = found
        if found is None:
            name = cut_middle(scene.name(wanted), MAX_SHOWN, scene.glyphs.cut)
            self._message = f"unknown: {name}; it is to come, or ended long ago"
            ends = scene.run.ends
            if self._knows_upcoming() and len(ends) != ends.maxlen:
                self._message = f"no request has {name} in its id"

    def _everyone(self, wanted: str, scene: Scene) -> Iterator[Found]:
        """Yield whom one may look for: in slots, in the queue, to come, and of late."""
        yield from _holding(scene)
        yield from (request for request in scene.run.fold.open if request.admission is None)
        upcoming = self._upcoming(wanted)
        if upcoming is not None:
            yield upcoming
        yield from reversed(scene.run.ends)

    def _go_on(self, scene: Scene, direction: int) -> None:
        """Find the next slot, up or down, whose request has in its id what is wanted."""
        held = [request for request in _holding(scene) if self._wanted in request.label]
        if not held:
            self._look_for(self._wanted, scene)
            return
        slots, here = [slot_of(request) or 0 for request in held], slot_of(self.found)
        if here is None:
            number = 0 if direction > 0 else -1
        else:
            number = bisect_right(slots, here) if direction > 0 else bisect_left(slots, here) - 1
        self.found, self._followed = held[number % len(held)], None

    def _scroll(self, key: str, num_slots: int) -> bool:
        """Move through the rows; return whether a key does that."""
        page = max(self._num_rows - 1, 1)
        steps = {"up": -1, "down": 1, "page-up": -page, "page-down": page}
        steps |= {"left": -page, "right": page, "home": -num_slots, "end": num_slots}
        if key not in steps:
            return False
        self.has_help = False
        if self._first_slot is not None:
            self._first_slot = max(self._first_slot + steps[key], 0)
        else:
            self._first_slot = num_slots if key == "end" else 0
        return True

    def _show(self, slot: int) -> None:
        """Let a slot be among the rows, in the middle if it was not."""
        first = self._first_slot
        if first is None or not first <= slot < first + self._num_rows:
            self._first_slot = max(slot - self._num_rows // 2, 0)


def slot_of(found: Found | None) -> int | None:
    """Return the slot that somebody holds; None if it holds none."""
    if not isinstance(found, RequestTimeline) or found.finish is not None:
        return None
    return None if found.admission is None else found.admission.event.slot


def name_of(found: Found) -> str:
    """Return what somebody is called."""
    return found if isinstance(found, str) else found.label


def told(scene: Scene, found: Found) -> str:
    """Return where somebody is, and what has become of it."""
    name = cut_middle(scene.name(name_of(found)), MAX_SHOWN, scene.glyphs.cut)
    if isinstance(found, str):
        return f"{name} is still to be read"
    end = found.finish
    if end is not None:
        tokens = counted(end.tokens, "token")
        return f"{name} ended in step {end.step:,}: {end.reason}, {tokens}"
    slot = slot_of(found)
    if slot is not None:
        return f"{name} is in slot {slot:,}"
    waits = "was preempted and waits" if found.admissions else "waits"
    return f"{name} {waits} since step {found.waits_from:,}"


def help_lines(groups: Iterable[Sequence[tuple[str, str]]], width: int) -> list[Line]:
    """Return what keys do, line by line, with a blank line between groups."""
    found = list(groups)
    column = max(len(keys) for group in found for keys, _ in group) + 2
    lines: list[Line] = []
    for group in found:
        lines += [[]] if lines else []
        for keys, what in group:
            line = [(pad(keys, column), "figure"), (what, "")]
            lines.append(line if line_width(line) <= width else [(f"{keys}  {what}"[:width], "")])
    return lines


def _holding(scene: Scene) -> list[RequestTimeline]:
    """Return who holds a slot, by slots."""
    held = sorted(scene.run.fold.slots.items())
    return [request for slot, request in held if slot_of(request) == slot]
