import re
from collections import Counter
from functools import cache

import msgspec
import pytest
from examples import mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from played_runs import PLAYED
from reference_paged import CROWDED, Limits, play_paged
from reference_schedule import DESIGN_JOBS, Job, jobs_of, timeline_of, workloads
from reference_units import beams, guided, play_units, samples

from batcher.events import DropEvent
from batcher.trace.run import Fork, SlotSpan, SpanPreemption, StepDrafts
from batcher.trace.timeline import Selection, Timeline
from cli.screen.live_state import RunState
from cli.screen.terminal import cell_width
from cli.screen.theme import HUES, colored
from cli.views.gantt import UNICODE, Scale, bar_row, choose_slots, draft_marks, headline
from cli.views.gantt import render_gantt as render_lines
from cli.views.svg import render_svg


def render_gantt(*arguments, **options):
    lines = render_lines(*arguments, **options)
    return ["".join(text for text, _ in line) for line in lines]


def gantt_of(jobs, batch=2, **options):
    return render_gantt(timeline_of(jobs, batch), **options)


def row_of(lines, name):
    return next(line for line in reversed(lines) if line.strip().startswith(name))


def test_the_example_of_the_design():
    assert gantt_of(DESIGN_JOBS, width=60) == [
        "7 steps · 2 slots · 71% busy · 4 requests",
        "                                              ┃ admitted",
        "  step 0           2           4           6",
        "       ┬───────────┬───────────┬───────────┬─────  busy",
        "slot 0 ┃a━━━━━━━━━━━━━━━━┃d━━━━━━━━━━━━━━━━━━━━━━  100%",
        "slot 1 ┃b━━━━┃c━━━━━━━━━━                           43%",
        " queue ██████▄▄▄▄▄▄▄▄▄▄▄▄                          max 2",
    ]


@cache
def long_run(num_jobs=400, batch=8, gap_after=200):
    """Return a busy run with one hole in the middle, in which nothing arrives for a while."""
    lengths = [16 + number * 37 % 120 for number in range(num_jobs)]
    arrivals = [0.0] * gap_after + [5000.0] * (num_jobs - gap_after)
    jobs = [
        Job(f"req-{number:04}", length, arrival)
        for number, (length, arrival) in enumerate(zip(lengths, arrivals, strict=True))
    ]
    jobs.insert(gap_after, Job("lonely", 4000, 0.5))
    return timeline_of(jobs, batch)


@pytest.mark.parametrize(
    ("slots", "told"),
    [
        ({3}, "8 slots, 3 shown"),
        ({0, 1, 2, 5, 7}, "8 slots, 0-2, 5 and 7 shown"),
        ({0, 2, 4, 6}, "8 slots, 4 of them shown"),
        (set(range(8)), "8 slots"),
        (set(), "8 slots"),
    ],
)
def test_the_title_says_which_slots_are_shown_of_all(slots, told):
    assert headline(long_run(), slots)[1] == told
    drawn = render_svg(long_run(), Selection(slots=frozenset(slots))).decode()
    assert f" · {told} · " in drawn


def test_many_slots_are_groups_above_and_a_choice_below():
    lines = render_gantt(timeline_of(jobs_of(*[40] * 3400), 256), width=80)
    assert sum("-" in line[:9] for line in lines) == 16
    assert any(line.strip().startswith("240-255") for line in lines)
    assert any(line.strip().startswith("+240 more slots") for line in lines)
    assert len(lines) < 50


def test_labels_leave_out_what_ids_have_in_common_and_mark_what_was_dropped():
    units = [*samples("user-7/chat-10/turn", 20, 20), *guided("user-7/chat-11/turn", 20)]
    lines = render_gantt(Timeline.from_events(play_units(units, 4).events), width=100)
    assert "ids user-7/chat-…/turn" in lines[1]
    starts = ["10━", "10#1━", "11━", "11~━"]
    for slot, start in enumerate(starts):
        assert row_of(lines, f"slot {slot}").startswith(f"slot {slot} ┃{start}")
    run = play_units(samples("s", 3, 4), 2)
    events = [*run.events[:-1], DropEvent(3, 3.0, "s", 0, "length"), run.events[-1]]
    lines = render_gantt(Timeline.from_events(events))
    assert lines[1].endswith("┃ admitted  o dropped  #n sample or beam n")
    assert "━o " in row_of(lines, "slot 0")
    assert "o" not in row_of(lines, "slot 1").removeprefix("slot")


def test_labels_of_wide_combining_and_escaped_characters_keep_the_columns():
    lines = gantt_of([Job("日本語", 5), Job("e\u0301te\u0301", 5), Job("b", 5)], 3)
    assert "┃日本語━" in row_of(lines, "slot 0")
    assert "┃e\u0301te\u0301━" in row_of(lines, "slot 1")
    assert len({cell_width(row_of(lines, f"slot {slot}")) for slot in range(3)}) == 1
    lines = gantt_of([Job("chat-\u30c6", 9), Job("chat-\u30c8", 9)], ascii_only=True)
    assert lines[1].startswith("ids chat-~ ")
    assert row_of(lines, "slot 0").startswith(r"slot 0 |\u30c6=")
    cut = row_of(gantt_of([Job("b" + "\u30c8" * 20, 2)], 1, width=40, ascii_only=True), "slot 0")
    assert re.fullmatch(r"slot 0 \|b(\\u30c8)*~(\\u30c8)*=+ +100%", cut)


