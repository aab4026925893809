"""What the live view knows of a run, folded from its events, against what a slow look finds."""

from collections import deque
from random import Random

import numpy as np
import pytest
from emulated_run import Run, feed
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests
from reference_paged import paged_workloads, play_paged
from reference_units import play_units, unit_workloads
from worker_runs import worker_runs

from batcher.events import AdmitEvent, ArriveEvent, FinishEvent, JumpEvent, RejectEvent
from batcher.trace.run import event_of_worker
from cli.screen.live_picture import Scene, Strips, picture
from cli.screen.live_state import MAX_UNSEEN, Moment, QueueDepths, RunHistory, RunState
from cli.screen.theme import UNICODE
from cli.screen.view import GaugeReading, RunPlan
from cli.views.gantt import Scale


def observe(state, events):
    feed(state.fold, events)
    state.catch_up()


@given(unit_workloads(), st.integers(0, 2**32))
def test_requests_are_done_when_all_their_samples_are(workload, seed):
    units, batch = workload
    run = play_units(units, batch, seed)
    state = RunState(batch)
    ends = {unit.id: [] for unit in units}
    for stay in run.stays:
        ends[stay.id].append(stay.end)
    stays = [stay for stay in run.stays if stay.role != "negative"]
    jumps = [event for event in run.events if isinstance(event, JumpEvent)]
    for step in range(len(run.labels)):
        observe(state, [e for e in run.events[1:-1] if e.step == step])
        assert state.num_done == sum(max(ended) <= step + 1 for ended in ends.values())
        rows = [state.row(slot, step, step) for slot in range(batch)]
        assert [row.request is None for row in rows] == [not label for label in run.labels[step]]
        num_chosen = sum(max(0, min(stay.end, step + 1) - stay.start) for stay in stays)
        num_forced = sum(jump.tokens for jump in jumps if jump.step <= step)
        assert state.num_tokens(step) == num_chosen + num_forced
    errors = [stay.outcome for stay in run.stays].count("error")
    assert state.num_failed == errors
    assert not list(state.fold.open)
    assert not state._num_others


def events_by_step(events):
    found = {}
    for event in events[1:-1]:
        step = event.step + len(getattr(event, "ends", [None])) - 1
        found.setdefault(step, []).append(event)
    return found


@given(paged_workloads())
def test_a_preempted_row_leaves_its_slot_and_keeps_its_tokens(workload):
    jobs, limits = workload
    limits = limits._replace(is_prefill_first=False)  # standstills are told a little later
    run = play_paged(jobs, limits)
    by_step = events_by_step(run.events)
    state = RunState(limits.batch)
    lengths = {job.id: job.length for job in jobs}
    for step, labels in enumerate(run.slots):
        observe(state, by_step.get(step, []))
        rows = [state.row(slot, step, step) for slot in range(limits.batch)]
        assert [row.label or None for row in rows] == labels
        for row in rows:
            if row.request is not None:
                assert row.num_tokens == run.tokens[step][row.label]
                assert row.max_tokens == lengths[row.label]
                is_prefill = run.states[row.label][step].phase == "prefill"
                assert row.request.finish or (row.phase == "prefill") == is_prefill
    assert state.num_done == len(jobs)
    assert state.num_tokens(len(run.slots)) == sum(lengths.values())
    assert not list(state.fold.open)


def test_tokens_to_come_are_estimated_from_what_was_used_of_max_tokens():
    state = RunState(2)
    for name, slot in (("a", 0), ("b", 1)):
        observe(state, [ArriveEvent(0, 0.0, name, 0, "input", 5, 100)])
        observe(state, [AdmitEvent(0, 0.0, name, 0, slot, "empty")])
    assert state.num_tokens_left(9, 0) == 180  # what runs may use all of it
    assert state.num_tokens_left(9, 8) == 180 + 8 * 100
    observe(state, [FinishEvent(9, 9.0, "a", 0, 0, "stop", None, 10)])
    assert state.num_tokens_left(9, 8) == pytest.approx(55 - 10 + 8 * 55)
    assert state.num_tokens_left(39, 0) == pytest.approx(40)  # it may double, past half of 55
    assert state.num_tokens_left(79, 0) == pytest.approx(20)  # but ends with its max_tokens
    observe(state, [FinishEvent(9, 9.0, "b", 0, 1, "stop", None, 10)])
    assert state.num_tokens_left(9, 8) == pytest.approx(8 * 10)


