"""Any `model_next` is a model; one that misbehaves fails its rows, says when, and no more."""

import numpy as np
import pytest

from batcher import BatchdecodeError, Request, decode
from batcher.models.base import Batch, Chunk
from batcher.models.loading import as_model, load_model


def count_up(prefixes):
    return [len(prefix) for prefix in prefixes]


def requests(*lengths):
    return [Request(prompt=[7] * (i + 1), max_tokens=n) for i, n in enumerate(lengths)]


def outcomes(results):
    return [(result.finish_reason, result.tokens) for result in results]


def test_a_callable_sees_whole_prefixes_in_slot_order_and_may_change_them():
    seen = []

    def spy(prefixes):
        seen.append([list(prefix) for prefix in prefixes])
        return count_up(prefixes)

    decode(requests(2, 1, 1), model=spy, batch_size=2)
    assert seen == [[[7], [7, 7]], [[7, 1], [7, 7, 7]]]

    def vandal(prefixes):
        answer = count_up(prefixes)
        for prefix in prefixes:
            prefix.clear()
        return answer

    assert decode(requests(3, 2), model=vandal) == decode(requests(3, 2), model=count_up)


@pytest.mark.parametrize(
    "answer",
    [
        lambda prefixes: np.array(count_up(prefixes)),
        lambda prefixes: tuple(count_up(prefixes)),
        lambda prefixes: iter(count_up(prefixes)),
        lambda prefixes: [np.int32(n) for n in count_up(prefixes)],
    ],
)
def test_any_iterable_of_integers_is_an_answer(answer):
    assert decode(requests(2, 3), model=answer) == decode(requests(2, 3), model=count_up)


def endless(_):
    while True:
        yield 1


def raising(_):
    raise ValueError("no weights")


def exiting(_):
    raise SystemExit(3)


class OwnError(BaseException):
    """Not an Exception."""


def raising_its_own(_):
    raise OwnError("mine")


def closing(_):
    yield 1
    raise GeneratorExit


def interrupted(_):
    raise KeyboardInterrupt


class Unprintable:
    def __repr__(self):
        raise ValueError("no words")


