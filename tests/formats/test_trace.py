import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from made_events import read_trace
from reference_schedule import DESIGN_JOBS, play, workloads

from batcher.errors import BatchdecodeError
from batcher.events import AdmitEvent, EndEvent, RunEvent
from batcher.requests.schema import make_schema
from batcher.trace.files import encode_events, is_trace

RUN = RunEvent(batch=2, model="simulated", settings={"seed": 7})
RUN_LINE = encode_events([RUN])
SCHEMA = Draft202012Validator(make_schema("trace"))


def lines_of(data):
    return data.splitlines(keepends=True)


LINES = [  # one of each kind, without its event's name in front
    'run","version":2,"batch":2,"policy":"fcfs","model":"simulated","settings":{"seed":7}}',
    (
        'arrive","step":3,"time":2.5,"id":"é","index":0,"reason":"input","prompt_tokens":5,'
        '"max_tokens":16}'
    ),
    'admit","step":12,"time":12.0,"id":"a","index":0,"slot":3,"reason":"refill"}',
    'admit","step":1,"time":1.0,"id":"a","index":1,"slot":3,"reason":"refill","role":"negative"}',
    (
        'finish","step":12,"time":12.0,"id":"a","index":0,"slot":3,"reason":"stop",'
        '"stop_reason":[1,2],"tokens":4}'
    ),
    (
        'finish","step":12,"time":12.0,"id":"a","index":2,"slot":3,"reason":"unused",'
        '"stop_reason":null,"tokens":0,"role":"beam"}'
    ),
    'jump","step":3,"time":3.0,"id":"a","index":1,"slot":2,"tokens":7}',
    'draft","step":3,"time":3.0,"id":"a","index":1,"slot":2,"position":9,"tokens":4}',
    'accept","step":3,"time":3.0,"id":"a","index":1,"slot":2,"position":9,"tokens":1}',
    'rollback","step":3,"time":3.0,"id":"a","index":1,"slot":2,"position":10,"tokens":3}',
    'rollback","step":3,"time":3.0,"id":"a","index":1,"slot":2,"position":10,"tokens":3,"blocks":1}',
    'speculate","step":3,"time":3.0,"id":"a","index":1,"slot":2,"tokens":0,"reason":"cost"}',
    (
        'steps","step":3,"ends":[4.0],"decodes":[1],"prefills":[2],"rows":[1],"blocks":[3],'
        '"prefill_padding":[0],"decode_padding":[0],"drafts":[2]}'
    ),
    'fork","step":3,"time":3.0,"id":"a","index":1,"slot":2,"parent":0}',
    'reject","step":0,"time":0.0,"id":"9","index":8,"reason":"invalid-json"}',
    'end","steps":7,"time":7.0,"tokens":10,"requests":4}',
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split('"')[0])
def test_each_kind_of_event_is_one_line_that_its_schema_has(line):
    line = f'{{"event":"{line}\n'
    lines = [line.encode()] if line.startswith('{"event":"run"') else [RUN_LINE, line.encode()]
    assert encode_events([*read_trace(lines)][-1:]) == lines[-1]
    assert SCHEMA.is_valid(json.loads(line))
    assert not SCHEMA.is_valid(json.loads(line) | {"event": "other"})


@given(workloads(), st.integers(1, 4))
def test_what_is_written_is_read_back(jobs, batch):
    events = play(jobs, batch).events
    data = encode_events(events)
    assert data == b"".join(encode_events([event]) for event in events)
    assert list(read_trace(lines_of(data))) == events


@given(st.data())
def test_a_trace_cut_off_anywhere_is_read_up_to_its_last_whole_line(data):
    events = play(DESIGN_JOBS, 2).events
    whole = encode_events(events)
    cut = data.draw(st.integers(len(RUN_LINE), len(whole)))
    read_back = list(read_trace(lines_of(whole[:cut])))
    num_whole = whole[:cut].count(b"\n")
    assert read_back[:num_whole] == events[:num_whole]
    assert read_back in (events[:num_whole], events[: num_whole + 1])


@pytest.mark.parametrize("torn", [b'{"event":"adm', b'{"event":"new","st', b'{"\xff', b"\0\0"])
def test_a_torn_last_line_is_the_end(torn):
    assert list(read_trace([RUN_LINE, torn])) == [RUN]
    assert list(read_trace([RUN_LINE, torn, b"\n"])) == [RUN]


@pytest.mark.parametrize(
    "line", [b'{"event":"migrate","step":3}', b'{"event":"admit2","slot":[]}', b"\n", b"  \r\n"]
)
def test_unknown_kinds_and_blank_lines_are_skipped(line):
    end = EndEvent(7, 7.0, 10, 4)
    assert list(read_trace([RUN_LINE, line, encode_events([end])])) == [RUN, end]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"event":"adm\n', "run.jsonl:2: not a line of a trace: JSON is malformed"),
        (b'{"event":"\xff"}\n', "run.jsonl:2: not a line of a trace: 'utf-8'"),
        (
            encode_events([AdmitEvent(1, 1.0, "a", 0, 0, "empty", "judge")]),
            "Invalid enum value 'judge'",
        ),
        (b'{"event":"end"}\n', "run.jsonl:2: not a line of a trace: .*missing required field"),
        (b'{"step":3}\n', "run.jsonl:2: not a line of a trace: .*missing required field `event`"),
        (b'{"a":' + b"[" * 100_000 + b"\n", "run.jsonl:2: not a line of a trace: .*recursion"),
        (b"[]\n", "run.jsonl:2: not a line of a trace: Expected `object`, got `array`"),
        (RUN_LINE, "run.jsonl:2: a second run starts; a trace has only one"),
    ],
)
def test_a_bad_line_before_the_last_is_an_error_with_its_number(line, complaint):
    end = encode_events([EndEvent(7, 7.0, 10, 4)])
    with pytest.raises(BatchdecodeError, match=complaint):
        list(read_trace([RUN_LINE, line, end], name="run.jsonl"))


@pytest.mark.parametrize("version", ["1", "3", "0", '"1"', "null"])
def test_another_version_is_refused_even_if_nothing_else_can_be_read(version):
    line = f'{{"event":"run","version":{version},"slots":{{}}}}'.encode()
    assert is_trace(line)
    with pytest.raises(BatchdecodeError, match="reads version 2"):
        list(read_trace([line]))


@pytest.mark.parametrize(
    "first_line",
    [b"\n", b'{"event":"adm', b"[]", b"[" * 100_000, b'{"event":"end"}', b"\xff", b'{"event":1}'],
)
def test_what_does_not_begin_with_a_run_is_not_a_trace(first_line):
    assert not is_trace(first_line)
    with pytest.raises(BatchdecodeError, match=r"requests\.jsonl: not a trace"):
        list(read_trace([first_line], name="requests.jsonl"))


def test_events_are_read_one_by_one():
    def endless():
        yield RUN_LINE
        while True:
            yield encode_events([AdmitEvent(1, 1.0, "a", 0, 0, "empty")])

    events = read_trace(endless())
    assert [next(events), next(events).id] == [RUN, "a"]


def reading(lines):
    try:
        return len(list(read_trace(lines)))
    except BatchdecodeError as error:
        return str(error)


@given(st.binary(max_size=20))
def test_any_other_line_is_skipped_or_an_error_and_never_a_crash(junk):
    end = encode_events([EndEvent(7, 7.0, 10, 4)])
    outcome = reading([RUN_LINE, junk.replace(b"\n", b" ") + b"\n", end])
    assert outcome == 2 or outcome.startswith("trace:2: ")
