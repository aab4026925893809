"""Whose blocks a sequence found, by who computed what: from events and tokens alone."""

from engine_runs import drained
from examples import examples
from grouped_model import GroupedModel
from hypothesis import event as note
from hypothesis import given
from hypothesis import strategies as st

from batcher import Engine, Request, SimulatedModel
from batcher.events import AdmitEvent, ArriveEvent, FinishEvent, PrefillEvent, SequenceName
from batcher.request import PromptSegment
from batcher.settings import SchedulingSettings

ORDER = (FinishEvent, PrefillEvent, AdmitEvent)  # who has gone, goes on and comes
ROOMY = SchedulingSettings(block_size=2, prefix_cache=True)

Tokens = dict[SequenceName, list[int]]


def run(engine, requests):
    """Return the events of a run, and the tokens of all samples, prompt and output."""
    prompts = {engine.add(request): request.prompt for request in requests}
    done = drained(engine)
    return done.events, {
        SequenceName(result.id, result.index): [*prompts[result.id], *result.tokens]
        for result in done.results
    }


@st.composite
def alike_requests(draw):
    """Requests of which many begin with the same tokens."""
    return [
        Request(
            id=f"r{number}",
            prompt=draw(st.lists(st.integers(3, 4), min_size=1, max_size=9)),
            max_tokens=draw(st.integers(1, 6)),
            arrival_time=draw(st.sampled_from([0.0, 0.0, 2.0, 7.0])),
            priority=draw(st.integers(0, 2)),
            cache_salt=draw(st.sampled_from([None, None, "salt"])),
            ignore_eos=True,
        )
        for number in range(draw(st.integers(1, 8)))
    ]


def first_to_compute(events, tokens, salts, size):
    """Yield each admission, and who was the first to compute what it found, nothing being evicted.

    What a step computes of a prompt can be found at once, and an output when its row has gone.
    """
    first = {}
    num_prompt = {event.id: event.prompt_tokens for event in events if type(event) is ArriveEvent}
    for event in sorted(
        (event for event in events if isinstance(event, ORDER)),
        key=lambda event: (event.step + (type(event) is FinishEvent), ORDER.index(type(event))),
    ):
        name = SequenceName(event.id, event.index)
        own, salt = tokens[name], salts[event.id]
        if isinstance(event, AdmitEvent):
            yield event, first.get((salt, tuple(own[: event.cached])))
        is_over = isinstance(event, FinishEvent)
        num_computed = len(own) - 1 if is_over else num_prompt[event.id] - event.left
        for stop in range(size, num_computed + 1, size):
            first.setdefault((salt, tuple(own[:stop])), name)


@given(alike_requests(), st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, 4, 7]))
@examples(200)
def test_where_nothing_is_evicted_it_is_who_computed_them_first(
    requests, batch_size, block_size, budget
):
    settings = SchedulingSettings(
        block_size=block_size, prefix_cache=True, max_batch_tokens=budget, policy="priority"
    )
    events, tokens = run(Engine(SimulatedModel(), batch_size, settings=settings), requests)
    salts = {request.id: request.cache_salt for request in requests}
    for admit, expected in first_to_compute(events, tokens, salts, block_size):
        assert admit.cached_from == expected
        note(f"finds: {expected is not None}")


@given(alike_requests(), st.integers(1, 4), st.integers(8, 20))
@examples(100)
def test_where_they_are_evicted_and_preempted_it_is_one_that_has_the_same_tokens(
    requests, batch_size, num_blocks
):
    settings = SchedulingSettings(
        block_size=2, kv_blocks=num_blocks, capacity="on-demand", preempt_for="priority"
    )
    events, tokens = run(Engine(SimulatedModel(), batch_size, settings=settings), requests)
    come = set()
    for admit in events:
        if not isinstance(admit, AdmitEvent):
            continue
        assert (admit.cached_from is None) == (admit.cached == 0)
        if admit.cached_from is not None:
            assert admit.cached_from in come, "it had not come by then"
            own = tokens[SequenceName(admit.id, admit.index)]
            assert tokens[admit.cached_from][: admit.cached] == own[: admit.cached]
            note(f"its own: {admit.cached_from.id == admit.id}")
        come.add(SequenceName(admit.id, admit.index))


def found_by(engine, *requests):
    events, _ = run(engine, list(requests))
    admits = [event for event in events if isinstance(event, AdmitEvent) and event.cached]
    return [(admit.id, admit.index, admit.cached, admit.cached_from) for admit in admits]


def test_whose_blocks_were_found_is_named_whatever_they_are():
    engine = Engine(SimulatedModel(), 3, settings=ROOMY)
    guided = Request(id="g", prompt=[3], negative_prompt=[5] * 5, cfg_scale=1.5, max_tokens=2)
    beams = Request(id="b", prompt=[5] * 5, num_beams=2, max_tokens=2, arrival_time=9.0)
    after = Request(id="c", prompt=[5] * 7, max_tokens=2, arrival_time=19.0)
    assert found_by(engine, guided, beams, after) == [
        ("b", 0, 4, SequenceName("g", 0, "negative")),
        ("c", 0, 4, SequenceName("g", 0, "negative")),
    ]
    engine = Engine(
        SimulatedModel(), 1, settings=SchedulingSettings(block_size=4, prefix_cache=True)
    )
    system, user = PromptSegment(length=6, seed=0), PromptSegment(length=3, seed=1)
    other = PromptSegment(length=3, seed=2)
    requests = [
        Request(id=name, prompt=[system, own], max_tokens=1, arrival_time=time)
        for name, own, time in (("a", user, 0.0), ("b", other, 5.0), ("c", user, 9.0))
    ]
    assert found_by(engine, *requests) == [
        ("b", 0, 6, SequenceName("a", 0)),
        ("c", 0, 8, SequenceName("a", 0)),
    ]
    engine = Engine(GroupedModel(None, 3), 1, settings=ROOMY)
    requests = [
        Request(id=name, prompt=[5] * 9, max_tokens=1, arrival_time=time)
        for name, time in (("a", 0.0), ("b", 5.0))
    ]
    assert found_by(engine, *requests) == [("b", 0, 8, SequenceName("a", 0))]
    settings = SchedulingSettings(kv_blocks=20, block_size=4, prefix_cache=False)
    short = Request(id="x", prompt=[9], max_tokens=2, ignore_eos=True)
    samples = Request(id="a", prompt=[3] * 7, max_tokens=4, n=2, temperature=1.0, ignore_eos=True)
    found = found_by(Engine(SimulatedModel(), 2, settings=settings), short, samples)
    assert found == [("a", 1, 6, SequenceName("a", 0))]
