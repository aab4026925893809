"""batcher.decode: what a program gets."""

import numpy as np
import pytest

import batcher
from batcher import BatchdecodeError, Request, RequestError, Result, SimulatedModel, decode


def test_results_come_back_in_input_order_and_finish_in_completion_order() -> None:
    finished: list[Result] = []
    requests = [Request(prompt=[5], max_tokens=n, ignore_eos=True) for n in (5, 1, 3)]
    results = decode(requests, batch_size=3, on_finish=finished.append)
    assert [result.index for result in results] == [0, 0, 0]
    assert [result.id for result in finished] == ["2", "3", "1"]
    assert [result.id for result in results] == ["1", "2", "3"]


def test_no_requests_no_results() -> None:
    assert decode([]) == []


def test_mappings_are_requests_too() -> None:
    fields = {"id": "x", "prompt": "Hi", "stop_sequence": ["."], "max_tokens": 50}
    assert decode([fields]) == decode([Request(**fields)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": 5}, "request '2': `prompt` must be a string or a list of token ids, not 5"),
        ({}, "request '2': .*`prompt`"),
        ({"promt": "", "id": "x"}, "request 'x': unknown field `promt` .did you mean `prompt`"),
        ({"prompt": [512]}, "request '2': .*512"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": "", "stop": ""}, "stop"),
        ({"prompt": {1, 2}.__iter__()}, "request 2: .*cannot be part of a request"),
    ],
)
def test_a_bad_request_is_refused_before_anything_runs(fields: dict, message: str) -> None:
    with pytest.raises(BatchdecodeError, match=message):
        decode([{"prompt": "good"}, fields])


def test_synonyms_and_arrays_are_taken_from_mappings() -> None:
    [result] = decode([{"custom_id": "x", "prompt_tokens": np.array([5, 6]), "max_tokens": 1}])
    assert (result.id, result.usage.prompt_tokens) == ("x", 2)


def test_a_request_built_by_hand_is_checked_as_well() -> None:
    with pytest.raises(RequestError):
        decode([Request(prompt=[1], max_tokens="3")])
    with pytest.raises(RequestError):
        decode([Request(prompt=[1, True])])


def test_the_list_of_the_caller_is_never_changed() -> None:
    prompt = [5, 6, 7]
    decode([Request(prompt=prompt)], model=SimulatedModel())
    assert prompt == [5, 6, 7]


def test_one_model_serves_one_run_after_another() -> None:
    model = SimulatedModel()
    first = decode([{"prompt": "a"}, {"prompt": "b"}], model=model, batch_size=2)
    assert (
        decode([{"prompt": "a"}, {"prompt": "b"}], model=model, batch_size=1)[1].tokens
        == first[1].tokens
    )


@pytest.mark.parametrize(
    "fields",
    [{"prompt": b"hello"}, {"prompt": {5, 6}}, {"prompt": "", "stop": ["a", b"b"]}],
)
def test_bytes_and_sets_are_not_taken_for_text_and_lists(fields: dict) -> None:
    with pytest.raises(BatchdecodeError, match=r"request 1: a (bytes|set) cannot be part"):
        decode([fields])


def test_a_model_serves_one_engine_at_a_time() -> None:
    model = SimulatedModel()
    first = batcher.Engine(model)
    first.add(Request(prompt="", max_tokens=3))
    first.step()
    second = batcher.Engine(model)
    second.add(Request(prompt="", max_tokens=1))
    assert len(second.step().results) == 1
    with pytest.raises(BatchdecodeError, match="another engine has taken the model"):
        first.step()


def test_a_prompt_that_is_changed_later_was_added_as_it_was() -> None:
    prompt = [5, 6]
    engine = batcher.Engine(SimulatedModel())
    engine.add(Request(prompt=prompt, max_tokens=4))
    prompt.append(7)
    expected = decode([Request(prompt=[5, 6], max_tokens=4)])[0].tokens
    results = []
    while engine.has_work:
        results += engine.step().results
    assert results[0].tokens == expected


def test_an_engine_takes_requests_only() -> None:
    with pytest.raises(BatchdecodeError, match="takes a Request, not a dict"):
        batcher.Engine(SimulatedModel()).add({"prompt": ""})


def test_a_result_without_a_fault_has_no_error() -> None:
    [result] = decode([{"prompt": ""}])
    assert result.error is None


def test_every_public_name_can_be_had() -> None:
    for name in batcher.__all__:
        assert name in dir(batcher)
        assert getattr(batcher, name) is not None
    with pytest.raises(AttributeError):
        batcher.no_such_name  # noqa: B018 - the look-up is the test
