"""Draws the live view that the README opens with.

`PYTHONPATH=. python tests/cli/live_svg.py` renews the file.

It is rich's own export of what the view shows of a run of a sample at a moment of that run, whose
clock is that of the engine: as if the modelled GPU were there.
"""

import io
import re
from contextlib import closing, nullcontext
from pathlib import Path

from emulated_run import Fingers, Screen
from rich.console import Console
from rich.text import Text

from cli.options import SchedulingOptions
from cli.run.input import open_requests
from cli.run.run import RunSetup
from cli.run.run_options import RunOptions
from cli.screen.live import LiveView, ScreenLive
from cli.screen.terminal import Pace
from cli.screen.theme import THEME, Line
from cli.screen.view import RunPlan

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "live.svg"
OPTIONS = RunOptions(
    input=[str(ROOT / "samples" / "what-if" / "chat.jsonl")],
    batch=8,
    scheduling=SchedulingOptions(
        profile="rtx4090_llama3.1-8b", kv_blocks=220, prefix_cache=True, max_batch_tokens=256
    ),
)
SECONDS = 11.0
COLUMNS, ROWS = 90, 28
FONT_FACE = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""It would be loaded from elsewhere; the next best is the reader's own."""


class LastFrame(ScreenLive):
    """Remembers what it has shown last."""

    lines: list[Line]

    def show(self, lines, above=b""):
        self.lines = lines
        return super().show(lines, above)


def frame():
    """What the view shows after so many seconds of the engine's clock."""
    requests, screen = (
        open_requests(OPTIONS, nullcontext),
        Screen(COLUMNS + 1, ROWS + 1, has_color=True),
    )
    setup = RunSetup(OPTIONS, requests)
    with requests, closing(setup.engine):
        loop, display = setup.loop(), LastFrame(screen)
        engine = loop.engine
        plan = RunPlan("chat.jsonl", "fcfs", OPTIONS.batch, loop.source.total, is_timed=True)
        view = LiveView(
            plan, loop, screen, display, pace=Pace(), keyboard=Fingers(), clock=lambda: engine.now
        )
        for events, lines, _ in loop:
            for event in events:
                view.fold.take(event)
            view.note_results(lines)
            view.after_step(engine.num_steps - 1)
            if engine.now >= SECONDS:
                return display.lines
    raise AssertionError("the run is shorter than that")


def picture():
    """The SVG of that."""
    console = Console(
        record=True, file=io.StringIO(), width=COLUMNS, theme=THEME, force_terminal=True
    )
    lines = Text("\n").join(Text.assemble(*line) for line in frame())
    console.print(lines, end="", soft_wrap=True)
    svg = console.export_svg(title="batchdecode run chat.jsonl", unique_id="live")
    return FONT_FACE.sub("", svg).replace("Fira Code, monospace", "monospace")


if __name__ == "__main__":
    PICTURE.write_text(picture())
