"""Whatever a request asks for, its outputs are its own, in any batch, slot and order."""

import pytest
from control_requests import control_requests
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests
from test_scheduling_invariance import timeless

from batcher import Result, SimulatedModel
from batcher.engine import Engine
from batcher.engine.rows import RowState
from batcher.requests.validation import num_slots_needed

Outputs = dict[str, list[Result]]


def decode(requests, batch_size):
    """Return the results of each request, without what tells of the batch they were decoded in."""
    engine = Engine(SimulatedModel(), batch_size)
    for request in requests:
        engine.add(request)
    outputs = {request.id or "": [] for request in requests}
    while engine.has_work:
        for result in engine.step().results:
            outputs[result.id].append(result)
    return {request_id: [*map(timeless, results)] for request_id, results in outputs.items()}


def named(requests):
    return [replace(request, id=f"r{number}") for number, request in enumerate(requests)]


def in_order(outputs):
    return {
        request_id: sorted(results, key=lambda result: result.index)
        for request_id, results in outputs.items()
    }


@given(
    st.lists(st.one_of(control_requests(), english_requests()), min_size=1, max_size=8),
    st.sampled_from([1, 3, 8, 64]),
    st.randoms(use_true_random=False),
)
@examples(60)
def test_outputs_do_not_depend_on_the_batch_or_the_order(requests, batch_size, shuffler):
    requests = [request for request in named(requests) if num_slots_needed(request) <= batch_size]
    alone = {}
    for request in requests:
        alone |= decode([request], num_slots_needed(request))
    shuffled = requests.copy()
    shuffler.shuffle(shuffled)
    assert in_order(decode(shuffled, batch_size)) == in_order(alone)


@given(control_requests())
@examples(60)
def test_a_request_gives_as_many_results_as_it_asks_for(request):
    (results,) = decode(named([request]), 4).values()
    assert len(results) == request.n
    assert len({result.index for result in results}) == request.n


@given(st.lists(control_requests(), min_size=1, max_size=4))
@examples(40)
def test_jumping_ahead_changes_no_output(requests):
    jumping = decode(named(requests), 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowState, "may_jump", False)
        walking = decode(named(requests), 4)
    assert in_order(jumping) == in_order(walking)
