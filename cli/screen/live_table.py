"""The picture of a run as lines of text: a header, and one row a slot, for any width and height."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from batcher.events import Role
from cli.screen.cells import cell_width, cut_middle, pad, printable
from cli.screen.live_header import GAP, Moment, facts, header
from cli.screen.live_state import MAX_STRIP, RunState, SlotState

BAR_WIDTH, PHASE_WIDTH, MIN_STRIP_WIDTH = 8, len("prefill"), 10
MIN_REQUEST_WIDTH, MAX_REQUEST_WIDTH = len("request"), 36
PHASES: Mapping[Role, str] = {"sample": "decode", "beam": "beam", "negative": "partner"}
"""What a row does after its prefill."""
ROOMY_HEIGHT = 16  # below it, blank lines give way to slots


@dataclass(frozen=True)
class Glyphs:
    """The characters of a picture.

    turns: the requests of a slot alternate between the two, so that neighbours are told apart.
    blocks: a cell of the bar, from empty to full.
    """

    admitted: str
    turns: tuple[str, str]
    blocks: str
    cut: str
    nobody: str


BOXES = Glyphs("┃", ("━", "╌"), " ▏▎▍▌▋▊▉█", "…", "-")
ASCII = Glyphs("|", ("=", "-"), " #", "~", "-")

PLAIN: Mapping[str, str] = {}
COLORS: Mapping[str, str] = {
    "title": "\x1b[1m",
    "columns": "\x1b[2m",
    "failed": "\x1b[31m",
    "prefill": "\x1b[33m",
    "stop": "\x1b[32m",
    "length": "\x1b[32m",
    "error": "\x1b[31m",
    "aborted": "\x1b[31m",
    "idle": "\x1b[2m",
    "bar": "\x1b[32m",
    "turn 0": "\x1b[36m",
    "turn 1": "\x1b[34m",
}
"""What sets the colour of a part of the picture; a part that is not here has none."""
RESET = "\x1b[0m"


class Row(NamedTuple):
    """What a slot's row says about the last step, but for the strip.

    request: the label of its sequence.
    phase: prefill, then what the row does; in the step that ended it, why it ended.
    """

    number: int
    request: str
    phase: str
    num_tokens: int
    max_tokens: int

    @property
    def progress(self) -> str:
        """Tokens generated, of how many at most; nothing where none are."""
        return f"{self.num_tokens}/{self.max_tokens}" if self.max_tokens else ""


class Columns(NamedTuple):
    """The widths of the columns; 0 for one there is no room for."""

    slot: int
    request: int
    phase: int
    bar: int
    progress: int
    strip: int


class LiveTable:
    """Draws a run.  Columns that follow the data only grow, so that the picture stands still."""

    def __init__(
        self, title: str, run: RunState, glyphs: Glyphs, colors: Mapping[str, str]
    ) -> None:
        self._run, self._glyphs, self._colors = run, glyphs, colors
        self._title = self._printable(title)
        self._longest_request = MIN_REQUEST_WIDTH
        self._longest_progress = len("tokens")

    def lines(self, moment: Moment, width: int, height: int) -> list[str]:
        """Return the picture, at most `height` lines; from 24 cells on they all fit into `width`.

        Where there is room the first line is blank: the cursor rests there, so that what is typed
        spoils nothing.
        """
        slots = self._run.slots
        blank = [""] if height >= min(ROOMY_HEIGHT, len(slots) + 4) else []
        known = facts(self._run, moment)
        top = header(self._title, known, width, self._glyphs.cut, self._paint)
        lines = [*blank, top, *blank]
        room = height - len(lines) - 1
        if room < 1:
            return lines
        num_shown = len(slots) if len(slots) <= room else room - 1
        lines += self._table(num_shown, moment.step, width)
        if num_shown < len(slots):
            hidden = slots[num_shown:]
            num_busy = sum(slot.is_busy(moment.step) for slot in hidden)
            lines.append(self._note(f"+{len(hidden)} more slots, {num_busy} busy", width))
        return lines

    def _table(self, num_shown: int, step: int, width: int) -> list[str]:
        """Return the column titles and the rows of the first `num_shown` slots."""
        shown = self._run.slots[:num_shown]
        rows = [self._row(number, slot, step) for number, slot in enumerate(shown)]
        for row in rows:
            self._longest_request = max(self._longest_request, cell_width(row.request))
            self._longest_progress = max(self._longest_progress, len(row.progress))
        slot_width = max(len("slot"), len(str(len(self._run.slots) - 1)))
        columns = plan_columns(width, slot_width, self._longest_request, self._longest_progress)
        return [
            self._note(_titles(columns, self._glyphs), width),
            *(
                self._cells(row, columns) + self._strip(slot, step, columns)
                for row, slot in zip(rows, shown, strict=True)
            ),
        ]

    def _row(self, number: int, slot: SlotState, step: int) -> Row:
        if not slot.is_busy(step):
            return Row(number, self._glyphs.nobody, "idle", 0, 0)
        phase = slot.outcome or ("prefill" if slot.is_prefilling(step) else PHASES[slot.role])
        name = cut_middle(self._printable(slot.label), MAX_REQUEST_WIDTH, self._glyphs.cut)
        return Row(number, name, phase, slot.tokens_after(step), slot.max_tokens)

    def _cells(self, row: Row, columns: Columns) -> str:
        name = pad(cut_middle(row.request, columns.request, self._glyphs.cut), columns.request)
        line = f"{row.number:>{columns.slot}}{GAP}{name}"
        if columns.phase:
            line += GAP + self._paint(row.phase, f"{row.phase:<{columns.phase}}")
        if columns.bar:
            line += GAP + self._paint("bar", _bar(row, columns.bar, self._glyphs.blocks))
        gap = " " if columns.bar else GAP
        return f"{line}{gap}{row.progress:>{columns.progress}}"

    def _strip(self, slot: SlotState, step: int, columns: Columns) -> str:
        """Return the steps up to `step`, one cell each: they grow to the right, then scroll."""
        if not columns.strip:
            return ""
        first = max(0, step + 1 - columns.strip)
        edge, turn = step + 1, slot.num_admitted - 1
        pieces: list[str] = []
        for start, end in slot.newest_spans(step):
            if end <= first:
                break
            if end < edge:
                pieces.append(" " * (edge - end))
            edge = max(start, first)
            fill = self._glyphs.turns[turn % 2] * (end - edge)
            piece = self._glyphs.admitted + fill[1:] if start >= first else fill
            pieces.append(self._paint(f"turn {turn % 2}", piece))
            turn -= 1
        pieces.append(GAP + " " * (edge - first))
        return "".join(reversed(pieces))

    def _note(self, text: str, width: int) -> str:
        return self._paint("columns", text[:width])

    def _paint(self, part: str, text: str) -> str:
        color = self._colors.get(part)
        return f"{color}{text}{RESET}" if color else text

    def _printable(self, text: str) -> str:
        return printable(text, ascii_only=self._glyphs is ASCII)


def plan_columns(width: int, slot: int, longest_request: int, longest_progress: int) -> Columns:
    """Return the widths that fit into `width`: the strip goes first, then the phase, then the bar.

    A request's name gets at most a fifth of the width, or what is left where no strip is.
    """
    request = min(longest_request, max(MIN_REQUEST_WIDTH, width // 5))
    room = width - slot - request - longest_progress - 2 * len(GAP)
    bar = BAR_WIDTH if room >= BAR_WIDTH + 1 else 0
    room -= bar + 1 if bar else 0
    phase = PHASE_WIDTH if room >= PHASE_WIDTH + len(GAP) else 0
    room -= phase + len(GAP) if phase else 0
    strip = room - len(GAP) if room >= MIN_STRIP_WIDTH + len(GAP) else 0
    if not strip:
        request = max(1, min(longest_request, request + room))
    return Columns(slot, request, phase, bar, longest_progress, min(strip, MAX_STRIP))


def _titles(columns: Columns, glyphs: Glyphs) -> str:
    cells = [f"{'slot':>{columns.slot}}", f"{'request':<{columns.request}}"]
    if columns.phase:
        cells.append(f"{'phase':<{columns.phase}}")
    if columns.bar:
        cells.append(f"{'tokens':<{columns.bar + 1 + columns.progress}}")
    else:
        cells.append(f"{'tokens':>{columns.progress}}")
    if columns.strip:
        steps = f"last {columns.strip} steps"
        legend = f"{steps} ({glyphs.admitted} = admitted)"
        cells.append(legend if len(legend) <= columns.strip else steps)
    return GAP.join(cells)


def _bar(row: Row, width: int, blocks: str) -> str:
    """Return `width` cells, filled as far as the row's tokens are of its maximum."""
    parts = len(blocks) - 1
    share = row.num_tokens / row.max_tokens if row.max_tokens else 0.0
    full, rest = divmod(int(share * width * parts), parts)
    return (blocks[-1] * full + blocks[rest] * (full < width)).ljust(width)
