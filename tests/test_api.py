"""batcher.decode: what a program gets."""

import re

import numpy as np
import pytest
from engine_runs import drained

import batcher
from batcher import BatchdecodeError, Engine, Request, SimulatedModel, decode
from batcher.settings import SchedulingSettings
from batcher.speculation.settings import SpeculationSettings


def test_results_come_back_in_input_order_from_requests_and_mappings():
    finished = []
    requests = [Request(prompt=[5], max_tokens=n, ignore_eos=True) for n in (5, 1, 3)]
    results = decode(requests, batch_size=3, on_finish=finished.append)
    assert [result.index for result in results] == [0, 0, 0]
    assert [result.id for result in finished] == ["2", "3", "1"]
    assert [result.id for result in results] == ["1", "2", "3"]
    fields = {"id": "x", "prompt": "Hi", "stop_sequence": ["."], "max_tokens": 50}
    assert decode([fields]) == decode([Request(**fields)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": 5}, "request '2': `prompt` must be a string or a list of token ids, not 5"),
        ({}, "request '2': .*`prompt`"),
        ({"promt": "", "id": "x"}, "request 'x': unknown field `promt` .did you mean `prompt`"),
        ({"prompt": "", "stop": ""}, "stop"),
        ({"prompt": {1, 2}.__iter__()}, "request 2: .*cannot be part of a request"),
    ],
)
def test_a_bad_request_is_refused_before_anything_runs(fields, message):
    with pytest.raises(BatchdecodeError, match=message):
        decode([{"prompt": "good"}, fields])


def test_synonyms_and_arrays_are_taken_from_mappings():
    [result] = decode([{"custom_id": "x", "prompt_tokens": np.array([5, 6]), "max_tokens": 1}])
    assert (result.id, result.usage.prompt_tokens) == ("x", 2)


@pytest.mark.parametrize(
    "fields", [{"prompt": b"hello"}, {"prompt": {5, 6}}, {"prompt": "", "stop": ["a", b"b"]}]
)
def test_bytes_and_sets_are_not_taken_for_text_and_lists(fields):
    with pytest.raises(BatchdecodeError, match=r"request 1: a (bytes|set) cannot be part"):
        decode([fields])


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"not": value}
    return value


def cyclic_mapping():
    value = {}
    value["not"] = value
    return value


def cyclic_list():
    value = ["a"]
    value.append(value)
    return value


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -np.inf, np.float32("nan")])
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (lambda number: {"top_p": np.array(number)}, "top_p"),
        (lambda number: {"prompt": [1, number]}, "prompt"),
        (lambda number: {"logit_bias": {"5": number}}, "5"),
        (lambda number: {"json_schema": {"enum": [{"x": (0.5, number)}]}}, "x"),
        (lambda number: {"json_schema": {"const": np.array([[number]], object)}}, "const"),
    ],
)
def test_numbers_that_json_does_not_have_are_refused(number, fields, name):
    with pytest.raises(
        BatchdecodeError, match=rf"request 2: `{name}` must be finite, not -?(nan|inf)"
    ):
        decode([{"prompt": ""}, {"prompt": "x"} | fields(number)])


@pytest.mark.parametrize("key", [float("nan"), np.float32("inf"), b"5"])
def test_keys_that_json_does_not_have_are_refused(key):
    with pytest.raises(BatchdecodeError, match=r"request 1: a (key|bytes) (must|cannot) be"):
        decode([{"prompt": "x", "logit_bias": {key: 1.0}}])


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": nested(5000)},
        {"json_schema": cyclic_mapping()},
        {"stop_sequence": cyclic_list()},
        {"states": {"start": cyclic_list()}},
    ],
    ids=["deep", "schema", "stops", "state"],
)
def test_what_is_nested_without_end_is_refused(fields):
    with pytest.raises(BatchdecodeError, match=r"request '?2'?: .*nested too deep"):
        decode([{"prompt": ""}, {"prompt": "x"} | fields])


def test_a_model_serves_one_engine_and_that_takes_requests_as_they_were():
    model = SimulatedModel()
    first = batcher.Engine(model)
    first.add(Request(prompt="", max_tokens=3))
    first.step()
    second = batcher.Engine(model)
    second.add(Request(prompt="", max_tokens=1))
    assert len(second.step().results) == 1
    with pytest.raises(BatchdecodeError, match="another engine has taken the model"):
        first.step()
    prompt, allowed = [5, 6], [48]
    engine = batcher.Engine(SimulatedModel())
    engine.add(Request(prompt=prompt, max_tokens=2, allowed_token_ids=allowed))
    prompt.append(7)
    allowed[0] = 49
    results = drained(engine).results
    assert (results[0].tokens, results[0].usage.prompt_tokens) == ([48, 48], 2)
    with pytest.raises(BatchdecodeError, match="takes a Request, not a dict"):
        batcher.Engine(SimulatedModel()).add({"prompt": ""})


def drafts(**fields):
    return {"speculation": SpeculationSettings(**{"draft": "ngram", **fields})}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": True}, "batch size True is not an integer from 1 to 1048576"),
        ({"settings": {"policy": "fcfs"}}, "settings must be SchedulingSettings, not a dict"),
        ({"step_time": 0.1}, "step_time must be a StepTime: 0.1 lacks name, settings, ticks,"),
        ({"clock": 1.0}, "clock must be a Clock: 1.0 lacks "),
        ({"speculation": "ngram"}, "speculation must be a Drafter: 'ngram' lacks open, extend,"),
        (drafts(acceptance="Exact"), "acceptance must be exact or leviathan, not 'Exact'"),
        (drafts(draft_tokens=-1), "draft_tokens must be an integer from 1 to 64 or auto, not -1"),
        (drafts(draft_tree=3), "draft_tree must be text, in quotes if need be, not 3"),
        ({"settings": SchedulingSettings(batching="\ud800")}, r"batching must be continuous or "),
        ({"grammar_timeout": "5"}, "grammar_timeout '5' is not a number above 0"),
    ],
)
def test_an_engine_says_which_of_its_arguments_is_wrong(arguments, message):
    with pytest.raises(BatchdecodeError, match=re.escape(message)):
        Engine(SimulatedModel(), **arguments)


def test_every_public_name_can_be_had():
    for name in batcher.__all__:
        assert name in dir(batcher)
        assert getattr(batcher, name) is not None
    with pytest.raises(AttributeError):
        batcher.no_such_name  # noqa: B018 - the look-up is the test


def test_samples_come_by_index_but_the_best_of_many_best_first():
    fields = {"id": "a", "prompt": "Hi", "temperature": 1.0, "logprobs": 0, "max_tokens": 12}
    everything = decode([{**fields, "n": 6}], batch_size=4)
    assert [result.index for result in everything] == list(range(6))
    best = decode([{**fields, "n": 5, "best_of": 6}], batch_size=4)
    ranked = sorted(everything, key=lambda result: -result.cumulative_logprob)
    assert [result.index for result in best] == [result.index for result in ranked[:5]]
    assert [result.index for result in best] != sorted(result.index for result in best)
