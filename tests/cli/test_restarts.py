"""A worker that is killed is replaced, and the steps in its place are one line, wherever told."""

import json
from collections import defaultdict

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from made_events import read_trace
from process import lines_of, workload
from test_run_workers import SAMPLED, options_of, run_inner

from batcher.events import ArriveEvent, EndEvent, FinishEvent, RestartEvent, StepsEvent
from batcher.trace.timeline import Timeline
from cli.options import SchedulingOptions

VARIED = [
    *workload(40),
    {**SAMPLED, "id": "samples", "n": 4},
    {**SAMPLED, "id": "best", "n": 2, "best_of": 3},
    {"id": "beams", "prompt": "Once", "n": 2, "num_beams": 3, "max_tokens": 8},
    {"id": "none", "prompt": "x", "max_tokens": 0},
    *({**each, "id": f"again-{number}"} for number, each in enumerate(workload(40))),
]
SETTINGS = (
    {},
    {"policy": "sjf"},
    {"kv_blocks": 24, "block_size": 4},
    {"max_batch_tokens": 9, "long_prefill_threshold": 5},
    {"draft": "ngram"},
    {"profile": "h100_llama3.1-8b_tp1"},
    {"profile": "wall"},
)


def run_with_kills(folder, *, requests=VARIED, num_workers=3, **how):
    """Carry out a run that is traced; return its events, results, summary and workers."""
    more = {name: how.pop(name) for name in ("scheduling", "batch") if name in how}
    (folder / "requests.jsonl").write_bytes(lines_of(*requests))
    trace, numbers = folder / "trace.jsonl", folder / "numbers.json"
    options = options_of(folder, trace=str(trace), summary_json=str(numbers), **more)
    status, workers = run_inner(options, num_workers, **how)
    assert status == 0
    events = list(read_trace(trace.read_bytes().splitlines(keepends=True)))
    results = [json.loads(line) for line in (folder / "results.jsonl").read_bytes().splitlines()]
    return events, results, json.loads(numbers.read_bytes()), workers


@examples(40)
@given(
    number=st.integers(1, 5),
    batch=st.integers(3, 5),
    scheduling=st.sampled_from(SETTINGS),
    seed=st.integers(0, 2**32),
)
def test_the_steps_in_the_place_of_a_worker_are_one_line(
    tmp_path_factory, number, batch, scheduling, seed
):
    events, results, summary, workers = run_with_kills(
        tmp_path_factory.mktemp("restarts"),
        num_workers=number,
        batch=batch,
        scheduling=SchedulingOptions(**scheduling),
        seed=seed,
        kill_share=0.1,
        max_kills=4,
    )
    restarts = [event for event in events if isinstance(event, RestartEvent)]
    assert len(restarts) <= workers.num_kills
    steps, time = defaultdict(int), defaultdict(float)
    for event in events[1:]:
        if isinstance(event, RestartEvent):
            assert (event.reason, event.code) == ("killed", 9)
            assert event.step >= steps[event.worker]
            assert event.time >= time[event.worker]
        late = isinstance(event, ArriveEvent | StepsEvent | EndEvent)
        if not late and not (isinstance(event, FinishEvent) and event.slot is None):
            assert event.step >= steps[event.worker] or isinstance(event, FinishEvent)
            steps[event.worker] = event.step
            time[event.worker] = event.time
    timeline = Timeline.from_events(events)
    timeline.check_integrity()
    assert len(timeline.restarts) == len(restarts)
    spans = {
        (span.id, span.index, span.slot, span.start, span.end - 1)
        for span in timeline.spans
        if span.outcome in {"stop", "length"}
    }
    assert spans >= {
        (r["id"], r["index"], r["slot"], r["steps"]["admitted"], r["steps"]["finished"])
        for r in results
        if r["slot"] is not None and "kv_blocks" not in scheduling
    }
    assert summary["requests"] == len(VARIED)
    assert summary["steps"] == timeline.num_steps
    assert summary["busy_slot_steps"] == sum(each.total for each in timeline.occupied())


@pytest.mark.parametrize("seed", range(2))
def test_what_a_report_tells_of_steps_is_complete(tmp_path, seed):
    events, _, _, workers = run_with_kills(
        tmp_path,
        requests=[{"prompt": "Once", "max_tokens": 60, "ignore_eos": True}] * 40,
        scheduling=SchedulingOptions(profile="h100_llama3.1-8b_tp1"),
        seed=seed,
        kill_share=0.3,
        max_kills=4,
        report_seconds=0.002,
    )
    assert workers.num_kills
    timeline = Timeline.from_events(events)
    for worker in timeline.workers:
        assert len(worker.figures.ends) == worker.num_steps


def test_one_worker_has_a_trace_of_one_engine(tmp_path):
    events, results, _, workers = run_with_kills(
        tmp_path, requests=workload(20), num_workers=1, seed=3, kill_share=0.2, max_kills=2
    )
    assert workers.num_kills == 2
    assert events[0].workers == 1
    assert all(event.worker is None for event in events[1:])
    assert len(Timeline.from_events(events).restarts) == 2
    assert len(results) == 20
