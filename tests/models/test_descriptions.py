"""A model that describes itself, or is named, wrongly is refused in one line."""

import itertools
import logging
from importlib import util

import numpy as np
import pytest

from batcher import (
    BatchdecodeError,
    ByteTokenizer,
    Request,
    RequestError,
    decode,
    generate,
    load_model,
)
from batcher.foreign import RaisedError
from batcher.models.loading import as_model
from batcher.speculation.settings import parse_draft
from batcher.transformer.config import (
    HF_SETTINGS,
    LOADING_SETTINGS,
    TRANSFORMER_SETTINGS,
    is_checkpoint,
    is_hf,
)


def model_with(**attributes):
    def model(prefixes):
        return [5 for _ in prefixes]

    vars(model).update(attributes)
    return model


def with_table(table):
    class Tokenizer(ByteTokenizer):
        token_bytes = property(lambda _: table, lambda *_: None)

    return Tokenizer()


TABLES = [  # of bytes by token id, and what is wrong with them
    (None, " is a NoneType, not a list of bytes"),
    ({0: b"a"}, " is a dict, not a list of bytes"),
    ([b"a", "b"], r"\[1\] is a str, not bytes"),
    ([b"a", None], r"\[1\] is a NoneType, not bytes"),
    (np.array([b"a"]), r"\[0\] is a bytes_, not bytes"),  # of which numpy cuts the zeros off
    (itertools.repeat(b"a"), " has more than 16,777,216 entries"),
]


class Refusing:
    """Its attributes fail, each with an error of its own."""

    token_bytes = (b"a",)

    @property
    def settings(self):
        return self.missing  # an AttributeError about another attribute

    @property
    def vocab_size(self):
        raise AttributeError("mine")

    @property
    def eos_token_id(self):
        return 1 // 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("settings", "'Model' object has no attribute 'missing'"),
        ("vocab_size", "AttributeError: mine"),
        ("eos_token_id", "ZeroDivisionError"),
    ],
)
def test_an_attribute_that_fails_is_not_one_that_is_not_there(name, message):
    class Model:
        def __call__(self, prefixes):
            return [0 for _ in prefixes]

    setattr(Model, name, vars(Refusing)[name])
    with pytest.raises(RaisedError, match=message) as caught:
        as_model(Model())
    assert "test_descriptions.py, line " in str(caught.value)
    assert caught.value.raised.traceback.startswith("Traceback (most recent call last):\n")


def endless():
    settings = {}
    settings["more"] = settings
    return settings


@pytest.mark.parametrize(
    ("attributes", "fault"),
    [
        ({"vocab_size": 0}, "vocab_size is neither"),
        ({"vocab_size": np.int64(10)}, "vocab_size is neither"),
        ({"eos_token_id": -1}, "eos_token_id is neither"),
        ({"vocab_size": 10, "eos_token_id": 10}, "eos_token_id 10 is not below vocab_size 10"),
        ({"eos_token_id": False}, "eos_token_id is neither"),
        ({"settings": [1]}, "settings are not a dict"),
        ({"tokenizer": object()}, "tokenizer lacks encode or token_bytes"),
        *(({"tokenizer": with_table(table)}, f"token_bytes{fault}") for table, fault in TABLES),
        ({"settings": {"a": object()}}, "settings do not fit into JSON"),
        ({"settings": endless()}, "settings do not fit into JSON"),
        ({"gives": "text"}, "gives is not one of tokens, logits$"),
        ({"gives": "logits"}, "vocab_size is None, and it gives logits"),
        ({"gives": "logits", "vocab_size": 2**24 + 1}, "vocab_size 16777217 is above 16777216"),
        ({"gives": "logits", "vocab_size": 2**400}, "vocab_size a huge integer is above 16777216"),
        ({"vocab_size": 2**31 + 1}, "vocab_size a huge integer is above 2147483648"),
    ],
)
def test_what_a_model_says_of_itself_is_checked(attributes, fault):
    with pytest.raises(BatchdecodeError, match=fault):
        as_model(model_with(**attributes))


class NoStop:
    def next_token_logits(self, _):
        return [1.0]


class NoLogits:
    def get_stop_token_id(self):
        return 0


@pytest.mark.parametrize(
    ("model", "missing"), [(NoStop, "get_stop_token_id"), (NoLogits, "next_token_logits")]
)
def test_an_llm_that_lacks_a_method_is_told_which(model, missing):
    message = f"is neither a Model nor an LLM, which would need {missing}, nor callable"
    with pytest.raises(BatchdecodeError, match=message):
        as_model(model)
    with pytest.raises(BatchdecodeError, match=f"is not an LLM: it lacks {missing}$"):
        generate([0], model())


def test_a_model_has_a_name_that_a_file_can_hold_and_pages_if_it_says_so():
    class Nameless:
        def allocate(self, num_slots): ...
        def forward(self, batch): ...

    with pytest.raises(BatchdecodeError, match=r"is not a Model: .*name"):
        as_model(Nameless())
    with pytest.raises(BatchdecodeError, match=r"model \?: its name is not text"):
        as_model(model_with(), "\ud800")

    class Paged:
        name, settings, tokenizer = "paged", {}, ByteTokenizer()
        vocab_size, eos_token_id, is_paged = 256, None, True

        def allocate(self, num_slots): ...
        def forward(self, batch): ...
        def release(self, slot): ...

    with pytest.raises(BatchdecodeError, match="says that it is_paged, and lacks allocate_pages"):
        as_model(Paged())


