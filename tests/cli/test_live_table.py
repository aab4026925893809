"""What the live view shows, seen on the screen of a terminal emulator."""

from random import Random

import pytest
from emulated_run import Clock, Run, Screen, long_requests
from hypothesis import given
from hypothesis import strategies as st
from reference_paged import CROWDED, Limits, PagedJob, paged_workloads, play_paged
from reference_units import beams, guided, play_units, samples, unit_workloads

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    DropEvent,
    EndEvent,
    FinishEvent,
    HoldEvent,
    JumpEvent,
    PrefillEvent,
    RejectEvent,
    RunEvent,
    StepsEvent,
)
from cli.screen.live import LiveView
from cli.screen.live_header import Moment, facts, format_seconds
from cli.screen.live_state import MAX_STRIP, RunState
from cli.screen.live_table import ASCII, BOXES, plan_columns


def test_the_screen_of_a_small_run_step_by_step():
    run = Run([("a", 3, 3), ("b", 1, 4), ("c", 2, 8), ("d", 4, 4)], batch_size=2).steps(3)
    assert run.screen.text() == (
        "requests.jsonl  step 2  3/4 done  1 queued                   2.0 tok/step  0:02\n"
        "\n"
        "slot  request  phase    tokens           last 38 steps (┃ = admitted)\n"
        "   0  a        length   ████████    3/3  ┃━━\n"
        "   1  c        stop     ██          2/8  ┃┃╌"
    )
    run.step()
    assert run.screen.text() == (
        "requests.jsonl  step 3  3/4 done  0 queued                   1.8 tok/step  0:03\n"
        "\n"
        "slot  request  phase    tokens           last 38 steps (┃ = admitted)\n"
        "   0  d        prefill  ██          1/4  ┃━━┃\n"
        "   1  -        idle                      ┃┃╌"
    )


def test_a_request_that_was_just_admitted_is_in_prefill_then_decodes():
    run = Run(long_requests(1)).steps(1)
    assert "req-0    prefill" in run.screen.text()
    assert "req-0    decode" in run.steps(1).screen.text()


def test_the_strip_scrolls_when_it_is_full():
    run = Run([("a", 30, 30), ("b", 30, 40)], batch_size=1).steps(50)
    assert run.screen.lines()[4].endswith("━" * 17 + "┃" + "╌" * 19)


def test_the_header_counts_failures_and_says_so_only_then():
    run = Run(long_requests(9), batch_size=1).steps(1)
    assert "failed" not in run.screen.text()
    run.view.observe([RejectEvent(0, 0.0, "x", 0, "unknown-field")])
    run.view.observe([FinishEvent(0, 0.0, "y", 0, None, "error", None, 0)])
    run.steps(1)
    assert "2/9 done  2 failed" in run.screen.text()


def test_a_pipe_has_no_total_and_no_queue():
    run = Run(long_requests(1), total=None, every_step=True).steps(1)
    run.clock.now = 0.0
    run.view.after_step(0, None)
    header = run.screen.lines()[1].split()
    assert header == ["requests.jsonl", "step", "0", "0", "done", "1.0", "tok/step", "0:00"]


def test_a_request_without_a_slot_is_counted_and_forgotten():
    state = RunState(1)
    state.observe([ArriveEvent(0, 0.0, "a", 0, "input", 5, 0)])
    state.observe([FinishEvent(0, 0.0, "a", 0, None, "length", None, 0)])
    assert (state.num_done, state.num_failed, state.num_tokens(9)) == (1, 0, 0)
    assert not state._max_tokens


def shown_after(events, step, total, batch_size=4):
    """Return the lines of the picture after `step`, the events of later ones not seen."""
    screen = Screen()
    view = LiveView(
        title="t",
        batch_size=batch_size,
        total=total,
        terminal=screen,
        every_step=True,
        clock=Clock(),
    )
    seen = [e for e in events if not isinstance(e, RunEvent | EndEvent) and e.step <= step]
    view.observe(seen)
    view.after_step(step, 0)
    return screen.lines()