WRONG = [
    (lambda p: [Unprintable()] * len(p), "which is not a token id"),
    (lambda p: [1] * (len(p) + 1), "returned more than 2 tokens for 2 sequences"),
    (lambda p: [1] * (len(p) - 1), "returned 1 tokens for 2 sequences"),
    (lambda _: None, "returned None, not a token for each of 2 sequences"),
    (endless, "returned more than 2 tokens"),
    (raising, "raised ValueError: no weights"),
    (exiting, "raised SystemExit"),
    (raising_its_own, "raised OwnError: mine"),
    (closing, "raised GeneratorExit"),
    (lambda p: [1.0] * len(p), "1.0, which is not a token id"),
    (lambda p: [True] * len(p), "True, which is not a token id"),
    (lambda p: [-1] * len(p), "-1, which is not a token id, an integer from 0 to 2147483647"),
    (lambda p: [10**6000] * len(p), "a huge integer, which is not a token id"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_wrong_answer_fails_the_batch_at_its_step_and_the_run_goes_on(wrong, message):
    calls = 0

    def model(prefixes):
        nonlocal calls
        calls += 1
        return wrong(prefixes) if calls == 3 else count_up(prefixes)

    results = decode(requests(4, 5, 3), model=model, batch_size=2)
    assert outcomes(results) == [("error", [1, 2]), ("error", [2, 3]), ("length", [3, 4, 5])]
    for result in results[:2]:
        assert result.error.code == "model-error"
        assert result.error.message.startswith("step 2: ")
        assert message in result.error.message
        assert (result.steps.admitted, result.steps.finished) == (0, 2)
    assert results[2].steps.admitted == 3


def test_one_wrong_row_fails_alone_and_ctrl_c_none():
    with pytest.raises(KeyboardInterrupt):
        decode(requests(4), model=interrupted)

    def model(prefixes):
        return [-5 if len(prefix) == 4 else len(prefix) for prefix in prefixes]

    results = decode(requests(2, 2, 2, 9), model=model, batch_size=4)
    assert outcomes(results) == [
        ("length", [1, 2]),
        ("length", [2, 3]),
        ("error", [3]),
        ("error", []),
    ]
    assert results[3].steps.first_token is None


def test_attributes_describe_the_model_and_texts_reach_it_as_bytes():
    def model(prefixes):
        return [9 if len(prefix) == 3 else 12 if len(prefix) > 3 else 1 for prefix in prefixes]

    model.vocab_size, model.eos_token_id = 10, 9
    one, two = decode([Request(prompt=[1, 1]), Request(prompt=[1] * 4)], model=model)
    assert (one.tokens, one.finish_reason, one.stop_reason) == ([1, 9], "stop", None)
    assert "12, which is not a token id, an integer from 0 to 9" in two.error.message
    [result] = decode([{"prompt": "hé", "max_tokens": 3}], model=lambda ps: [p[-1] for p in ps])
    assert result.usage.prompt_tokens == 3
    assert result.text == "\ufffd\ufffd\ufffd"
    [large] = decode([{"prompt": "", "max_tokens": 1}], model=lambda _: [4000])
    assert large.text == "\ufffd"


def test_a_model_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "def echo(prefixes):\n    return [p[-1] for p in prefixes]\n\n\n"
        "class Counting:\n"
        "    def __call__(self, prefixes):\n        return [len(p) for p in prefixes]\n"
    )
    monkeypatch.chdir(tmp_path)
    assert decode([Request(prompt=[4])], model=load_model("my_models:echo"))[0].tokens == [4] * 16
    counting = load_model("my_models:Counting")
    assert (counting.name, counting.forward.__self__._model_next([[1]])) == (
        "my_models:Counting",
        [1],
    )
    with pytest.raises(BatchdecodeError, match="did you mean my_models:echo"):
        load_model("my_models:ecko")


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("gpt", {}, "unknown model 'gpt'; use simulated, smollm2, FILE.gguf"),
        ("smolm2", {}, r"'smolm2' \(did you mean smollm2\?\); use .*openai:URL"),
        ("./my:x", {}, "unknown model './my:x': './my' is not a package.module"),
        ("my.py:x", {}, "'my.py' is not a package.module"),
        ("no_such_module:x", {}, "cannot import no_such_module: ModuleNotFoundError"),
        ("math:pi", {}, "math:pi is neither a Model nor an LLM nor callable"),
        ("simulated", {"eos_rat": 1}, r"eos_rat.*settings: seed, eos_rate, newline_rate"),
        ("simulated", {"eos_rate": 2}, "eos_rate"),
    ],
)
def test_a_model_that_cannot_be_made(spec, settings, message):
    with pytest.raises(BatchdecodeError, match=message):
        load_model(spec, settings)


def rising(prefixes):
    return [[float(len(prefix) + token) for token in range(3)] for prefix in prefixes]


rising.gives, rising.vocab_size = "logits", 3


def batch_of(*prompts):
    batch = Batch(len(prompts))
    for slot, prompt in enumerate(prompts):
        batch.join(Chunk(slot, prompt, 0))
    batch.logit_slots = batch.slots
    return batch


@pytest.mark.parametrize("answer", [lambda rows: rows, np.array, tuple, iter, np.float16])
def test_a_callable_may_give_logits(answer):
    def model(prefixes):
        return answer(rising(prefixes))

    model.gives, model.vocab_size = "logits", 3
    adapted = as_model(model)
    adapted.allocate(2)
    output = adapted.forward(batch_of([7], [7, 7]))
    assert adapted.gives == "logits"
    assert output.logits.tolist() == [[1, 2, 3], [2, 3, 4]]
    assert output.logits.dtype == np.float32
    assert output.failed == {}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1.0, 2.0], "rising returned 2 logits, not 3"),
        (5, "rising returned 5, not a list of logits"),
        (["1", "2", "3"], "not a list of logits"),
    ],
)
def test_a_row_that_is_no_logits_fails_alone(row, message):
    def model(prefixes):
        return [row if prefix == [7] else [0.0, 1.0, 2.0] for prefix in prefixes]

    model.gives, model.vocab_size = "logits", 3
    adapted = as_model(model, "rising")
    adapted.allocate(2)
    output = adapted.forward(batch_of([7], [7, 7]))
    assert output.failed.keys() == {0}
    assert message in output.failed[0]
    assert output.logits[1].tolist() == [0, 1, 2]
