import json
from collections import defaultdict

from hypothesis import example, given
from hypothesis import strategies as st
from made_events import RUN, admit, arrive, drop, finish, fork, jump, preempt
from msgspec.structs import replace
from played_runs import PLAYED
from reference_paged import CROWDED, Limits, PagedJob, play_paged
from reference_schedule import DESIGN_JOBS, Job, play

from batcher.events import SequenceName
from batcher.trace.timeline import EVERYTHING, Selection, Timeline
from batcher.trace.views import encode_chrome

STEP = 10**6


def chrome_of(timeline, selection=EVERYTHING):
    return json.loads(b"".join(encode_chrome(timeline, selection)))


def events_of(timeline, phase, selection=EVERYTHING):
    return [e for e in chrome_of(timeline, selection)["traceEvents"] if e["ph"] == phase]


def check_slices_nest(events):
    """Walk each thread as a stack: a slice lies within the open one, or after it."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    for slices in threads.values():
        open_ends = []
        for event in slices:
            end = event["ts"] + event["dur"]
            assert event["dur"] > 0
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
            assert len(open_ends) == (2 if event["name"] == "prefill" else 1)


def check_waits_balance(events):
    """Every b has one e of the same category, id and name, later in time."""
    open_waits = {}
    for event in events:
        if event["ph"] in "be":
            assert isinstance(event["id"], int)
        key = (event.get("cat"), event.get("id"), event["name"])
        if event["ph"] == "b":
            assert key not in open_waits
            open_waits[key] = event["ts"]
        elif event["ph"] == "e":
            assert open_waits.pop(key) < event["ts"]
    assert not open_waits


def check_flows(events):
    """A flow goes forward in time, from an s in a slice to its f in another.

    So it is with Perfetto's importer: an end without a beginning is an error of the file, and so is
    an s or f that no slice encloses.  A bind_id may be taken for the number of another flow.
    """
    assert not any({"bind_id", "flow_in", "flow_out"} & event.keys() for event in events)
    slices = [event for event in events if event["ph"] == "X" and event["cat"] == "request"]
    begun = {}
    for event in events:
        if event["ph"] not in "sf":
            continue
        assert event["bp"] == "e"
        assert isinstance(event["id"], int)
        (inside,) = [
            slice_
            for slice_ in slices
            if slice_["tid"] == event["tid"]
            and slice_["ts"] <= event["ts"] < slice_["ts"] + slice_["dur"]
        ]
        key = (event["cat"], event["name"], event["id"])
        if event["ph"] == "s":
            assert key not in begun
            begun[key] = event["ts"]
        else:
            what = {"preemption": "resumed", "fork": "fork", "cache": "cached"}[event["cat"]]
            assert event["name"] == f"{what}: {inside['name']}"
            begin = begun.pop(key)
            assert begin < event["ts"] or (what == "cached" and begin == event["ts"])
    assert not begun


def check_rules(chrome, num_slots):
    assert chrome["displayTimeUnit"] == "ms"
    events = chrome["traceEvents"]
    assert {event["ph"] for event in events} <= set("MXCbeisf")
    assert {event["pid"] for event in events} == {1}
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert all(isinstance(ts, int) and ts >= 0 for ts in times)
    named = {e["tid"] for e in events if e["name"] == "thread_name"}
    assert {e["tid"] for e in events if e["ph"] == "X"} <= named <= set(range(1, num_slots + 1))
    assert all(list(e["args"]) == [e["name"]] for e in events if e["ph"] == "C")
    check_slices_nest(events)
    check_waits_balance(events)
    check_flows(events)


# One is preempted in a step of which nothing else is told when the trace breaks off.
PREEMPTED_LAST = play_paged(
    [PagedJob("r0", 1, 8, 1.0), PagedJob("r1", 1, 8, 1.0), PagedJob("r2", 2, 2, 1.0)],
    Limits(blocks=10, block_size=1, budget=6),
)


@given(PLAYED, st.integers(0, 9), st.integers(0, 9))
@example(PREEMPTED_LAST.events, 0, 0)
def test_every_trace_keeps_the_rules(events, start, stop):
    num_slots, timeline = events[0].batch, Timeline.from_events(events)
    check_rules(chrome_of(timeline), num_slots)
    check_rules(chrome_of(timeline, Selection(start=start, stop=stop)), num_slots)
    check_rules(chrome_of(timeline, Selection(slots=frozenset({0}))), 1)
    waits = events_of(timeline, "b")
    assert len({event["id"] for event in waits}) == len(waits) == len(timeline.waits)
    for broken_off in range(1, len(events), 5):
        check_rules(chrome_of(Timeline.from_events(events[:broken_off])), num_slots)


def test_the_example_of_the_design_has_a_thread_for_each_slot_and_counters_beside_them():
    timeline = Timeline.from_events(play(DESIGN_JOBS, 2).events)
    events = events_of(timeline, "X")
    requests = [e for e in events if e["cat"] == "request"]
    place = {"ph": "X", "pid": 1, "tid": 2, "ts": 1 * STEP, "dur": 2 * STEP}
    args = {"index": 0, "outcome": "length"}
    assert requests[2] == place | {"name": "c", "cat": "request", "args": args}
    prefills = [(e["tid"], e["ts"], e["dur"]) for e in events if e["cat"] == "prefill"]
    assert prefills == [(e["tid"], e["ts"], STEP) for e in requests]
    assert [(e["name"], e.get("tid"), *e["args"].values()) for e in events_of(timeline, "M")] == [
        ("process_name", None, "batchdecode (test)"),
        ("thread_name", 1, "slot 0"),
        ("thread_sort_index", 1, 1),
        ("thread_name", 2, "slot 1"),
        ("thread_sort_index", 2, 2),
    ]
    counters = events_of(timeline, "C", Selection(start=2, stop=5))
    assert [(e["ts"] // STEP, *e["args"].values()) for e in counters] == [
        (2, 2),
        (2, 1),
        (3, 1),
        (3, 0),
    ]


def test_sequences_have_their_labels_and_what_happened_to_them():
    beams = [arrive("b"), admit("b", 0, role="beam"), admit("b", 1, 0, 1, "beam")]
    ends = [finish("b", 0, 1, role="beam"), finish("b", 1, 1, 1, "beam", reason="unused")]
    guided = [admit("g", 0, 2, 1), admit("g", 1, 2, 1, "negative"), jump("g", 0, 2, 1, 4)]
    dropped = [admit("s", 2, 2), finish("s", 2, 2, reason="stop"), drop("s", 2, "stop")]
    run = [replace(RUN, batch=3), *beams, arrive("g", 0, 1), fork("b", 1, 0, index=1)]
    timeline = Timeline.from_events([*run, *ends, *guided, *dropped])
    requests = [e for e in events_of(timeline, "X") if e["cat"] == "request"]
    forks = [{"step": 0, "parent": 0}]
    assert [(e["name"], e["args"]) for e in requests] == [
        ("b", {"index": 0, "outcome": "length", "role": "beam"}),
        ("b#1", {"index": 1, "outcome": "unused", "role": "beam", "forks": forks}),
        ("g#1", {"index": 1, "outcome": None, "jumped": 4}),
        ("g#1~", {"index": 1, "outcome": None, "role": "negative"}),
        ("s", {"index": 0, "outcome": "stop", "dropped": True}),
    ]
    assert [e["name"] for e in events_of(timeline, "b")] == ["g#1"]


def test_a_slice_lasts_as_long_as_its_steps_and_a_preemption_is_where_it_ends():
    timeline = Timeline.from_events(play_paged(CROWDED, Limits()).events)
    slices = [(e["name"], e["ts"], e["dur"]) for e in events_of(timeline, "X")]
    assert slices[4:] == [
        ("b", 4_500_000, 2_250_000),
        ("prefill", 4_500_000, 1_875_000),
        ("c", 6_750_000, 1_750_000),
        ("prefill", 6_750_000, 1_375_000),
    ]
    resumed = [e["args"] for e in events_of(timeline, "X") if e["name"] == "b"][1]
    assert resumed == {"index": 0, "outcome": "length", "generated": 7, "resumed": True}
    assert events_of(timeline, "i") == [
        {
            "ph": "i",
            "s": "t",
            "pid": 1,
            "tid": 2,
            "ts": 3_750_000,
            "name": "preempted: b",
            "cat": "preemption",
            "args": {"reason": "kv", "for_id": "a", "for_index": 0, "tokens": 8, "generated": 7},
        }
    ]
    waits = [
        (e["name"], e["ph"], e["ts"]) for e in chrome_of(timeline)["traceEvents"] if e["ph"] in "be"
    ]
    assert ("b", "b", 3_750_000) in waits
    assert ("b", "e", 4_500_000) in waits


def test_blocks_and_tokens_are_counters_that_end_at_zero_wherever_nothing_runs():
    jobs = [CROWDED[0], CROWDED[1]._replace(id="later", arrival=40.0)]
    timeline = Timeline.from_events(play_paged(jobs, Limits()).events)
    last_end = timeline.figures.ends[8]
    first, *_ = events_of(timeline, "X")
    assert first["ts"] + first["dur"] == last_end * 10**6
    for name, first in (("blocks", 1), ("tokens", 2), ("occupied slots", 1)):
        counts = [(e["ts"], e["args"][name]) for e in events_of(timeline, "C") if e["name"] == name]
        assert counts[0] == (0, first)
        assert (last_end * 10**6, 0) in counts
        assert (40_000_000, first) in counts
        assert counts[-1] == (timeline.figures.ends[-1] * 10**6, 0)


def test_the_slices_of_a_sequence_are_a_flow_from_each_preemption_to_what_it_resumes_in():
    events = [replace(RUN, batch=1), arrive("a"), arrive("b"), admit("a", 0)]
    for step in (2, 6):
        events += [preempt("a", 0, step), admit("b", 0, step), preempt("b", 0, step + 2)]
        events.append(admit("a", 0, step + 2, generated=2, cached=4))
    timeline = Timeline.from_events([*events, finish("a", 0, 9)])
    assert arrows_of(timeline) == [
        ("s", "resumed: a", 1, 1 * STEP),
        ("s", "resumed: b", 1, 3 * STEP),
        ("f", "resumed: a", 1, 4 * STEP),
        ("s", "resumed: a", 1, 5 * STEP),
        ("f", "resumed: b", 1, 6 * STEP),
        ("f", "resumed: a", 1, 8 * STEP),
    ]
    assert arrows_of(timeline, Selection(start=8)) == []


def finding(source):
    """b finds tokens of `source` in the last step of a, and c some of a when that has gone."""
    found = admit("b", 1, 2, cached=4, cached_from=source)
    again = admit("c", 0, 5, cached=6, cached_from=SequenceName("a", 0))
    events = [RUN, *map(arrive, "abc"), admit("a", 0), found, finish("a", 0, 2), again]
    return Timeline.from_events([*events, finish("b", 1, 6), finish("c", 0, 6)])


def arrows_of(timeline, selection=EVERYTHING):
    check_rules(chrome_of(timeline, selection), 2)
    events = chrome_of(timeline, selection)["traceEvents"]
    return [(e["ph"], e["name"], e["tid"], e["ts"]) for e in events if e["ph"] in "sf"]


def test_what_was_found_of_another_is_a_flow_from_the_last_step_in_which_that_had_its_slot():
    timeline = finding(SequenceName("a", 0))
    assert arrows_of(timeline) == [
        ("s", "cached: b", 1, 2 * STEP),  # still running, and in the same step
        ("f", "cached: b", 2, 2 * STEP),
        ("s", "cached: c", 1, 2 * STEP),
        ("f", "cached: c", 1, 5 * STEP),
    ]
    found = [(e["name"], e["args"]) for e in events_of(timeline, "i")]
    assert found == [
        ("cached: b", {"tokens": 4, "from": "a"}),
        ("cached: c", {"tokens": 6, "from": "a"}),
    ]
    slices = {e["name"]: e["args"] for e in events_of(timeline, "X") if e["cat"] == "request"}
    assert slices["b"]["cached_from"] == {"id": "a", "index": 0}
    alone = Selection(slots=frozenset({1}))
    assert arrows_of(finding(SequenceName("a", 0)), alone) == []
    for source in (None, SequenceName("gone", 0), SequenceName("a", 0, "negative")):
        assert len(arrows_of(finding(source))) == 2, "that of c alone"


def test_a_fork_is_a_flow_from_the_beam_that_goes_on_in_another_to_that_one():
    """The second of two beams goes on as the first after step 1, and again at its end."""
    admits = [admit("b", index, 0, index, "beam") for index in (0, 1)]
    forks = [fork("b", 1, 0, step, 1) for step in (1, 3)]
    ends = [finish("b", index, 3, index, "beam") for index in (0, 1)]
    timeline = Timeline.from_events([RUN, arrive("b"), *admits, *forks, *ends])
    check_rules(chrome_of(timeline), 2)
    ends = [e for phase in "sf" for e in events_of(timeline, phase)]
    assert [(e["ph"], e["tid"], e["ts"], e["name"], e["id"]) for e in ends] == [
        ("s", 1, 1 * STEP, "fork: b#1", 0),
        ("f", 2, 2 * STEP, "fork: b#1", 0),
    ]
    alone = chrome_of(timeline, Selection(slots=frozenset({1})))
    check_rules(alone, 2)
    assert not any(e["ph"] in "sf" for e in alone["traceEvents"])


def test_all_is_on_the_clock_of_the_engine_where_steps_have_no_figures():
    timeline = Timeline.from_events(play([Job("a", 2), Job("b", 3, 40.5)], 1).events)
    assert not timeline.has_figures
    requests = [e for e in events_of(timeline, "X") if e["cat"] == "request"]
    assert [(e["ts"], e["dur"]) for e in requests] == [(0, 2 * STEP), (40_500_000, 3 * STEP)]
    occupied = [e for e in events_of(timeline, "C") if e["name"] == "occupied slots"]
    assert [(e["ts"], e["args"]["occupied slots"]) for e in occupied] == [
        (0, 1),
        (2 * STEP, 0),
        (40_500_000, 1),
        (43_500_000, 0),
    ]
