import csv
import io
import json

import pytest
from reference_paged import CROWDED, Limits, play_paged
from reference_schedule import DESIGN_JOBS, Job, timeline_of
from reference_units import beams, guided, play_units, samples

from batcher.events import DropEvent, ForkEvent, JumpEvent
from batcher.trace.timeline import Selection, Timeline
from batcher.trace.views import encode_csv, encode_spans, encode_steps


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_spreadsheet_takes_no_id_for_a_formula(name):
    _, line = encode_csv(timeline_of([Job(name, 2)]))
    assert next(csv.reader(io.StringIO(line.decode(), newline="")))[1] == f"'{name}"
    (span,) = encode_spans(timeline_of([Job(name, 2)]))
    assert json.loads(span)["id"] == name


def test_steps_of_the_example_of_the_design():
    lines = list(encode_steps(timeline_of(DESIGN_JOBS)))
    assert lines[0] == b'{"step":0,"slots":["a","b"],"waiting":2}\n'
    assert lines[6] == b'{"step":6,"slots":["d",null],"waiting":0}\n'
    assert len(lines) == 7


def test_csv_has_a_header_and_quotes_what_needs_it():
    data = b"".join(encode_csv(timeline_of([Job('say "hi", é\n', 2)]))).decode()
    header, rest = data.split("\n", 1)
    assert header == "slot,id,index,start,end,outcome,role,jumped,dropped"
    assert rest == '0,"say ""hi"", é\n",0,0,2,length,sample,0,false\n'


def test_views_show_the_selection_alone():
    timeline = timeline_of(DESIGN_JOBS)
    chosen = Selection(slots=frozenset({1}), start=1)
    assert len(list(encode_spans(timeline, chosen))) == 1
    assert len(list(encode_csv(timeline, chosen))) == 2
    assert next(encode_steps(timeline, chosen)) == b'{"step":1,"slots":["c"],"waiting":1}\n'


def unit_timeline():
    units = [*guided("g", 2, 1), *beams("b", 2, 3)]
    events = play_units(units, 4).events
    events.insert(8, JumpEvent(0, 0.0, "g", 0, 0, 5))
    events.insert(-3, ForkEvent(2, 2.0, "b", 1, 3, 0))
    return Timeline.from_events(events)


def test_spans_say_more_only_where_there_is_more():
    assert b"".join(encode_spans(unit_timeline())).decode().splitlines() == [
        '{"slot":0,"id":"g","index":0,"start":0,"end":2,"outcome":"length","jumped":5}',
        '{"slot":1,"id":"g","index":0,"start":0,"end":2,"outcome":"unused","role":"negative"}',
        '{"slot":2,"id":"g","index":1,"start":0,"end":1,"outcome":"length"}',
        '{"slot":3,"id":"g","index":1,"start":0,"end":1,"outcome":"unused","role":"negative"}',
        '{"slot":2,"id":"b","index":0,"start":1,"end":4,"outcome":"length","role":"beam"}',
        (
            '{"slot":3,"id":"b","index":1,"start":1,"end":4,"outcome":"unused","role":"beam",'
            '"forks":[{"step":2,"parent":0}]}'
        ),
    ]


def test_a_sample_without_a_result_is_called_dropped():
    run = play_units(samples("s", 1, 2), 2)
    events = [*run.events[:-1], DropEvent(1, 1.0, "s", 0, "length"), run.events[-1]]
    timeline = Timeline.from_events(events)
    assert b"".join(encode_spans(timeline)).decode().splitlines() == [
        '{"slot":0,"id":"s","index":0,"start":0,"end":1,"outcome":"length","dropped":true}',
        '{"slot":1,"id":"s","index":1,"start":0,"end":2,"outcome":"length"}',
    ]
    assert b"".join(encode_csv(timeline)).decode().splitlines() == [
        "slot,id,index,start,end,outcome,role,jumped,dropped",
        "0,s,0,0,1,length,sample,0,true",
        "1,s,1,0,2,length,sample,0,false",
    ]


CROWDED_RUN = Timeline.from_events(play_paged(CROWDED, Limits()).events)


def test_spans_tell_of_prefills_and_preemptions_where_there_are_some():
    lines = b"".join(encode_spans(CROWDED_RUN)).decode().splitlines()
    assert lines == [
        '{"slot":0,"id":"a","index":0,"start":0,"end":9,"outcome":"length"}',
        (
            '{"slot":1,"id":"b","index":0,"start":0,"end":7,"outcome":"preempted","preemption":'
            '{"reason":"kv","for_id":"a","for_index":0,"tokens":8,"generated":7}}'
        ),
        (
            '{"slot":0,"id":"b","index":0,"start":9,"end":13,"outcome":"length","prefill":3,'
            '"generated":7,"resumed":true}'
        ),
        '{"slot":0,"id":"c","index":0,"start":13,"end":16,"outcome":"length","prefill":2}',
    ]


def test_csv_has_more_columns_for_all_spans_of_such_a_run_and_each_part_of_it():
    rows = list(csv.reader(io.StringIO(b"".join(encode_csv(CROWDED_RUN)).decode())))
    assert rows[0][9:] == ["prefill", "cached", "generated", "resumed"]
    assert [row[9:] for row in rows[1:]] == [
        ["1", "0", "0", "false"],
        ["1", "0", "0", "false"],
        ["3", "0", "7", "true"],
        ["2", "0", "0", "false"],
    ]
    part = encode_csv(CROWDED_RUN, Selection(request_ids=frozenset({"a"})))
    assert next(part).decode().strip().split(",") == rows[0]


def test_steps_have_figures_where_the_trace_has_them():
    assert next(encode_steps(CROWDED_RUN)) == (
        b'{"step":0,"slots":["a","b"],"waiting":1,"begin":0.0,"end":0.75,"tokens":4,"blocks":2}\n'
    )