@given(
    seed=st.integers(0, 2**32),
    num_slots=st.integers(1, 40),
    length=st.sampled_from([5, 60, 511, 512, 513, 1024, 3000, 3072]),
)
def test_the_history_is_the_mean_of_what_a_slow_look_finds(seed, num_slots, length):
    rng = Random(seed)
    past = RunHistory(num_slots)
    used = np.zeros((num_slots, length))
    stays, held = [], []
    for slot in range(num_slots):
        end = 0
        while end < length:
            start = end + rng.randrange(9)
            end = min(start + 1 + rng.randrange(rng.choice([3, length])), length)
            if start < end:
                used[slot, start:end] = 1
                if end == length and rng.random() < 0.5:
                    held.append((slot, start))
                else:
                    stays.append((slot, start, end))
    rng.shuffle(stays)
    for stay in stays:
        past.held(*stay)
    size = past.steps_per_cell
    num_cells, whole = length // size, length // size * size
    if length == whole:  # so what is shown are cells
        means = used.reshape(num_slots, num_cells, size).mean(axis=2)
        found = past.used(length, num_cells, held)
        for row, slots in enumerate(past.rows):
            assert np.allclose(found[row], means[slots.start : slots.stop].sum(axis=0))
    for columns in (1, 7, 60):
        total = past.used(length, columns, held).sum() * length / columns
        assert total == pytest.approx(used.sum())


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 70), st.randoms())
def test_a_cell_of_the_queue_is_the_longest_it_was_in_its_steps(lengths, num_cells, random):
    known = sorted({0, *random.choices(range(len(lengths)), k=len(lengths))})
    depths = QueueDepths()
    for step in known:
        depths.add(step, lengths[step])
    num_steps = len(lengths)
    in_force = [lengths[max(k for k in known if k <= step)] for step in range(num_steps)]
    assert [depths.at(step) for step in range(num_steps)] == in_force
    scale = Scale(range(num_steps), num_cells)
    highest = [max(in_force[step] for step in scale.steps_at(n)) for n in range(num_cells)]
    assert depths.highest(num_steps, num_cells).tolist() == highest


@given(unit_workloads(), st.integers(0, 2**32), st.integers(1, 6))
def test_a_cell_of_a_strip_stands_for_all_steps_since_the_last(workload, seed, stride):
    units, batch = workload
    run = play_units(units, batch, seed)
    state = RunState(batch)
    strips = Strips(state, UNICODE)
    last = 0
    for step in range(len(run.labels)):
        observe(state, [e for e in run.events[1:-1] if e.step == step])
        if (step + 1) % stride and step + 1 < len(run.labels):
            continue
        strips.extend(step)
        for slot in range(batch):
            steps = range(last, step + 1)
            busy = sum(run.labels[i][slot] is not None for i in steps)
            admitted = sum(stay.slot == slot and stay.start in steps for stay in run.stays)
            [(cell, _)] = strips.last(slot, 1)
            if cell == "✗":
                failed = [
                    stay for stay in run.stays if stay.outcome in ("error", "aborted", "lost")
                ]
                assert any(stay.slot == slot and stay.end - 1 in steps for stay in failed)
            elif admitted >= 2:
                assert (cell == "█") == (busy == len(steps))
            else:
                assert (cell == "┃") == (admitted == 1)
                assert (cell == "·") == (not admitted and 2 * busy < len(steps))
        last = step + 1


def test_ends_and_bad_lines_wait_for_a_frame_but_not_many():
    run = Run([])
    run.clock.now = 0.0  # before the first frame, which is long in coming
    state = run.view._run
    for step in range(3 * MAX_UNSEEN):
        feed(run.view.fold, [FinishEvent(step, 0.0, f"r{step}", 0, None, "aborted", None, 0)])
        run.view.after_step(step)
        assert len(state.fold.news) < MAX_UNSEEN
    assert state.num_done >= 2 * MAX_UNSEEN
    for line in range(3 * MAX_UNSEEN):
        feed(run.view.fold, [RejectEvent(9, 9.0, str(line), 0, "unknown-field")])
        run.view.keep_up()  # no step is taken
        assert len(state.fold.news) < MAX_UNSEEN
    assert run.screen.written == []


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
    for name in ("num_done", "num_failed", "num_preempted"):
        assert getattr(whole, name) == sum(getattr(each, name) for each in own)
    for name in ("num_asked", "num_found"):
        assert getattr(whole.fold, name) == sum(getattr(each.fold, name) for each in own)
    for slot in range(whole.num_slots):
        alone, number = own[slot // BATCH], slot % BATCH
        row, expected = whole.row(slot, last, last), alone.row(number, last, last)
        assert (row.label, row[1:]) == (expected.label, expected[1:])
        assert whole.stays(slot) == alone.stays(number)


def scene_of(whole, num_workers):
    last = max(whole.paces)
    num_slots = whole.num_slots
    plan = RunPlan("r", "fcfs", num_slots, 40, is_timed=False, num_workers=num_workers)
    strips = Strips(whole, UNICODE)
    strips.extend(last)
    moment = Moment(last, whole.num_tokens(last), 3.0, 10.0, 1.0)
    gauges = GaugeReading(0.0, 0, None, None)
    return Scene(whole, plan, gauges, UNICODE, strips, moment, busy=deque([0.5]))


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
