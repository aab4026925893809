"""Runs that were recorded while a live view with a frame a step showed them."""

import json
from contextlib import closing, nullcontext
from dataclasses import replace

from emulated_run import Clock, Screen
from hypothesis import strategies as st

from cli.options import SchedulingOptions
from cli.run.input import open_requests
from cli.run.run import RunSetup
from cli.run.run_options import RunOptions
from cli.screen.live import LiveView, ScreenLive
from cli.screen.terminal import Pace
from cli.screen.view import RunPlan
from cli.views.recording import SECONDS_PER_STEP

SETTINGS = (
    {},
    {"policy": "sjf"},
    {"max_batch_tokens": 9, "long_prefill_threshold": 5},
    {"kv_blocks": 12, "block_size": 4},
    {"kv_blocks": 12, "block_size": 4, "prefix_cache": "off", "capacity": "on-demand"},
    {"policy": "priority", "preempt_for": "priority"},
    {"profile": "constant:0.25"},
    {"draft": "ngram", "max_batch_tokens": 30},
)

_WORDS = st.integers(1, 40)
_REQUESTS = st.fixed_dictionaries(
    {"prompt_tokens": _WORDS, "max_tokens": st.integers(0, 12)},
    optional={
        "arrival_time": st.integers(0, 30),
        "priority": st.integers(0, 2),
        "n": st.integers(1, 3),
        "ignore_eos": st.just(value=True),
        "session": st.sampled_from("st"),
    },
)


def workloads():
    requests = _REQUESTS.filter(lambda request: not {"n", "session"} <= request.keys())
    return st.lists(requests, min_size=1, max_size=20)


def write_requests(path, requests):
    lines = []
    for number, request in enumerate(requests):
        length = request["prompt_tokens"]
        tokens = [7] * (length // 2) + [100 + number] * (length - length // 2)
        sampled = {"temperature": 1} if "n" in request else {}
        known = {"id": f"r{number}", "prompt_tokens": tokens}
        lines.append(json.dumps(request | sampled | known))
    path.write_text("\n".join(lines) + "\n")


class WatchedRun:
    """A run, its events, and the scene that a live view with a frame a step has after each step.

    `watch(scene)` is called after each step; what it returns is kept in `seen`.
    told_late: whether more was told after the last one, which the player shows with it.
    """

    def __init__(self, path, batch, settings, watch):
        options = RunOptions(
            input=[str(path)], batch=batch, scheduling=SchedulingOptions(**settings)
        )
        requests = open_requests(options, nullcontext)
        setup = RunSetup(replace(options, keep_going=True), requests)
        self.events, self.seen = [], []
        with requests, closing(setup.engine):
            loop = setup.loop()
            self._run(loop, setup.engine.run_event(), batch, watch)

    def _run(self, loop, run, batch, watch):
        clock, screen = Clock(), Screen(60, 8)
        plan = RunPlan("run", run.policy, batch, loop.source.total, is_timed=bool(run.step_time))
        view = LiveView(plan, loop, screen, ScreenLive(screen), pace=Pace(0.1), clock=clock)
        self.events.append(run)
        shown = 0
        for events, _, _ in loop:
            self.events += events
            for event in events:
                view.fold.take(event)
            self.told_late = loop.engine.num_steps == shown
            if not self.told_late:
                shown = loop.engine.num_steps
                view.after_step(shown - 1)
                self.seen.append(watch(view._scene))
                clock.now += SECONDS_PER_STEP
        self.events.append(loop.engine.end_event())


def watch_run(monkeypatch, path, batch, settings, watch):
    # This lets people read who has ended.
    monkeypatch.setattr("cli.screen.live.END_SECONDS", 0.0)
    return WatchedRun(path, batch, settings, watch)
