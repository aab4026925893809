"""Checkpoints from Python: by name, loaded once with settings, for chats, and for one prompt."""

from pathlib import Path

import pytest

from batcher import BatchdecodeError, Engine, Request, decode, generate, load_model
from batcher import generate_many as many

TINY = str(Path(__file__).parent.parent / "samples" / "tiny.gguf")
REQUEST = {"prompt": "The old king", "max_tokens": 6}


@pytest.fixture(scope="module")
def model():
    return load_model(TINY)


def test_a_name_and_a_model_that_was_loaded_decode_the_same(model):
    wanted = decode([REQUEST], model=model)
    assert decode([REQUEST], model=TINY) == decode([REQUEST], model=model) == wanted
    engine = Engine(TINY, 1)
    engine.add(Request(**REQUEST))
    results = [result for _ in range(6) for result in engine.step().results]
    assert [one.tokens for one in results] == [one.tokens for one in wanted]


def test_settings_are_those_of_the_options():
    loaded = load_model(TINY, weights="q8", max_context=8)
    assert (loaded.settings["weights"], loaded.settings["max_context"]) == ("q8", 8)
    [result] = decode([{"prompt": [9] * 5, "ignore_eos": True}], model=loaded)
    assert (len(result.tokens), result.limit) == (3, "max_context")
    assert load_model("simulated", seed=7).settings["seed"] == 7


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (TINY, {"weight": "q8"}, "unknown field `weight`"),
        (TINY, {"max_context": 129}, "above the 128 of"),
        ("smollm3", {}, "unknown model 'smollm3'"),
        ("nofile.gguf", {}, "no such file"),
        ("simulated", {"weights": "q8"}, "unknown field `weights`"),
    ],
)
def test_what_is_no_model_or_no_setting_is_refused(name, settings, message):
    with pytest.raises(BatchdecodeError, match=message):
        load_model(name, **settings)


def test_a_text_may_be_what_a_user_says_or_gone_on_with(model):
    messages = [{"role": "user", "content": REQUEST["prompt"]}]
    [said] = decode([REQUEST], model=model, chat=True)
    [written] = decode([{"messages": messages, "max_tokens": 6}], model=model)
    assert (said.tokens, said.usage) == (written.tokens, written.usage)
    with pytest.raises(BatchdecodeError, match="chat template"):
        decode([REQUEST], model=lambda prefixes: [1 for _ in prefixes], chat=True)
    [result] = decode([REQUEST], model=model)
    assert generate("The old king", TINY, temperature=0, max_tokens=6) == result.text
    tokens = model.tokenizer.encode("The old king")
    assert generate(tokens, model, temperature=0, max_tokens=6) == result.tokens
    texts = many("The old king", model, 3, max_tokens=4, seed=5)
    assert texts[0] == generate("The old king", model, max_tokens=4, seed=5)
    assert len({*texts}) > 1
