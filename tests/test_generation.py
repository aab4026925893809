"""`generate` and `generate_many` call an LLM that knows nothing of batches."""

import asyncio

import pytest

from batcher import BatchdecodeError, CallSettings, generate, generate_many
from batcher.errors import ModelError, RequestError

STOP = 5
QUICK = CallSettings(timeout=5, max_attempts=2, backoff=0.001)


class LLM:
    """The likeliest token after n others is n % 6, so the stop token comes at every sixth place."""

    def __init__(self, *, sharpness=1.0):
        self.calls = []
        self.sharpness = sharpness

    def get_stop_token_id(self):
        return STOP

    def next_token_logits(self, prev_token_ids):
        self.calls.append(prev_token_ids.copy())
        place = len(prev_token_ids) % 6
        prev_token_ids.append(0)  # it may
        return [self.sharpness * (token == place) for token in range(6)]


class AsyncLLM(LLM):
    async def get_stop_token_id(self):
        return super().get_stop_token_id()

    async def next_token_logits(self, prev_token_ids):
        await asyncio.sleep(0)
        return super().next_token_logits(prev_token_ids)


KINDS = pytest.mark.parametrize("kind", [LLM, AsyncLLM])


@KINDS
def test_the_likeliest_tokens_come_up_to_the_stop_token_in_a_running_loop_too(kind):
    prompt = [0, 1]
    assert generate(prompt, llm := kind(), temperature=0) == [2, 3, 4, STOP]
    assert prompt == [0, 1]
    assert llm.calls == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]

    async def inside():
        return generate([0], kind(), temperature=0), generate_many([0], kind(), 2, max_tokens=3)

    one, many = asyncio.run(inside())
    assert one == [1, 2, 3, 4, STOP]
    assert len(many) == 2


def test_a_prompt_may_be_any_sequence_and_an_output_any_length():
    assert generate((STOP,), LLM(), temperature=0) == [1, 2, 3, 4, STOP]
    assert generate(range(6), LLM(), temperature=0)[-1] == STOP
    assert generate(iter([0, 1]), llm := LLM(), temperature=0) == [2, 3, 4, STOP]
    assert llm.calls[0] == [0, 1]

    class Long(LLM):
        vocab_size = 6

        def next_token_logits(self, prev_token_ids):
            return [1.0, *[0.0] * 4, 2.0 * (len(prev_token_ids) == 300)]

    assert generate([1], Long(), temperature=0) == [0] * 299 + [STOP]


@KINDS
def test_samples_are_independent_and_the_same_for_every_batch_size(kind):
    samples, *others = (
        generate_many([0], kind(), 12, seed=3, max_tokens=20, batch_size=size)
        for size in (1, 3, 12, 64)
    )
    assert others == [samples] * 3
    assert generate_many([0], kind(), 2, seed=3, max_tokens=20) == samples[:2]
    assert len(set(map(tuple, samples))) > 6
    for tokens in samples:
        assert STOP not in tokens[:-1]
        assert tokens[-1] == STOP or len(tokens) == 20


def test_one_sample_is_the_first_of_many():
    for fields in ({}, {"seed": 5}, {"temperature": 3.0, "top_k": 4}, {"stop_token": 2}):
        one = generate([0], LLM(), max_tokens=20, **fields)
        assert generate_many([0], LLM(), 3, max_tokens=20, **fields)[0] == one
        assert generate([0], LLM(), max_tokens=20, **fields) == one


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": 1}, [1, 2, 3, 4, STOP]),
        ({"temperature": 0, "stop_sequence": [2, 3]}, [1, 2, 3]),
        ({"temperature": 0, "allowed_token_ids": [0, STOP]}, [0, 0, 0, 0, STOP]),
        ({"temperature": 0, "logit_bias": {"0": 9.0}, "max_tokens": 3}, [0, 0, 0]),
        ({"temperature": 0, "logit_bias": {0: 9.0}, "max_tokens": 3}, [0, 0, 0]),
        ({"temperature": 0, "ignore_eos": True, "max_tokens": 7}, [1, 2, 3, 4, STOP, 0, 1]),
        ({"temperature": 0, "cfg_scale": -1.0 + 1, "negative_prompt": [0, 1, 2]}, [3, 4, STOP]),
    ],
    ids=str,
)
def test_how_a_token_is_chosen_may_be_said_as_in_a_request(fields, expected):
    assert generate([0], LLM(), **fields) == expected


def call_generate(llm):
    return generate([0, 1], llm, temperature=0, max_tokens=5, call_settings=QUICK)


def call_generate_many(llm):
    return generate_many([0, 1], llm, 3, max_tokens=5, call_settings=QUICK)


@pytest.mark.parametrize("call", [call_generate, call_generate_many])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: [0.0] * 5, r"Failing returned 5 logits, not 6 \(attempt 2\)"),
        (lambda: [float("nan")] * 6, "step 1: "),
        (lambda: 1 / 0, r"Failing raised ZeroDivisionError: division by zero \(attempt 2\)"),
    ],
)
def test_an_llm_that_fails_is_an_error_with_its_cause(call, answer, message):
    class Failing(LLM):
        def next_token_logits(self, prev_token_ids):
            if len(prev_token_ids) > 2:
                return answer()
            return super().next_token_logits(prev_token_ids)

    with pytest.raises(ModelError, match=message):
        call(Failing())


@pytest.mark.parametrize(
    "call",
    [
        lambda: generate([99], LLM()),
        lambda: generate("abc", LLM()),
        lambda: generate([0], LLM(), temperature=-1.0),
        lambda: generate([0], LLM(), top_k="2"),
        lambda: generate([0], LLM(), mirostat=1, top_p=0.5),
        lambda: generate(None, LLM()),
        lambda: generate_many([0], LLM(), 0),
        lambda: generate_many([0], LLM(), 2, temperature=-1.0),
        lambda: generate_many([0], LLM(), 2, temperature=0.0),
    ],
)
def test_arguments_that_are_not_valid(call):
    with pytest.raises(RequestError):
        call()


@pytest.mark.parametrize(
    ("name", "hint"), [("tempreature", "did you mean `temperature`"), ("n", "known: temp")]
)
def test_a_name_that_is_none_is_an_error(name, hint):
    with pytest.raises(BatchdecodeError, match=f"'{name}' is not a sampling field.*{hint}"):
        generate([0], LLM(), **{name: 1})


def test_what_is_no_llm_is_a_clear_error():
    with pytest.raises(BatchdecodeError, match="it lacks next_token_logits and get_stop_token_id"):
        generate([0], object())
    with pytest.raises(BatchdecodeError, match="pass an instance"):
        generate([1], LLM)
    small = LLM()
    small.vocab_size = 5
    with pytest.raises(BatchdecodeError, match="eos_token_id 5 is not below vocab_size 5"):
        generate([0], small)
    for batch_size in (-1, 0, 1.5, "2"):
        with pytest.raises(BatchdecodeError, match="batch size"):
            generate_many([0], LLM(), 2, batch_size=batch_size)


@pytest.mark.parametrize(
    "settings",
    [CallSettings(max_concurrency=0), CallSettings(timeout="x"), {"timeout": -2}, 7, object],
    ids=str,
)
def test_settings_out_of_their_range_are_refused_before_any_call(settings):
    for function, more in ((generate, ()), (generate_many, (2,))):
        with pytest.raises(BatchdecodeError, match="call settings"):
            function([1], LLM(), *more, call_settings=settings)
