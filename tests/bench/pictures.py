"""What the pictures of the live view cost: each against a rich Table, and all of them in a run."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import workload
from report import Row
from rich.console import Console
from rich.live import Live
from rich.table import Table

from batcher import Engine, Request, SimulatedModel
from batcher.events import AdmitEvent, ArriveEvent, RequestEvent
from cli.screen.live import LiveView, ScreenLive
from cli.screen.terminal import Pace, Terminal
from cli.screen.view import GaugeReading, RunPlan

NUM_FRAMES = 100
TABLE_COLUMNS = ("slot", "request", "phase", "bar", "tokens", "strip")
SIZES = {8: (80, 24), 64: (120, 40), 256: (200, 50)}


class Null(Terminal):
    """A terminal of a fixed size that takes everything."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(os.open(os.devnull, os.O_WRONLY), "utf-8", has_color=True, environ={})
        vars(self)["shape"] = os.terminal_size((columns, rows))

    @property
    def size(self) -> os.terminal_size:
        return vars(self)["shape"]

    @property
    def is_ours(self) -> bool:
        return True


class Gauges:
    """Those of an engine that has no queue and no blocks."""

    current_step = None

    def read_gauges(self) -> GaugeReading:
        return GaugeReading(0.0, 0, None, None)

    def find_upcoming(self, text: str) -> None:
        return None

    def knows_upcoming(self) -> bool:
        return False


class TimedView(LiveView):
    """Knows how long its pictures took, and how long it took to follow the events.

    By the clock on the wall: that is what the view keeps an eye on.
    """

    seconds = fold_seconds = 0.0

    def follow(self, events: Sequence[RequestEvent]) -> None:
        """Feed the fold, as the numbers of a run do."""
        began = time.monotonic()
        for event in events:
            self.fold.take(event)
        self.keep_up()
        self.fold_seconds += time.monotonic() - began

    def _draw(self, now: float) -> None:
        began = time.monotonic()
        self._run.catch_up()
        caught_up = time.monotonic()
        super()._draw(now)
        self.fold_seconds += caught_up - began
        self.seconds += time.monotonic() - caught_up


def pictures(folder: Path) -> Iterator[Row]:
    """Measure a frame at several sizes, then what all frames of a run take of its time."""
    for num_slots, size in SIZES.items():
        ours, table = ms_per_frame(num_slots, size), ms_per_table(num_slots, size)
        name = f"a picture of {num_slots} slots, {size[0]}x{size[1]}: {ours:.2f} ms"
        yield Row(f"{name}, as a rich Table {table:.1f} ms", f"{ours / table:.2f}x", "<= 0.25x")
    for num_slots, size in SIZES.items():
        drawn, folded = shares_of_time(num_slots, size)
        name = f"of the time of an engine of {num_slots} slots, with all events folded"
        yield Row(f"what pictures take {name} in {folded:.1%}", f"{drawn:.1%}", "<= 3 %")


def view_of(num_slots: int, size: tuple[int, int], *, every_step: bool) -> TimedView:
    """Return a view of a terminal of that size."""
    terminal = Null(*size)
    plan = RunPlan("in.jsonl", "fcfs", num_slots, None, is_timed=False)
    return TimedView(plan, Gauges(), terminal, ScreenLive(terminal), pace=Pace(float(every_step)))


def ms_per_frame(num_slots: int, size: tuple[int, int]) -> float:
    """Return the CPU time of a frame of a full batch, in which nothing happens."""
    view = view_of(num_slots, size, every_step=True)
    for slot in range(num_slots):
        arrival = ArriveEvent(0, 0.0, f"request-{slot}", 0, "input", 5, 9999)
        view.follow([arrival, AdmitEvent(0, 0.0, f"request-{slot}", 0, slot, "empty")])
    for step in range(2 * NUM_FRAMES):
        if step == NUM_FRAMES:  # strips are long by now
            began = time.process_time()
        view.after_step(7 * step)
    return (time.process_time() - began) / NUM_FRAMES * 1000


def ms_per_table(num_slots: int, size: tuple[int, int]) -> float:
    """Return the CPU time of the same as a Table in a Live."""
    with Path(os.devnull).open("w") as null:
        console = Console(file=null, force_terminal=True, width=size[0], height=size[1])
        with Live(console=console, auto_refresh=False) as live:
            began = time.process_time()
            for frame in range(NUM_FRAMES // 10):
                table = Table(*TABLE_COLUMNS, box=None)
                for slot in range(num_slots):
                    bar, strip = "█" * (frame % 8), "━" * (size[0] // 3)
                    table.add_row(str(slot), f"request-{slot}", "decode", bar, "9/9999", strip)
                live.update(table, refresh=True)
            return (time.process_time() - began) / (NUM_FRAMES // 10) * 1000


def shares_of_time(num_slots: int, size: tuple[int, int]) -> tuple[float, float]:
    """Return which share of the time pictures take, and which it takes to follow the events.

    Of an engine alone: a run that reads and writes files takes twice its time.
    """
    engine = Engine(SimulatedModel(), num_slots)
    requests = iter([Request(**row) for row in workload.rows(40_000)])
    view = view_of(num_slots, size, every_step=False)
    began = time.monotonic()
    while True:
        while engine.wants_request and (request := next(requests, None)) is not None:
            engine.enqueue(request)
        if not engine.has_work:
            break
        view.follow(engine.step().events)
        view.after_step(engine.num_steps - 1)
    seconds = time.monotonic() - began
    return view.seconds / seconds, view.fold_seconds / seconds