def test_samples_partners_and_beams_are_rows_that_say_what_they_are():
    units = [*guided("g", 2, 1), *beams("b", 2, 4, num_results=1)]
    events = play_units(units, 4).events
    assert shown_after(events, 0, 2)[4:8] == [
        "   0  g        prefill             1/99  ┃",
        "   1  g~       prefill                   ┃",
        "   2  g#1      length              1/99  ┃",
        "   3  g#1~     unused                    ┃",
    ]
    assert shown_after(events, 1, 2)[4:8] == [
        "   0  g        length   ▏          2/99  ┃━",
        "   1  g~       unused                    ┃━",
        "   2  b        prefill             1/99  ┃┃",
        "   3  b#1      prefill             1/99  ┃┃",
    ]
    assert shown_after(events, 2, 2)[6:8] == [
        "   2  b        beam     ▏          2/99  ┃┃╌",
        "   3  b#1      beam     ▏          2/99  ┃┃╌",
    ]
    assert "g~       partner " in shown_after(play_units(guided("g", 9), 4).events, 1, 1)[5]


def test_progress_is_tokens_once_a_constraint_has_forced_some():
    events = play_units(samples("a", 9), 1).events
    jumps = [JumpEvent(0, 0.0, "a", 0, 0, 30), JumpEvent(2, 2.0, "a", 0, 0, 40)]
    lines = shown_after([*events, *jumps], 3, 1, batch_size=1)
    assert lines[4].startswith("   0  a        decode   █████▉    74/99  ┃")
    state = RunState(1)
    state.observe([*events[1:3], jumps[0]])
    assert state.num_tokens(0) == 31


@given(unit_workloads(), st.integers(0, 2**32))
def test_requests_are_done_when_all_their_samples_are(workload, seed):
    units, batch = workload
    run = play_units(units, batch, seed)
    state = RunState(batch)
    ends = {unit.id: [] for unit in units}
    for stay in run.stays:
        ends[stay.id].append(stay.end)
    rows = [stay for stay in run.stays if stay.role != "negative"]
    jumps = [event for event in run.events if isinstance(event, JumpEvent)]
    for step in range(len(run.labels)):
        state.observe(e for e in run.events[1:-1] if e.step == step)
        assert state.num_done == sum(max(ended) <= step + 1 for ended in ends.values())
        assert state.num_busy(step) == batch - run.labels[step].count(None)
        num_chosen = sum(max(0, min(row.end, step + 1) - row.start) for row in rows)
        num_forced = sum(jump.tokens for jump in jumps if jump.step <= step)
        assert state.num_tokens(step) == num_chosen + num_forced
    errors = [stay.outcome for stay in run.stays].count("error")
    assert state.num_failed == errors
    assert not state._max_tokens
    assert not state._num_others


def test_a_sample_that_failed_and_was_dropped_is_no_failed_output():
    state = RunState(2)
    run = play_units([*samples("s", 1, 2, outcome="error")], 2)
    state.observe([*run.events[1:-1], DropEvent(1, 1.0, "s", 0, "error")])
    assert (state.num_done, state.num_failed) == (1, 1)
    state.observe([DropEvent(1, 1.0, "s", 1, "length")])
    assert state.num_failed == 1


def test_samples_without_a_slot_are_one_request_that_is_done():
    for role in ("sample", "beam"):
        state = RunState(1)
        ends = [FinishEvent(0, 0.0, "x", i, None, "aborted", None, 0, role) for i in range(3)]
        state.observe(ends)
        assert state.num_done == 1
    state = RunState(1)
    for index in range(3):
        state.observe([ArriveEvent(0, 0.0, "a", index, "input", 5, 0)])
        state.observe([FinishEvent(0, 0.0, "a", index, None, "length", None, 0)])
    assert state.num_done == 1
    assert not state._max_tokens


@pytest.mark.parametrize(
    ("columns", "rows", "batch_size", "num_rows"),
    [
        (80, 24, 8, 8),
        (80, 24, 256, 18),
        (120, 40, 64, 34),
        (60, 20, 1, 1),
        (60, 20, 16, 14),
        (40, 10, 8, 6),
        (30, 6, 64, 2),
        (30, 4, 64, 0),
        (30, 2, 64, 0),
        (10, 1, 1, 0),
        (1, 1, 1, 0),
        (1, 24, 8, 8),
    ],
)
def test_the_picture_fits_any_terminal_and_leaks_no_row(columns, rows, batch_size, num_rows):
    run = Run(long_requests(300), batch_size, Screen(columns, rows)).steps(20)
    if columns > 20:
        names = [line for line in run.screen.lines() if "req-" in line]
        assert len(names) == num_rows
        assert all(len(line) < columns for line in run.screen.lines())
    run.view.close()
    assert len(run.screen.all_lines()) <= rows + 2  # only the lines for what follows have scrolled
    assert sum("tokens" in line for line in run.screen.all_lines()) <= 1


