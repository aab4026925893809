"""What `hf:` names, and what is said where a model of transformers cannot be had; without torch."""

from importlib import util

import pytest

from batcher import BatchdecodeError, load_model
from batcher.hf.settings import HF_SETTINGS, LOADING_SETTINGS, is_hf
from batcher.speculation.settings import ModelDraft, parse_draft
from batcher.transformer.config import TRANSFORMER_SETTINGS, is_checkpoint


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
    with pytest.raises(BatchdecodeError, match="no such folder, and it is no name of the Hub"):
        load_model(f"hf:{source}")


@pytest.mark.parametrize("name", ["gpt2", "distilgpt2", "gpt2-xl", "Qwen/Qwen3-0.6B", "a_b/c.d"])
def test_a_name_of_the_hub_without_its_prefix_is_told_with_it(name):
    with pytest.raises(
        BatchdecodeError, match=rf"unknown model '{name}' \(did you mean hf:{name}\?"
    ):
        load_model(name)


@pytest.mark.parametrize("name", ["gpt", "./missing/model", "/missing/model", "a/b/c", "x"])
def test_what_is_no_name_of_the_hub_is_not_told_as_one(name):
    with pytest.raises(BatchdecodeError, match=r"^unknown model '[^']*', known"):
        load_model(name)


def test_a_name_is_not_that_of_a_checkpoint():
    assert is_hf("hf:gpt2")
    assert not is_checkpoint("hf:gpt2")
    assert not is_hf("models:gpt2")
    assert parse_draft("hf:gpt2") == ModelDraft("hf:gpt2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"weights": "int8"}, "weights"),
        ({"max_context": 0}, "max_context"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(BatchdecodeError, match=f"^hf: .*{message}.*settings: device, dtype"):
        load_model("hf:gpt2", **settings)


def test_a_setting_of_both_kinds_is_one_option():
    shared = HF_SETTINGS.keys() & TRANSFORMER_SETTINGS.keys()
    assert shared == {"max_context", "session_overflow"}
    assert all(LOADING_SETTINGS[name] == TRANSFORMER_SETTINGS[name] for name in shared)
    assert all(HF_SETTINGS[name].default == LOADING_SETTINGS[name].default for name in shared)
