"""`batchdecode demo`: plays a small run slowly, and explains each key moment in a sentence."""

import sys
from typing import Annotated

import typer

from batcher.engine.engine import Engine
from batcher.events import Event, FinishEvent, RunEvent
from batcher.models.simulated import SimulatedModel
from batcher.request import Request
from batcher.trace.run import SlotSpan
from batcher.trace.timeline import Timeline

from ..command import command
from ..options import Color, color_option
from ..screen.terminal import can_animate, can_print, encoding_of, terminal_size, wants_color

BATCH_SIZE = 3
SPEED = 8.0  # steps per second
MAX_WIDTH = 80
REQUESTS = (
    Request(id="poem", prompt="Write a poem about the sea", max_tokens=20),
    Request(id="name", prompt="Name a tree that grows here", max_tokens=5),
    Request(id="sentence", prompt="Write one sentence", max_tokens=24, stop_sequence=["."]),
    Request(id="joke", prompt="Tell me a joke", max_tokens=11),
    Request(id="letter", prompt="Write a letter to a friend", max_tokens=16),
    Request(id="yes-no", prompt="Is it raining?", max_tokens=3),
)
NEXT = """
Try next:
  batchdecode run -p "Once upon a time"
      a run of your own; the text is nonsense by design
  batchdecode run -p "Hello" --model smollm2 --chat --max-tokens 40
      a real model
  batchdecode run requests.jsonl --trace run.trace.jsonl
      a file of requests, then: batchdecode trace run.trace.jsonl
  batchdecode help
      the manual
"""


def demo(*, color: Annotated[Color, color_option()] = "auto") -> int:
    """Play a small run slowly: continuous batching explained in fifteen seconds."""
    engine = Engine(SimulatedModel(), BATCH_SIZE)
    run, events = engine.run_event(), list[Event]()
    for request in REQUESTS:
        engine.add(request)
    while engine.has_work:
        events += engine.step().events
    events.append(engine.end_event())
    timeline = Timeline.from_events([run, *events])
    captions = captions_of(timeline, events)
    if not can_animate(1):
        typer.echo("".join(f"step {step}: {text}\n" for step, text in captions.items()))
    elif status := _play(run, events, captions, color):
        return status
    from ..screen.theme import colored  # noqa: PLC0415 - after the run
    from ..views.gantt import render_gantt  # noqa: PLC0415 - as above

    width = min(terminal_size(1).columns, MAX_WIDTH)
    is_unicode = can_print(encoding_of(sys.stdout.encoding))
    gantt = render_gantt(timeline, width=width, height=None, ascii_only=not is_unicode)
    has_color = wants_color(color, 1)
    lines = colored(gantt) if has_color else ["".join(text for text, _ in line) for line in gantt]
    typer.echo("\n".join(lines), color=has_color)
    typer.echo(NEXT, nl=False)
    return 0


def captions_of(timeline: Timeline, events: list[Event]) -> dict[int, str]:
    """Return a sentence for each key moment of the run, by step."""
    spans, num_slots = list(timeline.spans), timeline.num_slots
    captions = {
        0: f"{len(spans)} requests share {num_slots} slots. The first {num_slots} start; every "
        "step gives each of them one token."
    }
    last = dict[int, SlotSpan]()  # by slot
    for span in spans:
        before = last.get(span.slot)
        if before is not None and before.end == span.start:
            captions[span.start] = (
                f"{before.label} has finished, so {span.label} takes slot {span.slot} at once: "
                "the slot is refilled without an empty step."
            )
            break
        last[span.slot] = span
    for event in events:
        if isinstance(event, FinishEvent) and event.reason == "stop" and event.stop_reason:
            captions[event.step] = (
                f"{event.id} has generated its stop sequence {event.stop_reason!r}: it ends early, "
                f"after {event.tokens} tokens."
            )
            break
    tail = min(span.end for span in spans if span.end > spans[-1].start)
    captions[tail] = (
        "No request is waiting any more: free slots stay empty, and the batch is only partly full."
    )
    return dict(sorted(captions.items()))


def _play(run: RunEvent, events: list[Event], captions: dict[int, str], color: Color) -> int:
    from ..views.player import Player, StepRange, play  # noqa: PLC0415 - only on a terminal
    from ..views.recording import Recording  # noqa: PLC0415 - as above

    recording = Recording.from_events([run, *events])
    return play(
        color,
        lambda terminal: Player(
            recording,
            "demo",
            terminal,
            span=StepRange(0, recording.num_steps - 1),
            step=0,
            speed=SPEED,
            found={},
            captions=captions,
            ends=True,
        ),
    )


COMMANDS = {"demo": command(demo)}