def test_slots_that_have_no_row_are_counted():
    run = Run([(f"r{n}", n + 1, 300) for n in range(40)], 64, Screen(80, 12)).steps(12)
    assert run.screen.lines()[10] == "+56 more slots, 29 busy"


@pytest.mark.parametrize(
    ("width", "visible"),
    [
        (79, ["phase", "bar", "strip"]),
        (57, ["phase", "bar", "strip"]),
        (50, ["phase", "bar"]),
        (40, ["bar"]),
        (30, []),
    ],
)
def test_columns_go_as_the_width_shrinks(width, visible):
    columns = plan_columns(width, 4, 12, 7)
    assert [name for name in ("phase", "bar", "strip") if getattr(columns, name)] == visible


@given(st.integers(24, 400), st.integers(7, 36), st.integers(6, 9))
def test_columns_never_exceed_the_width(width, longest_request, longest_progress):
    columns = plan_columns(width, 4, longest_request, longest_progress)
    shown = [columns.slot, columns.request, columns.progress]
    shown += [cells for cells in (columns.phase, columns.strip) if cells]
    bar = columns.bar + 1 if columns.bar else 0
    assert sum(shown) + bar + 2 * (len(shown) - 1) <= width
    assert columns.request >= 1
    assert columns.strip <= MAX_STRIP


def test_colour_is_used_only_where_it_is_wanted():
    colorful = Run(long_requests(1), screen=Screen(has_color=True)).steps(1).screen
    plain = Run(long_requests(1)).steps(1).screen
    assert b"m" in b"".join(colorful.written).split(b"\x1b[33")[1][:1]
    assert b"\x1b[3" not in b"".join(plain.written)
    assert colorful.lines() == plain.lines()


def test_without_unicode_the_picture_is_ascii():
    requests = [("é", 2, 4), ("b", 9, 9)]
    run = Run(requests, batch_size=1, screen=Screen(encoding="latin-1")).steps(4)
    assert b"".join(run.screen.written).isascii()
    assert run.screen.text().endswith("#           2/9  |=|-")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("evil\x1b[2J\nid", r"evil\x1b[2J\nid "),
        ("日本語", "日 本 語  "),
        ("request-number-00017", "request…r-00017"),
        ("x" * 1_000_000, "xxxxxxx…xxxxxxx"),
    ],
)
def test_any_id_stays_in_its_column(name, shown):
    run = Run([(name, 9, 9), ("b", 9, 9)], batch_size=2).steps(1)
    evil, harmless = run.screen.cells(4), run.screen.cells(5)
    assert evil[6:].startswith(shown)
    assert evil.index("prefill") == harmless.index("prefill")


def test_columns_only_grow():
    run = Run([("a-long-request", 1, 12345), ("b", 9, 9)], batch_size=1).steps(1)
    titles = run.screen.lines()[3]
    assert run.steps(3).screen.lines()[3] == titles


@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 5),
    width=st.integers(60, 140),
    num_steps=st.integers(1, 120),
)
def test_a_strip_shows_every_step_whatever_the_schedule(seed, batch_size, width, num_steps):
    rng = Random(seed)
    requests = [(str(n), rng.choice([1, 1, 2, 5, 40]), 40) for n in range(rng.randrange(1, 90))]
    screen = Screen(width, 24)
    run = Run(requests, batch_size, screen)
    run.seconds_per_step = 0.0  # so that only the first frame and the last are drawn
    painted = [""] * batch_size
    turns = [0] * batch_size
    for _ in range(num_steps):
        before = list(run.slots)
        run.is_admitting = rng.random() < 0.8
        num_admitted = len(run.todo) if run.is_admitting else 0
        run.step()
        for slot in range(batch_size):
            if before[slot] is None and num_admitted:
                num_admitted -= 1
                turns[slot] += 1
                painted[slot] += "┃"
            else:
                painted[slot] += " " if before[slot] is None else "╌━"[turns[slot] % 2]
    run.view.close()
    strip = plan_columns(width - 1, 4, 7, 6).strip
    start = screen.emulator.display[3].index("last")
    for slot, history in enumerate(painted):
        assert screen.lines()[4 + slot][start:] == history[-strip:].rstrip()
    num_tokens = sum(len(history.replace(" ", "")) for history in painted)
    assert run.view._run.num_tokens(run.step_index - 1) == num_tokens


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.9, "0:03"), (754, "12:34"), (3723, "1:02:03"), (0, "0:00")]
)
def test_time_reads_as_on_a_clock(seconds, text):
    assert format_seconds(seconds) == text


