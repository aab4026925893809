"""The picture of a run for a terminal of any size: its layout follows from the room there is.

Rule: every slot is in it, in a row, a cell or a share of a cell.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from batcher.events import RunEvent

from ..cells import counted, cut_middle, number, whole_percent
from .browser import Browser
from .grid import MIN_CELL, Longest, cell_size, grid, heat_map
from .header import header
from .scene import Scene
from .theme import ALL, LABEL, Line, joined, levels, shade

MAX_CELLS_PER_STEP = 4
MIN_WIDTH, MIN_HEIGHT = 20, 3
MIN_GANTT = 6
"""In fewer spare lines there is no gantt."""
ROOMY = 16
"""Of fewer lines none is left blank."""
HEADER_SHARE = 4
"""The header has one of so many lines, at least one."""
MANY_SLOTS = 256
"""So many are a map, whatever room there is: nobody reads as many rows."""


@dataclass
class Picture:
    """Lays out a run, line by line."""

    longest: Longest = field(default_factory=Longest)

    def lines(
        self,
        scene: Scene,
        width: int,
        height: int,
        *,
        has_gantt: bool,
        browser: Browser | None = None,
        overlay: Sequence[Line] = (),
        footer: Callable[[], Line] | None = None,
    ) -> list[Line]:
        """Return at most `height` lines of at most `width`.

        Where there is room the first is blank: the cursor rests there, and what is typed spoils
        nothing.  has_gantt: the picture has the screen for itself, so the run so far is shown in
        what room is left.  browser: which slots are looked at.  overlay: what is shown instead of
        them.  footer: makes the last line, once it is clear which slots are shown.
        """
        if footer is not None and height > 1:
            lines = self.lines(
                scene, width, height - 1, has_gantt=has_gantt, browser=browser, overlay=overlay
            )
            spare = height - 1 - len(lines) if has_gantt else 0
            return [*lines, *[[]] * spare, footer()]
        blank: list[Line] = [[]] if height >= ROOMY else []
        top = [*blank, *header(scene, width, max(1, height // HEADER_SHARE))][:height]
        room, num_slots = height - len(top), len(scene.run.slots)
        if room < 1:
            return top
        if overlay:
            return [*top, *blank, *overlay][:height]
        num_rows = room - len(blank) - 1 if width >= MIN_CELL else 0
        wanted = None if browser is None else browser.rows(num_slots, num_rows)
        if wanted is not None:
            rows = grid(scene, self.longest, width, num_rows, wanted, has_titles=True)
            return [*top, *blank, *rows]
        plan = _plan_grid(num_slots, width, room, len(blank))
        if plan is None:
            return top + heat_map(scene, self.longest, width, room)
        num_blank, num_titles = plan
        num_rows, slots = room - num_blank - num_titles, range(num_slots)
        rows = grid(scene, self.longest, width, num_rows, slots, has_titles=bool(num_titles))
        spare = num_rows + num_titles - len(rows)
        gantt = small_gantt(scene, width, spare - 1) if has_gantt and spare > MIN_GANTT else []
        return [*top, *blank[:num_blank], *rows, *([[], *gantt] if gantt else [])]


def _plan_grid(num_slots: int, width: int, room: int, max_blank: int) -> tuple[int, int] | None:
    """Return how many blank lines and lines of titles to put before the slots, None for no grid.

    As many as do not make the rows any narrower.
    """
    if num_slots >= MANY_SLOTS:
        return None
    plans = [(max_blank, 1), (0, 1), (0, 0)]
    sizes = {plan: cell_size(width, num_slots, room - sum(plan)) for plan in plans}
    widest = max(sizes.values())
    if widest < MIN_CELL:
        return None
    return next(plan for plan in plans if sizes[plan] == widest)


def small_gantt(scene: Scene, width: int, height: int) -> list[Line]:
    """Return the gantt of the run in at most `height` lines of `width`; none without room.

    Nor of a run without a step.  A row of the history has a line to itself.
    """
    if width < MIN_WIDTH or height < MIN_HEIGHT or scene.moment.step < 0:
        return []
    history, num_steps = scene.run.history, scene.moment.step + 1
    if len(history.rows) > height - 2:
        return []
    label = max(map(len, map(_name, history.rows))) + 1
    peak = f" {scene.depths.highest(num_steps, 1)[0]:>4,}"
    room = width - label - max(len(" 100%"), len(peak))
    each = max(1, min(room // num_steps, MAX_CELLS_PER_STEP))
    num_cells = min(room, num_steps * each)
    held = scene.run.open_spans()
    used = history.used(num_steps, num_cells, held)
    admitted = history.admissions(num_steps, held) if num_steps <= num_cells else None
    lines = [_caption(scene, width, num_steps / num_cells)]
    for row, slots in enumerate(history.rows):
        shares = used[row] / len(slots)
        if admitted is None or len(slots) > 1:
            cells = [_shade(scene, share) for share in shares]
        else:
            cells = _bars(scene, shares, admitted[row], each)
        busy = whole_percent(min(float(shares.mean()), 1.0))
        name = f"{_name(slots):>{label - 1}} "
        lines.append([(name, LABEL), *joined(cells), (f" {busy:>4}", "figure")])
    lengths = scene.depths.highest(num_steps, num_cells)
    name = f"{'queue':>{label - 1}} "
    return [*lines, [(name, LABEL), (levels(lengths, scene.glyphs), "queue"), (peak, "figure")]]


def last_picture(scene: Scene, width: int, height: int) -> list[Line]:
    """Return what stays of a run: the gantt of `trace`, in fewer lines than `height`.

    Of a run of very many sequences, all in little above the last steps.  Where there is no room
    for that, all in little.  The timeline of a run that was stopped knows nothing of requests that
    have arrived and were not read, so its queue is the one that was seen.
    """
    from ...views.gantt import MIN_WIDTH, render_gantt  # noqa: PLC0415 - only now

    run, plan, num_steps = scene.run, scene.plan, scene.moment.step + 1
    if num_steps < 1 or width < MIN_WIDTH:
        return small_gantt(scene, width, height)
    batch_size = plan.batch_size // plan.num_workers
    began = RunEvent(batch=batch_size, model="", settings={}, workers=plan.num_workers)
    oldest = run.ends[0].finish if len(run.ends) == run.ends.maxlen else None
    known_from = 0 if oldest is None else oldest.step + 1
    lines = render_gantt(
        run.timeline(began, num_steps),
        width=width,
        height=height,
        ascii_only=not scene.has_unicode,
        queue=scene.depths.stretches(num_steps) if scene.gauges.num_queued else (),
        known_from=known_from,
    )
    above = small_gantt(scene, width, height - len(lines) - 1) if known_from else []
    lines = [*above, [], *lines] if above else lines
    return lines if len(lines) <= height else small_gantt(scene, width, height)


def _caption(scene: Scene, width: int, steps_per_cell: float) -> Line:
    plan, separator = scene.plan, scene.glyphs.separator
    title = cut_middle(scene.name(plan.title), max(width // 3, 8), scene.glyphs.cut)
    last = scene.moment.step
    parts = [
        f"steps 0-{last:,}" if last else "step 0",
        counted(plan.batch_size, "slot"),
        plan.policy,
    ]
    if steps_per_cell > 1:
        each = number(steps_per_cell)
        parts.append(f"{each} step{'' if each == '1' else 's'} a cell")
    text = separator.join(parts)
    return [(title, "title"), ("  ", ""), (text[: width - len(title) - 2], LABEL)]


def _name(slots: range) -> str:
    return f"slot {slots[0]}" if len(slots) == 1 else f"{slots[0]}-{slots[-1]}"


def _shade(scene: Scene, share: float) -> tuple[str, str]:
    """Return a cell that is the darker the busier; only one that always was is solid."""
    glyphs = scene.glyphs
    if share <= 1 - ALL:
        return glyphs.nothing, "idle"
    return shade(share, glyphs), "bar" if share >= ALL else "bubble"


def _bars(scene: Scene, shares: Iterable[float], admitted: Sequence[int], each: int) -> Line:
    """Return the cells of a slot, `each` a step: its sequences one after the other."""
    glyphs, turn = scene.glyphs, -1
    cells: Line = []
    for cell, share in enumerate(shares):
        step, place = divmod(cell, each)
        if admitted[step] and not place:
            turn += 1
            cells.append((glyphs.admitted, "admitted"))
        elif share >= ALL:
            cells.append((glyphs.turns[turn % 2], "bar"))
        else:
            cells.append((glyphs.nothing, "idle"))
    return cells