def units_timeline(seed=5):
    units = [*beams("b", 3, 8), *guided("g", 5, 3), *samples("s", 4, 2, 6)]
    return Timeline.from_events(play_units(units, 6, seed).events)


def test_samples_partners_and_beams_have_their_labels_and_forks_their_parents():
    title, legend, *_, slot_0, slot_1, slot_2, slot_3, slot_4, slot_5, _ = render_gantt(
        units_timeline(), width=100
    )
    assert title == "14 steps · 6 slots · 62% busy · 3 requests · 6 outputs"
    assert legend.strip() == (
        "┃ admitted  #n sample or beam n  ╭n continues beam n  ~ negative prompt"
    )
    assert slot_0.startswith(
        "slot 0 ┃b━━━━╭2━━━━╭2━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┃s#1━━━━━━━━  "
    )
    assert slot_1.startswith("slot 1 ┃b#1━━")
    assert slot_2.startswith("slot 2 ┃b#2━━")
    assert slot_3.startswith("slot 3 ┃g━━━━━━━━━━━━━━━━━━━━━━━━━━━━┃g#1━━━━")
    assert slot_4.startswith("slot 4 ┃g~━━━━━━━━━━━━━━━━━━━━━━━━━━━┃g#1~━━━")
    assert "┃s━" in slot_5


BEAM = SlotSpan(0, "b", 0, 0, 10, "length", "beam")


@pytest.mark.parametrize(
    ("forks", "scale", "row"),
    [
        ([(3, 2)], Scale(range(10), 30), "┃b━━━━━━━━━━╭2━━━━━━━━━━━━━━━━"),
        ([(3, 2), (4, 1)], Scale(range(10), 10), "┃b━━╭╭━━━━"),
        ([(3, 2)], Scale(range(10), 5), "┃b╭━━"),
        ([(3, 2), (4, 1)], Scale(range(4, 8), 12), "━b━╭1━━━━━━━"),
    ],
)
def test_a_fork_is_marked_where_the_beam_goes_on(forks, scale, row):
    span = msgspec.structs.replace(BEAM, forks=tuple(Fork(*fork) for fork in forks))
    assert bar_row([span], {"b": "b"}, scale, UNICODE)[0] == row


SPECULATING = SlotSpan(0, "a", 0, 0, 8, "length", drafted=9, accepted=3)


def marks_of(drafts, scale):
    steps = [StepDrafts(step, 0, 9, *numbers) for step, *numbers in drafts]
    return draft_marks(steps, scale).get(0, {})


@pytest.mark.parametrize(
    ("drafts", "scale", "row"),
    [
        ([(2, 4, 3), (4, 4, 0)], Scale(range(8), 32), "┃a━━━━━━3/4━━━━━0/4━━━━━━━━━━━━━"),
        ([(2, 12, 10), (3, 12, 9)], Scale(range(8), 16), "┃a━━+━9━━━━━━━━━"),
        ([(3, 4, 3), (4, 4, 0), (5, 9, 9)], Scale(range(8), 8), "┃a━309━━"),
        ([(5, 4, 3), (6, 4, 1)], Scale(range(4, 8), 16), "━a━━3/4━1/4━━━━━"),
    ],
)
def test_a_step_that_verified_drafts_says_how_many_were_accepted(drafts, scale, row):
    marks = marks_of(drafts, scale)
    assert bar_row([SPECULATING], {"a": "a"}, scale, UNICODE, marks)[0] == row


@given(
    workloads(),
    st.integers(1, 40),
    st.integers(0, 90),
    st.booleans(),
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-9, 9),
    st.sets(st.integers(0, 3)),
)
def test_any_timeline_can_be_drawn(jobs, batch, width, ascii_only, start, stop, slots):
    timeline = timeline_of(jobs, batch)
    chosen = frozenset(slot for slot in slots if slot < batch)
    ids = frozenset(job.id for job in jobs[:1])
    for selection in (
        Selection(start=start, stop=stop, slots=chosen),
        Selection(request_ids=ids, slots=chosen),
    ):
        lines = render_gantt(timeline, selection, width=width, ascii_only=ascii_only)
        assert max(map(cell_width, lines)) <= max(width, 40)


@given(st.integers(0, 50), st.integers(1, 300), st.integers(1, 120), st.integers(1, 8))
def test_a_scale_shows_every_step_once_and_in_order(start, num_steps, max_cells, per_step):
    scale = Scale.fit(range(start, start + num_steps), max_cells, per_step)
    assert scale.num_cells <= max_cells
    shown = [step for cell in range(scale.num_cells) for step in scale.steps_at(cell)]
    assert sorted(set(shown)) == list(scale.steps)
    assert shown == sorted(shown)
    if num_steps > max_cells:
        assert len(shown) == num_steps
    for step in scale.steps:
        cells = [cell for cell in range(scale.num_cells) if step in scale.steps_at(cell)]
        assert (scale.first_cell(step), scale.last_cell(step)) == (cells[0], cells[-1])