def test_ascii_and_boxes_have_the_same_parts():
    assert len(ASCII.turns) == len(BOXES.turns) == 2
    assert all(len(text) == 1 for text in (ASCII.admitted, ASCII.cut, BOXES.admitted, BOXES.cut))


def events_by_step(events):
    """The events of each step; figures come right after the step they end with."""
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
        state.observe(by_step.get(step, []))
        shown = [slot.label if slot.is_busy(step) else None for slot in state.slots]
        assert shown == labels
        for slot in state.slots:
            if slot.is_busy(step):
                assert slot.tokens_after(step) == run.tokens[step][slot.label]
                assert slot.max_tokens == lengths[slot.label]
                is_prefill = run.states[slot.label][step].phase == "prefill"
                assert slot.is_prefilling(step) == is_prefill
    assert state.num_done == len(jobs)
    assert state.num_tokens(len(run.slots)) == sum(lengths.values())
    assert not state._max_tokens
    assert not state._preempted


@given(paged_workloads())
def test_steps_that_compute_prompts_alone_give_the_others_no_tokens(workload):
    jobs, limits = workload
    run = play_paged(jobs, limits._replace(is_prefill_first=True))
    by_step = events_by_step(run.events)
    state = RunState(limits.batch)
    for step in range(len(run.slots)):
        events = by_step.get(step, [])
        state.observe(events)
        if any(isinstance(event, StepsEvent) for event in events):
            for slot in state.slots:
                if slot.is_busy(step):
                    assert slot.tokens_after(step) == run.tokens[step][slot.label]


def test_tokens_never_go_back_when_a_row_is_preempted():
    run = play_paged(CROWDED, Limits())
    state = RunState(2)
    by_step = events_by_step(run.events)
    counts = []
    for step in range(len(run.slots)):
        state.observe(by_step.get(step, []))
        counts.append(state.num_tokens(step))
    assert counts == sorted(counts)
    assert counts[-1] == 20


def test_a_long_prompt_is_in_prefill_until_its_first_token():
    events = play_paged([PagedJob("a", 9, 3)], Limits()).events
    phases = [shown_after(events, step, 1, batch_size=1)[4].split()[2] for step in range(4)]
    assert phases == ["prefill", "prefill", "prefill", "decode"]
    assert "0/3" in shown_after(events, 1, 1, batch_size=1)[4]


def test_a_preempted_row_that_is_aborted_in_the_queue_leaves_its_old_slot_alone():
    run = play_paged(CROWDED, Limits())
    state = RunState(2)
    state.observe([event for event in run.events[1:-1] if event.step < 8])
    state.observe([FinishEvent(8, 4.0, "b", 0, 1, "aborted", None, 7)])
    assert (state.num_done, state.num_tokens(7)) == (1, 15)
    assert not state.slots[1].is_busy(7)


def test_a_step_that_computes_what_was_forced_gives_no_token():
    state = RunState(1)
    state.observe(play_paged([PagedJob("a", 2, 9)], Limits()).events[1:3])
    state.observe([JumpEvent(1, 1.0, "a", 0, 0, 6), PrefillEvent(2, 2.0, "a", 0, 0, 3, 4)])
    assert [state.slots[0].tokens_after(step) for step in (2, 3)] == [8, 9]


def test_the_header_says_what_holds_back_the_first_of_the_queue():
    state = RunState(2)
    moment = Moment(3, None, None, 1.0, 0.0)
    state.observe([ArriveEvent(0, 0.0, "a", 0, "input", 3, 4), HoldEvent(0, 0.0, "a", 0, "kv", 5)])
    assert "held back: KV, needs 5 blocks" in [fact.text for fact in facts(state, moment)]
    state.observe([HoldEvent(1, 1.0, "a", 0, "tokens")])
    assert "held back: budget" in [fact.text for fact in facts(state, moment)]
    state.observe([AdmitEvent(2, 2.0, "a", 0, 0, "empty")])
    assert not any("held" in fact.text for fact in facts(state, moment))
