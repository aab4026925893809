"""docs/training.md says what each setting is by default."""

import re
from pathlib import Path

import yaml
from msgspec.structs import fields

from batcher.training.data import TrainingSettings

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_every_setting_is_documented_with_its_default():
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    documented = {
        name: yaml.safe_load(value)
        for names, values in rows
        for name, value in zip(
            re.findall(r"`(\w+)`", names), values.replace("`", "").split(", "), strict=True
        )
    }
    assert documented == {field.name: field.default for field in fields(TrainingSettings)}
