"""The context of a model: a prompt that leaves no room fails, an output that reaches it ends."""

import pytest
from control_requests import control_requests
from engine_runs import drained, fields, of_kind
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests

from batcher import SimulatedModel
from batcher.engine import Engine
from batcher.engine.model_runner import ModelRunner
from batcher.events import AdmitEvent, ArriveEvent, FinishEvent
from batcher.models.callables import CallableModel
from batcher.models.loading import CheckedModel
from batcher.models.simulated import SimulatedSettings
from batcher.prompts import count_tokens
from batcher.request import TO_THE_END
from batcher.settings import DEFAULT_SCHEDULING, SchedulingSettings

MODEL = SimulatedModel()
HEALER = ModelRunner(MODEL, 1)


class Bounded(SimulatedModel):
    """The simulated model with a context; `needs_prompt` as a transformer does."""

    def __init__(self, max_context, *, needs_prompt=False, settings=None):
        super().__init__(settings)
        self.max_context, self.needs_prompt = max_context, needs_prompt


def run(requests, model, batch_size=5, settings=DEFAULT_SCHEDULING):
    engine = Engine(model, batch_size, settings=settings, is_streaming=True, is_checked=True)
    for request in requests:
        engine.enqueue(request)
    return drained(engine)


def room_for(request, max_context):
    """How many tokens the output of a request may have, by the documentation."""
    tokens = request.prompt
    if isinstance(tokens, str):
        tokens = MODEL.tokenizer.encode(tokens)
    num_tokens = len(HEALER.heal(tokens)[0]) if request.heal else len(tokens)
    if request.cfg_scale != 1:
        negative = count_tokens(request.negative_prompt or [], MODEL.tokenizer)
        num_tokens = max(num_tokens, negative)
    return max_context - num_tokens


def told(results):
    bare = [replace(one, slot=None, steps=None) for one in results]
    return sorted(bare, key=lambda one: (one.id, one.index))


def streams(done):
    found = {}
    for one in done.tokens:
        found.setdefault((one.id, one.index), []).append((one.tokens, one.text, one.state))
    return found


@examples(60)
@given(
    st.lists(st.one_of(control_requests(), english_requests()), min_size=1, max_size=6),
    st.integers(1, 30),
    st.sampled_from([DEFAULT_SCHEDULING, SchedulingSettings(kv_blocks=60, block_size=4)]),
)
def test_an_output_ends_in_the_context_as_it_would_with_so_few_max_tokens(
    drawn, max_context, settings
):
    requests = [replace(one, id=f"r{n}", arrival_time=0.0) for n, one in enumerate(drawn)]
    rooms = {one.id: room_for(one, max_context) for one in requests}
    fitting = [one for one in requests if rooms[one.id] >= min(one.output_limit, 1)]
    shorter = [replace(one, max_tokens=min(one.output_limit, rooms[one.id])) for one in fitting]
    done = run(requests, Bounded(max_context), settings=settings)
    wanted = run(shorter, MODEL, settings=settings)
    cut = {one.id for one in fitting if one.output_limit > rooms[one.id]}
    ids = {one.id for one in fitting}
    assert told(one for one in done.results if one.id in ids) == [
        replace(one, limit="max_context")
        if one.id in cut and one.finish_reason == "length"
        else one
        for one in told(wanted.results)
    ]
    assert streams(done) == streams(wanted)
    for result in done.results:
        if result.id not in ids:
            assert result.error is not None
            assert (result.error.code, result.slot) == ("prompt-too-long", None)


def test_the_trace_says_what_was_left_to_generate_and_which_limit_ended_it():
    requests = [
        fields(id="cut", prompt=[9] * 4, max_tokens=9, ignore_eos=True),
        fields(id="whole", prompt=[9] * 4, max_tokens=6, ignore_eos=True),
        fields(id="long", prompt=[9] * 10),
        fields(id="longer", prompt=[9] * 11, max_tokens=0),
    ]
    done = run(requests, Bounded(10))
    told_of = {one.id: one.max_tokens for one in of_kind(done.events, ArriveEvent)}
    assert told_of == {"cut": 6, "whole": 6, "long": 8, "longer": 0}
    ends = {one.id: (one.reason, one.limit, one.slot) for one in of_kind(done.events, FinishEvent)}
    assert ends == {
        "cut": ("length", "max_context", 0),
        "whole": ("length", None, 1),
        "long": ("error", None, None),
        "longer": ("error", None, None),
    }
    assert {one.id: one.error.message for one in done.results if one.error} == {
        "long": "step 0: the prompt has 10 tokens, which fills the context of 10",
        "longer": "step 0: the prompt has 11 tokens, more than the context of 10",
    }
    assert len(of_kind(done.events, AdmitEvent)) == 2


def test_a_prompt_that_is_scored_alone_may_fill_the_context():
    scored = [
        fields(id="fills", prompt=[9] * 10, max_tokens=0, prompt_logprobs=0),
        fields(id="above", prompt=[9] * 11, max_tokens=0, prompt_logprobs=0),
    ]
    above, fills = run(scored, Bounded(10)).results
    assert (fills.finish_reason, len(fills.prompt_logprobs or ())) == ("length", 10)
    assert above.error is not None
    assert above.error.code == "prompt-too-long"


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        ({"prompt": ""}, "empty-prompt", "the prompt is empty"),
        ({"prompt": []}, "empty-prompt", "the prompt is empty"),
        ({"cfg_scale": 2.0}, "empty-prompt", "the negative prompt is empty"),
        ({"cfg_scale": 2.0, "negative_prompt": [9] * 30}, "prompt-too-long", "the negative prompt"),
        ({"prompt": [9] * 40, "num_beams": 2, "n": 2}, "prompt-too-long", "the prompt has 40"),
        ({"prompt": [9] * 40, "n": 3, "temperature": 1.0}, "prompt-too-long", "the prompt has 40"),
    ],
)
def test_every_output_of_a_request_that_has_no_room_fails_without_a_slot(more, code, message):
    done = run([fields(**more)], Bounded(30, needs_prompt=True))
    assert len(done.results) == more.get("n", 1)
    for result in done.results:
        assert result.error is not None
        assert result.error.code == code
        assert message in result.error.message
    assert of_kind(done.events, AdmitEvent) == []


