"""A made-up run shown on the screen of a terminal emulator."""

import os

import pyte

from batcher.events import AdmitEvent, ArriveEvent, FinishEvent
from cli.screen.live import InlineLive, LiveView, ScreenLive
from cli.screen.terminal import Pace, Terminal
from cli.screen.view import GaugeReading, RunPlan

ALTERNATE_SCREEN = 1049 << 5  # as pyte counts private modes


class Emulator(pyte.HistoryScreen):
    """One that has an alternate screen, too."""

    kept = None

    def set_mode(self, *modes, **settings):
        super().set_mode(*modes, **settings)
        if ALTERNATE_SCREEN in self.mode and self.kept is None:
            self.kept = self.buffer.copy(), self.cursor.x, self.cursor.y
            self.buffer.clear()

    def reset_mode(self, *modes, **settings):
        super().reset_mode(*modes, **settings)
        if ALTERNATE_SCREEN not in self.mode and self.kept is not None:
            lines, self.cursor.x, self.cursor.y = self.kept
            self.buffer.clear()
            self.buffer.update(lines)
            self.kept = None


class Screen(Terminal):
    """A terminal that is looked at: writes go into an emulator."""

    def __init__(self, columns=80, rows=24, *, encoding="utf-8", has_color=False):
        super().__init__(-1, encoding, has_color)
        emulator = Emulator(columns, rows, history=10_000, ratio=1)
        stream = pyte.ByteStream(emulator)
        vars(self).update(emulator=emulator, stream=stream, written=[], is_foreground=True)

    @property
    def is_alternate(self):
        return self.emulator.kept is not None

    @property
    def size(self):
        return os.terminal_size((self.emulator.columns, self.emulator.lines))

    @property
    def is_ours(self):
        return self.is_foreground

    def write_bytes(self, data):
        self.written.append(data)
        self.stream.feed(data.replace(b"\n", b"\r\n"))  # as the tty does

    def lines(self):
        return [line.rstrip() for line in self.emulator.display]

    def cells(self, row):
        buffer = self.emulator.buffer[row]
        return "".join(buffer[x].data or " " for x in range(self.emulator.columns))

    def all_lines(self):
        past = [
            "".join(row[x].data for x in range(self.emulator.columns)).rstrip()
            for row in self.emulator.history.top
        ]
        return past + self.lines()

    def text(self):
        return "\n".join(self.lines()).strip("\n")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Fingers:
    """A keyboard that a test presses."""

    is_gone = False

    def __init__(self):
        self.keys, self.is_released = [], False

    def pressed(self):
        keys, self.keys, self.is_released = self.keys, [], False
        return keys

    def wait(self, seconds):
        """A key is there at once, or never."""

    def release(self):
        self.is_released = True


class Gauges:
    """What a run tells that has no engine."""

    current_step = None
    now = 0.0
    num_free = num_queued = num_coming = 0
    next_up = None
    block_use = None
    upcoming = ()
    knows_all = False
    waiting = ()

    def __init__(self):
        self.texts = {}

    def read_gauges(self):
        queue = self.num_queued, self.num_coming, self.waiting
        return GaugeReading(self.now, self.num_free, self.next_up, self.block_use, *queue)

    def peek(self, request_id, index, num_tokens):
        return self.texts.get(request_id)

    def find_upcoming(self, text):
        return next((name for name in self.upcoming if text in name), None)

    def knows_upcoming(self):
        return self.knows_all


def feed(fold, events):
    for event in events:
        fold.take(event)


class Run:
    """A batch that decodes made-up requests, (id, generated, max_tokens) each, into a view."""

    def __init__(
        self,
        requests,
        batch_size=8,
        screen=None,
        *,
        display=ScreenLive,
        every_step=False,
        keyboard=None,
        has_pace=True,
        queued=0,
        **plan,
    ):
        self.screen = screen or Screen()
        self.clock, self.gauges = Clock(), Gauges()
        self.gauges.num_queued = queued
        self.pace = Pace(0.1 if every_step else 0.0)
        known = {"title": "requests.jsonl", "policy": "fcfs", "is_timed": False}
        self.view = LiveView(
            RunPlan(batch_size=batch_size, **known | {"total": len(requests)} | plan),
            self.gauges,
            self.screen,
            display(self.screen),
            pace=self.pace if has_pace else None,
            keyboard=keyboard,
            clock=self.clock,
        )
        self.clock.now = 1.0  # when it is time for a picture
        self.todo = requests[::-1]
        self.slots = [None] * batch_size
        self.step_index = 0
        self.seconds_per_step = 1.0
        self.is_admitting = True

    @property
    def is_over(self):
        return not self.todo and not any(self.slots)

    def step(self, results=b""):
        step, events = self.step_index, []
        for slot, held in enumerate(self.slots):
            if held is None and self.todo and self.is_admitting:
                name, num_tokens, max_tokens = self.todo.pop()
                events.append(ArriveEvent(0, 0.0, name, 0, "input", 5, max_tokens))
                events.append(AdmitEvent(step, 0.0, name, 0, slot, "empty"))
                self.slots[slot] = (name, step + num_tokens - 1, num_tokens, max_tokens)
        for slot, held in enumerate(self.slots):
            if held is not None and held[1] == step:
                name, _, num_tokens, max_tokens = held
                why = "length" if num_tokens == max_tokens else "stop"
                events.append(FinishEvent(step, 0.0, name, 0, slot, why, None, num_tokens))
                self.slots[slot] = None
        feed(self.view.fold, events)
        if results:
            self.view.write_results(results)
        self.gauges.num_queued = len(self.todo)
        self.view.after_step(step)
        self.step_index += 1
        self.clock.now += self.seconds_per_step

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self


def inline(*arguments, **settings):
    return Run(*arguments, display=InlineLive, **settings)


def long_requests(count):
    return [(f"req-{n}", 99, 100) for n in range(count)]
