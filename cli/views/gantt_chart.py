"""The rows of a gantt chart: steps onto cells, and cells into bars, shades, a queue and an axis.

Rule: a row is a string of exactly as many terminal cells as its scale has.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from os.path import commonprefix
from string import digits
from types import MappingProxyType

from batcher.events import RestartEvent
from batcher.trace.run import SlotSpan
from batcher.trace.timeline import Stretch, clip

from ..screen.terminal import cell_width, cut_middle
from ..screen.theme import hue_of
from .slot_rows import has_failed

MIN_CUT_CELLS = 6
MAX_ID_CELLS = 6
MIN_TICK_CELLS = 10
MIN_TICK_GAP = 2


@dataclass(frozen=True)
class ChartGlyphs:
    """What charts are drawn with.

    lost: where a worker died.  bars: of sequences that follow each other.  prefill: of one that
    takes several steps for it.  shades, levels: from nothing to everything.
    """

    admitted: str
    forked: str
    bars: str
    broken: str
    dropped: str
    lost: str
    prefill: str
    preempted: str
    shades: str
    levels: str
    tick: str
    line: str
    brace: str
    cut: str
    dot: str


UNICODE = ChartGlyphs(
    "┃", "╭", "━╌", "x", "o", "!", "▪", "«", " ░▒▓█", " ▁▂▃▄▅▆▇█", "┬", "─", "╰─╯", "…", "·"
)
ASCII = ChartGlyphs(
    "|", "/", "=-", "x", "o", "!", ":", "<", " .+*#", " 123456789", "+", "-", "^^^", "~", "-"
)


@dataclass(frozen=True)
class Scale:
    """Steps onto cells: several to a cell, or a whole number of cells to each."""

    steps: range
    num_cells: int

    @classmethod
    def fit(cls, steps: range, max_cells: int, max_cells_per_step: int) -> "Scale":
        """Return the widest scale that shows `steps` in at most `max_cells`."""
        num_steps = len(steps)
        if num_steps > max_cells:
            return cls(steps, max_cells)
        return cls(steps, num_steps * min(max_cells // num_steps, max_cells_per_step))

    @property
    def cells_per_step(self) -> int:
        """How many cells show a step; 0 if several steps share one."""
        return self.num_cells // len(self.steps)

    def steps_at(self, cell: int) -> range:
        """Return the steps that `cell` shows, at least one."""
        num_steps, origin = len(self.steps), self.steps.start
        first = cell * num_steps // self.num_cells
        return range(
            origin + first, origin + max(first + 1, (cell + 1) * num_steps // self.num_cells)
        )

    def first_cell(self, step: int) -> int:
        """Return the leftmost cell that shows `step`."""
        num_steps, offset = len(self.steps), step - self.steps.start
        if num_steps > self.num_cells:
            return self.last_cell(step)
        return offset * self.num_cells // num_steps

    def last_cell(self, step: int) -> int:
        """Return the rightmost cell that shows `step`."""
        offset = step - self.steps.start
        return ((offset + 1) * self.num_cells - 1) // len(self.steps)

    def clip(self, span: SlotSpan) -> range:
        """Return the shown steps of `span`."""
        return range(max(span.start, self.steps.start), min(span.end, self.steps.stop))


def add_busy(busy: list[int], span: SlotSpan, scale: Scale) -> None:
    """Add to `busy`, [num_cells], in how many steps of each cell `span` holds its slot."""
    steps = scale.clip(span)
    if steps:
        for cell in range(scale.first_cell(steps[0]), scale.last_cell(steps[-1]) + 1):
            shown = scale.steps_at(cell)
            busy[cell] += min(steps.stop, shown.stop) - max(steps.start, shown.start)


def _busy(spans: Iterable[SlotSpan], scale: Scale) -> list[int]:
    busy = [0] * scale.num_cells
    for span in spans:
        add_busy(busy, span, scale)
    return busy


def busy_shares(busy: Sequence[int], scale: Scale, num_slots: int = 1) -> list[float]:
    """Return the busy share of `num_slots` slots by cell, [num_cells]; `busy`: see add_busy."""
    return [count / (num_slots * len(scale.steps_at(cell))) for cell, count in enumerate(busy)]


def shaded_row(shares: Sequence[float], glyphs: ChartGlyphs) -> str:
    """Return a row of cells, the darker the busier; blank is never busy, and solid is always."""
    partial = glyphs.shades[1:-1]
    shades = {0.0: glyphs.shades[0], 1.0: glyphs.shades[-1]}
    return "".join(shades.get(share) or partial[int(share * len(partial))] for share in shares)


def highest_counts(counts: Iterable[Stretch], scale: Scale) -> list[int]:
    """Return the largest of the counts of each cell's steps: [num_cells]."""
    highest = [0] * scale.num_cells
    for start, stop, num in clip(counts, scale.steps):
        for cell in range(scale.first_cell(start), scale.last_cell(stop - 1) + 1):
            highest[cell] = max(highest[cell], num)
    return highest


