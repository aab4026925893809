"""Settings of a run, from --config and options; what they are refused for is said."""

import re

import msgspec
import pytest

from batcher.errors import BatchdecodeError
from batcher.training.data import TrainingSettings
from cli.commands import train
from cli.commands.train import TrainOptions


def options(**given):
    return TrainOptions(**({"corpus": "corpus.txt", "output": "out"} | given))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: many", '1:1: steps must be an integer from 1 to 2,147,483,648, not "many"'),
        ("seq_lenght: 3", "1:1: unknown setting seq_lenght; did you mean seq_length?"),
        ("seed: 1\nprecision: fp8", '2:1: precision must be fp32, bf16 or fp16, not "fp8"'),
        ("holdout: 0.9", "1:1: holdout must be a number above 0 and up to 0.5, not 0.9"),
        ("hidden_size: 100\nnum_heads: 3", "hidden_size 100 does not divide into 3 heads"),
        ("hidden_size: 12\nnum_heads: 4", "hidden_size 12 does not divide into 4 heads of an even"),
        ("steps: 10\nwarmup_steps: 10", "warmup_steps 10 leaves nothing of 10 steps"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, message):
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    with pytest.raises(BatchdecodeError, match=re.escape(message)):
        train.train(options(config=str(path)))


def test_options_go_before_the_file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text("steps: 100\nseed: 3\nnum_layers: 2\n")
    found = train.settings_of(options(config=str(path), steps=200, precision="bf16"))
    assert found == TrainingSettings(steps=200, seed=3, num_layers=2, precision="bf16")


def test_an_option_that_is_too_large_is_refused():
    with pytest.raises(BatchdecodeError, match="--accumulate must be an integer from 1 to 4,096, "):
        train.settings_of(options(accumulate=10**6))


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(train, "find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(BatchdecodeError, match=r"pip install 'batchdecode\[train\]'"):
        train.train(options())


def test_every_setting_has_a_default():
    assert TrainingSettings() == msgspec.convert({}, TrainingSettings)