def array_of(*values):
    return lambda _: np.array(values)


class Panic(BaseException):
    """As tokenizers that are written in Rust raise them."""


def panics(_):
    raise Panic("called on a None")


@pytest.mark.parametrize(
    ("encode", "why"),
    [
        (lambda _: 1 / 0, "the tokenizer raised ZeroDivisionError: division by zero"),
        (panics, "the tokenizer raised Panic: called on a None"),
        (lambda: [1], "the tokenizer raised TypeError"),
        (lambda _: None, "the tokenizer returned None, not a list of token ids"),
        (lambda text: text, "the tokenizer returned 'x', not a list of token ids"),
        (lambda text: [text], r"the tokenizer returned \['x'\], not a list of token ids"),
        (lambda _: {"input_ids": [1]}, "not a list of token ids"),
        (lambda _: [1.0], r"returned \[1.0\], not a list of token ids"),
        (lambda _: [True], r"returned \[True\], not a list of token ids"),
        (array_of(1.5), "not a list of token ids"),
        (lambda _: [-1], "the tokenizer returned token -1, and the model knows 0 to 2147483647"),
        (lambda _: [2**400], "the tokenizer returned token a huge integer, and the model knows"),
    ],
)
def test_a_tokenizer_that_fails_fails_the_request(encode, why):
    class Broken:
        token_bytes = (b"a",)

    Broken.encode = staticmethod(encode)
    with pytest.raises(RequestError, match=rf"`prompt` cannot be encoded: .*{why}"):
        decode([Request(prompt="x")], model=model_with(tokenizer=Broken()))


@pytest.mark.parametrize(
    "answer", [[3, 1], (3, 1), array_of(3, 1)(""), iter([3, 1]), [np.int64(3), 1]]
)
def test_any_list_of_integers_is_what_a_text_is_encoded_as(answer):
    class Tokenizer(ByteTokenizer):
        def encode(self, _):
            return answer

    def model(prefixes):
        assert all(type(token) is int for prefix in prefixes for token in prefix)
        return [sum(prefix) for prefix in prefixes]

    model.tokenizer = Tokenizer()
    [result] = decode([Request(prompt="x", max_tokens=1)], model=model)
    assert result.tokens == [4]


@pytest.mark.parametrize("text", ["\udcff", "fine"])
def test_an_exception_says_what_it_can(text, monkeypatch):
    monkeypatch.setattr(logging.getLogger("batcher"), "disabled", True)  # it is no text for a log

    class Odd(Exception):  # noqa: N818 - as odd as they come
        def __str__(self):
            return text if text != "fine" else 1 / 0

    def model(_):
        raise Odd

    [result] = decode([Request(prompt="")], model=model)
    assert "Odd" in result.error.message
    result.error.message.encode()


@pytest.fixture
def _without_torch(monkeypatch):
    there = util.find_spec
    monkeypatch.setattr(
        "batcher.models.checkpoints.find_spec",
        lambda name: None if name == "torch" else there(name),
    )


@pytest.mark.usefixtures("_without_torch")
@pytest.mark.parametrize("source", ["gpt2", "Qwen/Qwen3-0.6B", "."])
def test_without_the_extra_it_is_named(source):
    with pytest.raises(BatchdecodeError, match=r"pip install 'batchdecode\[hf\]'"):
        load_model(f"hf:{source}")


@pytest.mark.parametrize(
    "source", ["", "./missing", "/missing/folder", "a/b/c", "a b", "../missing", "f"]
)
def test_what_is_no_folder_has_to_be_a_name(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text("a file")
    with pytest.raises(BatchdecodeError, match="no such folder, and it is not a name on the Hub"):
        load_model(f"hf:{source}")


@pytest.mark.parametrize("name", ["gpt2", "distilgpt2", "gpt2-xl", "Qwen/Qwen3-0.6B", "a_b/c.d"])
def test_a_name_of_the_hub_needs_its_prefix(name):
    with pytest.raises(BatchdecodeError, match=rf"model '{name}' \(did you mean hf:{name}\?"):
        load_model(name)
    for other in ("gpt", "./missing/model", "/missing/model", "a/b/c", "x"):
        with pytest.raises(BatchdecodeError, match=r"^unknown model '[^']*'; use"):
            load_model(other)


def test_names_and_settings_of_both_kinds_are_told_apart():
    assert is_hf("hf:gpt2")
    assert not is_checkpoint("hf:gpt2")
    assert not is_hf("models:gpt2")
    assert parse_draft("hf:gpt2") == "hf:gpt2"
    shared = HF_SETTINGS.keys() & TRANSFORMER_SETTINGS.keys()
    assert shared == {"max_context", "session_overflow"}
    assert all(LOADING_SETTINGS[name] == TRANSFORMER_SETTINGS[name] for name in shared)
    assert all(HF_SETTINGS[name].default == LOADING_SETTINGS[name].default for name in shared)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"weights": "q8"}, "weights"),
        ({"max_context": 0}, "max_context"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(BatchdecodeError, match=f"^hf: .*{message}.*settings: device, dtype"):
        load_model("hf:gpt2", **settings)