def test_a_turn_that_has_no_room_fails_and_so_do_those_after_it():
    turns = [
        fields(id=name, prompt=[9] * 5, max_tokens=6, ignore_eos=True, session="s")
        for name in ("a", "b", "c", "d")
    ]
    results = run(turns, Bounded(20)).results
    assert [(one.id, one.finish_reason, one.limit) for one in results] == [
        ("a", "length", None),  # 5 + 6
        ("b", "length", "max_context"),  # 16 + 4
        ("c", "error", None),  # 25
        ("d", "error", None),
    ]
    codes = [one.error.code for one in results if one.error is not None]
    assert codes == ["prompt-too-long", "session-failed"]


class Own:
    """A model of somebody else's."""

    def __init__(self):
        inner = SimulatedModel()
        self.name, self.settings, self.tokenizer = "own", {}, inner.tokenizer
        self.vocab_size, self.eos_token_id = inner.vocab_size, inner.eos_token_id
        self.gives, self.allocate, self.forward = inner.gives, inner.allocate, inner.forward
        self.fork, self.release, self.max_context = inner.fork, inner.release, 9


def test_models_of_ones_own_tell_their_context_too():
    def two(prefixes):
        return [2 for _ in prefixes]

    two.max_context = 9
    for model in (CheckedModel(Own()), CallableModel(two)):
        request = fields(prompt=[9] * 7, max_tokens=5, ignore_eos=True)
        engine = Engine(model, 1)
        engine.add(request)
        results = [result for _ in range(4) for result in engine.step().results]
        assert [(len(one.tokens), one.limit) for one in results] == [(2, "max_context")]


ENDLESS = SimulatedSettings(eos_rate=0)


@pytest.mark.parametrize(
    ("more", "num_tokens"),
    [
        ({}, 36),
        ({"n": 2, "temperature": 1.0}, 36),
        ({"num_beams": 2, "n": 2}, 36),
        ({"cfg_scale": 2.0, "negative_prompt": [9] * 10}, 30),
        ({"min_tokens": 30}, 36),
    ],
)
def test_a_chat_without_a_limit_fills_the_context(more, num_tokens):
    chat = fields(prompt=[9] * 4, max_tokens=TO_THE_END, **more)
    done = run([chat], Bounded(40, settings=ENDLESS))
    assert len(done.results) == more.get("n", 1)
    for result in done.results:
        assert (result.finish_reason, result.limit) == ("length", "max_context")
        assert len(result.tokens or ()) == num_tokens
    arrived = of_kind(done.events, ArriveEvent)
    assert {(one.max_tokens, one.default_limit) for one in arrived} == {(num_tokens, True)}
    assert (
        done.results == run([replace(chat, max_tokens=50)], Bounded(40, settings=ENDLESS)).results
    )


def test_a_context_caps_what_is_kept_and_its_lack_gives_4096():
    [result] = run([fields(max_tokens=TO_THE_END)], SimulatedModel(ENDLESS)).results
    assert (result.finish_reason, result.limit) == ("length", None)
    assert len(result.tokens or ()) == 4096
    settings = SchedulingSettings(kv_blocks=8, block_size=4, capacity="no-evict")
    requests = [fields(id=name, prompt=[9] * 8, max_tokens=100, ignore_eos=True) for name in "ab"]
    done = run(requests, Bounded(17), settings=settings)
    assert [(one.finish_reason, len(one.tokens)) for one in done.results] == [("length", 9)] * 2
    assert {one.step for one in of_kind(done.events, AdmitEvent)} == {0}
    [result] = run([fields(prompt="", max_tokens=0)], Bounded(9, needs_prompt=True)).results
    assert result.finish_reason == "length"


@pytest.mark.parametrize(
    ("more", "capacity"),
    [
        ({}, "on-demand"),
        ({"n": 2, "temperature": 1.0}, "watermark"),
        ({"num_beams": 2, "n": 2}, "no-evict"),
    ],
)
def test_a_chat_without_a_limit_fails_only_if_it_fills_all_blocks(more, capacity):
    prompts = {str(n): [9, 9, 9, 260 + n] for n in range(12)}
    chats = [
        fields(id=name, prompt=prompt, max_tokens=TO_THE_END, **more)
        for name, prompt in prompts.items()
    ]
    settings = SchedulingSettings(kv_blocks=16, block_size=4, capacity=capacity)
    free = {(one.id, one.index): one for one in run(chats, MODEL).results}
    results = run(chats, MODEL, settings=settings).results
    assert len(results) == len(free)
    for result in results:
        expected, tokens = free[result.id, result.index], result.tokens or []
        if result.error is None:
            assert (tokens, result.text) == (expected.tokens, expected.text)
        else:
            assert result.error.code == "kv-too-small"
            assert "--kv-blocks" in result.error.message
            if "num_beams" not in more:
                assert tokens == (expected.tokens or [])[: 64 - 4 + 1]
                assert len(tokens) == 64 - 4 + 1
    assert {one.error is None for one in results} == {True, False}