def test_a_long_prefill_and_a_preemption_have_marks():
    timeline = Timeline.from_events(play_paged(CROWDED, Limits()).events)
    lines = render_gantt(timeline, width=80)
    assert lines[0] == "16 steps · 2 slots · 72% busy · 3 requests · 1 preemption"
    assert lines[1].strip() == "┃ admitted  ▪ prefill  « preempted"
    assert lines[4:] == [
        "slot 0 ┃a━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┃▪▪▪▪▪▪▪▪▪▪▪b━━━┃▪▪▪▪▪▪▪c━━━  100%",
        "slot 1 ┃b━━━━━━━━━━━━━━━━━━━━━━━━━«                                       44%",
        " queue ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄████████▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄              max 2",
    ]
    assert render_gantt(timeline, width=80, ascii_only=True)[4:6] == [
        "slot 0 |a==================================|:::::::::::b===|:::::::c===  100%",
        "slot 1 |b=========================<                                       44%",
    ]


def test_colours_are_those_the_user_chose_and_tell_requests_apart():
    timeline = Timeline.from_events(play_paged(CROWDED, Limits()).events)
    lines = render_lines(timeline, width=80)
    text = "".join(colored(lines))
    assert re.sub(r"\x1b\[[\d;]*m", "", text) == "".join(text for line in lines for text, _ in line)
    codes = {code for found in re.findall(r"\x1b\[([\d;]+)m", text) for code in found.split(";")}
    assert codes <= {"0", "1", "2", *map(str, [*range(30, 38), *range(90, 98)])}
    styles = {style for line in lines for _, style in line}
    assert {*HUES, "preempted", "admitted", "queue"} <= styles


def kept(events, batch):
    run, state = events[0], RunState(batch)
    for event in events[1:]:
        state.fold.take(event)
    state.catch_up()
    return state.timeline(run, Timeline.from_events(events).num_steps)


@given(PLAYED)
def test_a_live_view_keeps_the_gantt_of_a_run_wherever_that_breaks_off(events):
    for some in (events, events[: (len(events) + 1) // 2]):
        timeline, own = Timeline.from_events(some), kept(some, events[0].batch)
        for width, height in ((80, 24), (200, None)):
            expected = render_lines(timeline, width=width, height=height)
            assert render_lines(own, width=width, height=height) == expected
            assert max(cell_width("".join(text for text, _ in line)) for line in expected) <= width
        assert list(own.spans) == list(timeline.spans)
        assert list(own.waiting()) == list(timeline.waiting())


@pytest.mark.parametrize("height", mostly_heavy([12, 24, 50, 100, 300], 24, 100))
@pytest.mark.parametrize("slots", mostly_heavy([8, 64, 256], 64))
def test_a_terminal_is_filled_and_not_overflown(height, slots):
    for timeline in (timeline_of(jobs_of(*[30] * slots), slots), long_run(batch=slots)):
        lines = render_lines(timeline, width=80, height=height)
        num_rows = sum(line[:1] != [] and "slot " in line[0][0] for line in lines)
        assert len(lines) < max(height, 24)
        if timeline.num_steps == 30:
            assert num_rows == min(slots, max(height - 8, 4))


PREEMPTION = SpanPreemption("kv", "other", 0, 1, 1)


def slot_span(slot, steps=1, *, name="r", outcome="length"):
    preemption = PREEMPTION if outcome == "preempted" else None
    return SlotSpan(slot, name, 0, 0, steps, outcome, preemption=preemption)


def choose(spans, num_slots, num_rows, request_ids=frozenset()):
    held, _, reason = choose_slots(spans, range(num_slots), range(99), num_rows, request_ids)
    return [*held], reason


@given(
    st.lists(
        st.tuples(
            st.integers(0, 11),
            st.integers(1, 5),
            st.sampled_from(["length", "error", "preempted"]),
            st.sampled_from("abc"),
        )
    ),
    st.integers(1, 12),
    st.sampled_from([frozenset(), frozenset("a")]),
)
def test_every_row_is_filled_and_nothing_that_tells_more_is_left_out(drawn, num_rows, asked):
    spans = [slot_span(slot, steps, outcome=end, name=name) for slot, steps, end, name in drawn]
    slots, reason = choose(spans, 12, num_rows, asked)
    assert slots == sorted(set(slots))
    assert len(slots) == num_rows
    assert bool(reason) == (num_rows < 12)
    counts = [int(word) for word in reason.split() if word.isdecimal()]
    assert sum(counts) in (0, num_rows) or reason.endswith(" in use")
    used = {each.slot for each in spans}
    assert used <= set(slots) or set(slots) <= used
    wanted = {each.slot for each in spans if each.id in asked}
    assert wanted <= set(slots) or set(slots) <= wanted
    if not wanted and len(used) > num_rows > 1:
        trouble = Counter(each.slot for each in spans if each.outcome != "length")
        assert max(trouble.values(), default=0) == max((trouble[slot] for slot in slots), default=0)