def level_row(counts: Sequence[int], peak: int, glyphs: ChartGlyphs) -> str:
    """Return a row of columns as high as the count of each cell; `peak` is full."""
    highest = len(glyphs.levels) - 1
    return "".join(glyphs.levels[-(-count * highest // peak) if peak else 0] for count in counts)


def bar_row(
    spans: Sequence[SlotSpan],
    labels: Mapping[str, str],
    scale: Scale,
    glyphs: ChartGlyphs,
    marks: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """Return the row of one slot: its sequences as bars, each with its label where that fits.

    spans: those of the slot that `scale` shows, by start.  labels: what to write for each label.
    marks: what to write over the bars, by cell; where that has no room, what comes before its `/`.
    """
    cells, shares = [" "] * scale.num_cells, busy_shares(_busy(spans, scale), scale)
    for number, span in enumerate(spans):
        steps = scale.clip(span)
        first, last = scale.first_cell(steps[0]), scale.last_cell(steps[-1])
        for cell in range(first, last + 1):
            cells[cell] = glyphs.bars[number % 2] if 2 * shares[cell] >= 1 else " "
        for cell in _prefill_cells(span, scale):
            cells[cell] = glyphs.prefill if cells[cell] != " " else " "
        if span.end - 1 in steps:
            cells[last] = _end_mark(span, glyphs) or cells[last]
        if span.start in steps:
            cells[first] = glyphs.admitted
    free: set[int] = set()
    for number, span in enumerate(spans):
        label = labels[span.label]
        free.update(_write_label(cells, span, label, scale, glyphs, glyphs.bars[number % 2]))
    for cell, mark in marks.items():
        for text in (mark, mark.partition("/")[0]):
            if free.issuperset(range(cell, cell + len(text))):
                _write(cells, cell, text)
                break
    return "".join(cells)


def bar_styles(spans: Sequence[SlotSpan], scale: Scale) -> list[str]:
    """Return the style of each cell of what `bar_row` draws of a slot, [num_cells]."""
    styles = [""] * scale.num_cells
    for span in spans:
        steps = scale.clip(span)
        first, last = scale.first_cell(steps[0]), scale.last_cell(steps[-1])
        styles[first : last + 1] = [hue_of(span.id)] * (last + 1 - first)
        if span.end - 1 in steps:
            styles[last] = _end_style(span) or styles[last]
        if span.start in steps:
            styles[first] = "admitted"
    return styles


def _end_style(span: SlotSpan) -> str:
    """Return the style of what stands where `span` ends, "" where that is nothing but its bar."""
    if has_failed(span) or span.outcome == "lost":
        return "failed"
    return "preempted" if span.preemption is not None else ""


def styled(row: str, styles: Sequence[str]) -> list[tuple[str, str]]:
    """Return the parts of `row` that have one style; styles: of its cells."""
    cell, parts = 0, list[tuple[str, str]]()
    for char in row:
        width = cell_width(char)
        style = styles[min(cell, len(styles) - 1)] if width else parts[-1][1]
        if parts and parts[-1][1] == style:
            parts[-1] = (parts[-1][0] + char, style)
        else:
            parts.append((char, style))
        cell += width
    return parts


def _write_label(
    cells: list[str], span: SlotSpan, label: str, scale: Scale, glyphs: ChartGlyphs, bar: str
) -> list[int]:
    """Write a label and the forks of its beam over its `bar`; return where that is still to see.

    The cell behind the label is not among these.
    """
    steps = scale.clip(span)
    first, last = scale.first_cell(steps[0]) + 1, scale.last_cell(steps[-1])
    first = max([first, *(cell + 1 for cell in _prefill_cells(span, scale)[-1:])])
    text = cut_to_room(label, _room(cells[first : last + 1], bar), glyphs.cut)
    _write(cells, first, text)
    label_end = first + cell_width(text)
    for cell, mark in _fork_marks(span, scale, glyphs.forked):
        if cell >= label_end:
            _write(cells, cell, mark[: _room(cells[cell : cell + len(mark)], bar)])
    return [cell for cell in range(label_end + bool(text), last + 1) if cells[cell] == bar]


def _prefill_cells(span: SlotSpan, scale: Scale) -> range:
    """Return the cells of a prefill of several steps, up to that of its first token."""
    first = max(span.start, scale.steps.start)
    stop = min(span.start + span.prefill, scale.steps.stop)
    if span.prefill == 1 or first >= stop:
        return range(0)
    return range(scale.first_cell(first), scale.last_cell(stop - 1) + 1)


def _fork_marks(span: SlotSpan, scale: Scale, forked: str) -> Iterator[tuple[int, str]]:
    """Yield the cell of each step that goes on as another beam, and a mark that says which.

    Where the number does not fit into the step's cells, the mark does without.
    """
    steps = scale.clip(span)
    for fork in span.forks:
        step = fork.step + 1
        if step in steps:
            first, mark = scale.first_cell(step), f"{forked}{fork.parent}"
            fits = len(mark) <= scale.last_cell(step) - first + 1
            yield first, mark if fits else forked


def _room(cells: Sequence[str], bar: str) -> int:
    """Return how many of `cells`, from the first on, show nothing but the bar."""
    return sum(1 for _ in takewhile(bar.__eq__, cells))


def _end_mark(span: SlotSpan, glyphs: ChartGlyphs) -> str:
    """Return what stands where `span` ends, "" where that is nothing but its bar."""
    if has_failed(span):
        return glyphs.broken
    if span.outcome == "lost":
        return glyphs.lost
    if span.preemption is not None:
        return glyphs.preempted
    return glyphs.dropped if span.dropped else ""


def id_frame(ids: Collection[str]) -> tuple[str, str]:
    """Return what all of several ids begin and end with, empty where they are short or differ.

    Digits stay with the part that differs.
    """
    if len(ids) <= 1 or max(map(cell_width, ids)) <= MAX_ID_CELLS:
        return "", ""
    before = commonprefix([*ids]).rstrip(digits)  # noqa: RUF071 - of texts, character by character
    rests = [name[len(before) :][::-1] for name in ids]
    return before, commonprefix(rests).rstrip(digits)[::-1]  # noqa: RUF071 - as above


def short_labels(spans: Collection[SlotSpan]) -> dict[str, str]:
    """Return what to write for each label: it, without what all ids have in common."""
    before, after = map(len, id_frame({span.id for span in spans}))
    return {
        span.label: span.id[before : len(span.id) - after] + span.label[len(span.id) :]
        for span in spans
    }


def cut_to_room(label: str, room: int, cut: str) -> str:
    """Return as much of `label` as `room` cells take, nothing if that would say nothing."""
    if cell_width(label) <= room:
        return label
    return cut_middle(label, room, cut) if room >= MIN_CUT_CELLS else ""


def _write(cells: list[str], start: int, text: str) -> None:
    """Put `text` into `cells` from `start` on; a wide character leaves the cell after it empty."""
    cell = start
    for char in text:
        width = cell_width(char)
        if width == 0:
            cells[cell - 1] += char
            continue
        cells[cell : cell + width] = [char] + [""] * (width - 1)
        cell += width


def restart_row(restarts: Iterable[RestartEvent], scale: Scale, glyphs: ChartGlyphs) -> str:
    """Return a row with a mark where each worker was replaced, and which one, if there is room."""
    cells = [" "] * scale.num_cells
    marks: dict[int, list[str]] = {}
    for restart in restarts:
        if restart.last_step in scale.steps:
            worker = "" if restart.worker is None else f"w{restart.worker}"
            marks.setdefault(scale.last_cell(restart.last_step), []).append(worker)
    free = scale.num_cells
    for cell, workers in sorted(marks.items(), reverse=True):
        texts = [glyphs.lost + ",".join(workers), f"{glyphs.lost}{len(workers)}", glyphs.lost]
        text = next(text for text in texts if len(text) <= free - cell or text == glyphs.lost)
        _write(cells, cell, text)
        free = cell - 1
    return "".join(cells)


def axis(scale: Scale, glyphs: ChartGlyphs) -> tuple[str, str]:
    """Return the numbers of some round steps, and below them the line with their ticks."""
    numbers = [" "] * scale.num_cells
    line = [glyphs.line] * scale.num_cells
    free = 0
    for step in _ticks(scale):
        cell, number = scale.first_cell(step), str(step)
        if free <= cell <= scale.num_cells - len(number):
            numbers[cell : cell + len(number)] = number
            line[cell] = glyphs.tick
            free = cell + len(number) + MIN_TICK_GAP
    return "".join(numbers), "".join(line)


def _ticks(scale: Scale) -> list[int]:
    """Return the first step and the multiples of a round number that leaves room between."""
    widest = len(str(scale.steps.stop)) + MIN_TICK_GAP
    fewest_steps = max(MIN_TICK_CELLS, widest) * len(scale.steps) / scale.num_cells
    interval = next(
        base * 10**exponent
        for exponent in count()
        for base in (1, 2, 5)
        if base * 10**exponent >= fewest_steps
    )
    first = scale.steps.start
    return [first, *range(first - first % interval + interval, scale.steps.stop, interval)]
