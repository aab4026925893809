import csv
import io

from reference_schedule import DESIGN_JOBS, Job, play

from batcher.formats.views import encode_csv, encode_spans, encode_steps
from batcher.timeline import Selection, Timeline


def timeline_of(jobs, batch=2):
    return Timeline.from_events(play(jobs, batch).events)


def test_spans_of_the_example_of_the_design():
    assert b"".join(encode_spans(timeline_of(DESIGN_JOBS))).decode().splitlines() == [
        '{"slot":0,"id":"a","index":0,"start":0,"end":3,"outcome":"length"}',
        '{"slot":1,"id":"b","index":1,"start":0,"end":1,"outcome":"length"}',
        '{"slot":1,"id":"c","index":2,"start":1,"end":3,"outcome":"length"}',
        '{"slot":0,"id":"d","index":3,"start":3,"end":7,"outcome":"length"}',
    ]


def test_steps_of_the_example_of_the_design():
    lines = list(encode_steps(timeline_of(DESIGN_JOBS)))
    assert lines[0] == b'{"step":0,"slots":["a","b"],"waiting":2}\n'
    assert lines[6] == b'{"step":6,"slots":["d",null],"waiting":0}\n'
    assert len(lines) == 7


def test_csv_has_a_header_and_quotes_what_needs_it():
    data = b"".join(encode_csv(timeline_of([Job('say "hi", é\n', 2)]))).decode()
    assert data == 'slot,id,index,start,end,outcome\n0,"say ""hi"", é\n",0,0,2,length\n'


def test_a_request_that_still_runs_has_no_outcome():
    timeline = Timeline.from_events(play(DESIGN_JOBS, 2).events[:6])
    assert timeline.spans[0].outcome is None
    assert next(encode_spans(timeline)).endswith(b'"end":1,"outcome":null}\n')
    rows = list(csv.DictReader(io.StringIO(b"".join(encode_csv(timeline)).decode())))
    assert rows[0]["outcome"] == ""


def test_views_show_the_selection_alone():
    timeline = timeline_of(DESIGN_JOBS)
    chosen = Selection(slots=frozenset({1}), start=1)
    assert len(list(encode_spans(timeline, chosen))) == 1
    assert len(list(encode_csv(timeline, chosen))) == 2
    assert next(encode_steps(timeline, chosen)) == b'{"step":1,"slots":["c"],"waiting":1}\n'
