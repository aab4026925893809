"""The positions that a summary tells are those that the model was given, and the trace has them."""

import pytest
from control_requests import control_requests
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from made_events import read_trace
from msgspec.structs import replace
from reference import english_requests

from batcher import Engine, Request, SimulatedModel
from batcher.metrics.summary import Positions, RunMetrics
from batcher.settings import SchedulingSettings
from batcher.speculation.settings import SpeculationSettings
from batcher.trace.files import encode_events
from batcher.trace.timeline import Timeline

PLAIN = SchedulingSettings()
DRAFTS = SpeculationSettings(draft="simulated:0.7")
LIMITED = [
    SchedulingSettings(max_batch_tokens=8, kv_blocks=60, block_size=4),
    SchedulingSettings(long_prefill_threshold=3, prefix_cache=True),
    SchedulingSettings(
        max_batch_tokens=9, prefill_order="prefill-first", kv_blocks=90, block_size=4
    ),
]


class CountingModel(SimulatedModel):
    """The simulated model; it counts what it is to compute, as long rows as a layout makes them."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout
        self.num_tokens = self.num_positions = 0

    def forward(self, batch):
        sizes = [len(chunk.token_ids) for chunk in batch.chunks]
        num_decoding = len({*batch.slots.tolist()} - {chunk.slot for chunk in batch.chunks})
        self.num_tokens += num_decoding + sum(sizes)
        self.num_positions += num_decoding
        if self.layout == "padded":
            self.num_positions += max(sizes, default=0) * len([size for size in sizes if size])
        else:
            self.num_positions += sum(sizes)
        return super().forward(batch)

    @property
    def positions(self):
        return Positions(total=self.num_positions, padding=self.num_positions - self.num_tokens)


def counted(
    model,
    requests,
    settings=PLAIN,
    *,
    batch_size=4,
    abort_after=(),
    break_off_after=None,
    speculation=None,
):
    """What the summary of a run says, and that of its trace; the oldest request may be aborted."""
    engine = Engine(model, batch_size, settings=settings, speculation=speculation)
    waiting = [engine.add(request) for request in requests]
    events = [engine.run_event()]
    while engine.has_work and engine.num_steps != break_off_after:
        num_steps, outcome = engine.num_steps, engine.step()
        events += outcome.events
        ended = {result.id for result in outcome.results}
        waiting = [name for name in waiting if name not in ended]
        if engine.num_steps in abort_after and engine.num_steps > num_steps and waiting:
            engine.abort(waiting[0])
    num_steps = engine.num_steps
    events += engine.take_outcome().events
    metrics, again = RunMetrics(), RunMetrics()
    metrics.observe(events)
    again.observe(read_trace(encode_events(events).splitlines(keepends=True)))
    assert again.summary(num_steps) == metrics.summary(num_steps)
    Timeline.from_events(events).check_integrity()
    return metrics.summary(num_steps).positions


@given(
    st.lists(control_requests() | english_requests(), min_size=1, max_size=6),
    st.sampled_from(["ragged", "padded"]),
    st.just(PLAIN) | st.sampled_from(LIMITED),
    st.integers(4, 6),
    st.integers(0, 3),
    st.sets(st.integers(1, 25), max_size=2),
    st.none() | st.integers(1, 20),
    st.sampled_from([None, DRAFTS]),
)
@examples(90)
def test_positions_are_those_that_the_model_computes(
    drawn, layout, settings, batch_size, steps_between, abort_after, break_off_after, speculation
):
    model = CountingModel(layout)
    requests = [
        replace(request, id=f"r{number}", arrival_time=float(number * steps_between))
        for number, request in enumerate(drawn)
    ]
    found = counted(
        model,
        requests,
        settings,
        batch_size=batch_size,
        abort_after=abort_after,
        break_off_after=break_off_after,
        speculation=speculation if layout == "ragged" else None,
    )
    assert found == model.positions


FORCED = Request(prompt=[7] * 4, regex="ab[0-9]cde", max_tokens=20)
GUIDED = Request(prompt=[7] * 4, cfg_scale=2.0, negative_prompt=[9] * 6, max_tokens=4)
BEAMS = Request(prompt=[7] * 4, num_beams=3, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    ("request_", "computed"),
    [
        (Request(prompt=[7] * 4, max_tokens=4, ignore_eos=True), 4 + 3),
        (Request(prompt=[7] * 4, max_tokens=0), 0),
        (Request(prompt="", max_tokens=2, ignore_eos=True), 1),
        (replace(GUIDED, ignore_eos=True), 4 + 6 + 2 * 3),
        (BEAMS, 4 + 3 * 3),
        (FORCED, 4 + 2 + 4),
        (replace(FORCED, regex="[0-9]cde"), 4 + 4),
        (replace(FORCED, cfg_scale=2.0, negative_prompt=[9] * 6), 4 + 6 + 2 * (2 + 4)),
    ],
)
def test_positions_of_one_request(request_, computed):
    model = CountingModel("ragged")
    assert counted(model, [request_]) == Positions(total=computed, padding=0)
    assert model.positions.total == computed


@pytest.mark.parametrize("stop", [{"abort_after": [1]}, {"break_off_after": 1}])
def test_what_is_forced_in_the_last_step_is_not_computed(stop):
    model = CountingModel("ragged")
    assert counted(model, [FORCED], **stop) == model.positions == Positions(total=6, padding=0)


def test_a_sample_that_finds_the_prompt_of_another_computes_less_where_there_are_drafts():
    model = CountingModel("ragged")
    several = Request(prompt=[7] * 20, n=3, temperature=1.0, max_tokens=3, ignore_eos=True)
    found = counted(model, [several], batch_size=2, speculation=DRAFTS)
    assert found == model.positions


def test_who_is_aborted_stands_still_in_no_later_step():
    model, settings = CountingModel("ragged"), LIMITED[2]
    decoding = [Request(prompt=[7] * 4, max_tokens=14, ignore_eos=True)]
    long = [Request(prompt=[8] * 40, max_tokens=2, arrival_time=3)]
    found = counted(model, decoding + long, settings, abort_after=[3], speculation=DRAFTS)
    assert found == model.positions


def test_a_padded_step_is_as_wide_as_its_longest_chunk():
    requests = [Request(prompt=[7] * size, max_tokens=2, ignore_eos=True) for size in (3, 10, 5)]
    model = CountingModel("padded")
    assert counted(model, requests) == model.positions == Positions(total=33, padding=12)
