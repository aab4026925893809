"""A model that describes itself wrongly is refused in one line, before anything is decoded."""

from typing import Any

import numpy as np
import pytest

from batcher import BatchdecodeError, Request, RequestError, decode, generate
from batcher.models.callable import CallableModel
from batcher.models.loading import as_model


def model_with(**attributes: Any) -> Any:
    def model(prefixes: list[list[int]]) -> list[int]:
        return [5 for _ in prefixes]

    vars(model).update(attributes)
    return model


def endless() -> dict[str, Any]:
    settings: dict[str, Any] = {}
    settings["more"] = settings
    return settings


@pytest.mark.parametrize(
    ("attributes", "fault"),
    [
        ({"vocab_size": 0}, "vocab_size is neither"),
        ({"vocab_size": 3.0}, "vocab_size is neither"),
        ({"vocab_size": np.int64(10)}, "vocab_size is neither"),
        ({"eos_token_id": -1}, "eos_token_id is neither"),
        ({"eos_token_id": "0"}, "eos_token_id is neither"),
        ({"vocab_size": 10, "eos_token_id": 10}, "eos_token_id 10 is not below vocab_size 10"),
        ({"tokenizer": object()}, "tokenizer lacks encode or token_bytes"),
        ({"settings": {"a": object()}}, "settings do not fit into JSON"),
        ({"settings": endless()}, "settings do not fit into JSON"),
        ({"gives": "text"}, "gives is not one of tokens, logits$"),
        ({"gives": "both", "vocab_size": 3}, "gives is not one of tokens, logits$"),
        ({"gives": "logits"}, "vocab_size is None, and it gives logits"),
        ({"gives": "logits", "vocab_size": 2**24 + 1}, "vocab_size 16777217 is above 16777216"),
        ({"gives": "logits", "vocab_size": 2**400}, "vocab_size a huge integer is above 16777216"),
        ({"vocab_size": 2**31 + 1}, "vocab_size a huge integer is above 2147483648"),
    ],
)
def test_what_a_model_says_of_itself_is_checked(attributes: dict, fault: str) -> None:
    with pytest.raises(BatchdecodeError, match=fault):
        as_model(model_with(**attributes))


def test_the_largest_vocabularies() -> None:
    assert as_model(model_with(vocab_size=2**24, gives="logits")).vocab_size == 2**24
    assert as_model(model_with(vocab_size=2**31)).vocab_size == 2**31


def test_an_adapter_that_was_made_by_hand_is_checked_as_well() -> None:
    with pytest.raises(BatchdecodeError, match="vocab_size is neither"):
        decode([Request(prompt="")], model=CallableModel(model_with(vocab_size=0)))


class NoStop:
    def next_token_logits(self, _: list[int]) -> list[float]:
        return [1.0]


class NoLogits:
    def get_stop_token_id(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("model", "missing"), [(NoStop, "get_stop_token_id"), (NoLogits, "next_token_logits")]
)
def test_an_llm_that_lacks_a_method_is_told_which(model: type, missing: str) -> None:
    message = f"is neither a Model nor an LLM, which would need {missing}, nor callable"
    with pytest.raises(BatchdecodeError, match=message):
        as_model(model)
    with pytest.raises(BatchdecodeError, match=f"is no LLM: it lacks {missing}$"):
        generate([0], model())


def test_a_model_without_a_name_is_none() -> None:
    class Nameless:
        def allocate(self, num_slots: int) -> None: ...
        def forward(self, batch: object) -> None: ...

    with pytest.raises(BatchdecodeError, match=r"is no Model: .*name"):
        as_model(Nameless())


@pytest.mark.parametrize("encode", [lambda _: None, lambda _: 1 / 0])
def test_a_tokenizer_that_fails_fails_the_request(encode: Any) -> None:
    class Broken:
        token_bytes = (b"a",)

    Broken.encode = staticmethod(encode)
    with pytest.raises(RequestError, match="the tokenizer fails on the prompt"):
        decode([Request(prompt="x")], model=model_with(tokenizer=Broken()))


@pytest.mark.parametrize("text", ["\udcff", "fine"])
def test_an_exception_says_what_it_can(text: str) -> None:
    class Odd(Exception):  # noqa: N818 - as odd as they come
        def __str__(self) -> str:
            return text if text != "fine" else 1 / 0

    def model(_: list[list[int]]) -> list[int]:
        raise Odd

    [result] = decode([Request(prompt="")], model=model)
    assert "Odd" in result.error.message
    result.error.message.encode()
