"""What a live view knows of several workers is what it would know of each, by its own steps."""

from collections import deque
from random import Random

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests
from worker_runs import worker_runs

from batcher.trace.run import event_of_worker
from cli.screen.live_picture import Scene, Strips, picture
from cli.screen.live_state import Moment, RunState
from cli.screen.theme import UNICODE
from cli.screen.view import GaugeReading, RunPlan

BATCH = 4


def states_of(drawn, num_workers, seed):
    """The state of a run of which each worker has made some steps, and those of the workers."""
    draw = Random(seed)
    named = [replace(request, id=f"r{number}") for number, request in enumerate(drawn)]
    runs = worker_runs(named, num_workers, BATCH, draw)
    whole = RunState(num_workers * BATCH, num_workers)
    own = [RunState(BATCH) for _ in runs]
    for worker, run in enumerate(runs):
        step = draw.randrange(max(run.engine.num_steps, 1))
        whole.paces[worker] = own[worker].paces[0] = step
        for event in run.events[1:-1]:
            if event.step <= step:
                own[worker].fold.take(event)
                whole.fold.take(event_of_worker(event, worker, BATCH))
    for state in (whole, *own):
        state.catch_up()
    return whole, own


@given(st.lists(english_requests(), max_size=20), st.integers(2, 4), st.integers(0, 2**32))
@examples(60)
def test_it_knows_of_all_what_it_knows_of_each(drawn, num_workers, seed):
    whole, own = states_of(drawn, num_workers, seed)
    last = max(whole.paces)
    assert whole.num_tokens(last) == sum(each.num_tokens(last) for each in own)
    assert whole.num_busy(last) == sum(each.num_busy(last) for each in own)
    for name in ("num_done", "num_failed", "num_preempted"):
        assert getattr(whole, name) == sum(getattr(each, name) for each in own)
    for name in ("num_asked", "num_found"):
        assert getattr(whole.fold, name) == sum(getattr(each.fold, name) for each in own)
    slots = [slot for each in own for slot in each.slots]
    for slot, alone in zip(whole.slots, slots, strict=True):
        assert slot.label == alone.label
        assert slot.outcome == alone.outcome
        for ask in ("is_busy", "is_prefilling", "busy_steps", "tokens_after"):
            assert getattr(slot, ask)(last) == getattr(alone, ask)(last)


def scene_of(whole, num_workers):
    last = max(whole.paces)
    num_slots = len(whole.slots)
    plan = RunPlan("r", "fcfs", num_slots, 40, is_timed=False, num_workers=num_workers)
    strips = Strips(whole.slots, UNICODE)
    strips.extend(last, [slot.take_mark() for slot in whole.slots])
    moment = Moment(last, whole.num_tokens(last), 3.0, 10.0, 1.0)
    marks = [""] * len(whole.slots)
    gauges = GaugeReading(0.0, 0, None, None)
    return Scene(whole, plan, gauges, UNICODE, strips, moment, marks, [], [], deque([0.5]))


@given(st.lists(english_requests(), min_size=1, max_size=20), st.integers(0, 2**32))
@examples(10)
def test_every_slot_of_four_workers_is_on_a_small_screen(drawn, seed):
    whole, _ = states_of(drawn, 4, seed)
    lines = picture(scene_of(whole, 4), 79, 23, has_gantt=True)
    assert len(lines) <= 23
    texts = ["".join(text for text, _ in line) for line in lines]
    assert all(len(text) <= 79 for text in texts)
    for worker in range(4):
        for slot in range(worker * BATCH, (worker + 1) * BATCH):
            assert any(f"w{worker} {slot}" in text for text in texts)
