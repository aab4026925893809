"""The dashboard by Grafana's own schema: `pip install grafana-foundation-sdk`."""

import json

import pytest
from runs import ROOT

pytest.importorskip("grafana_foundation_sdk")

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


def lost(written, read, path=""):
    """Yield what was written and is not read so."""
    if isinstance(written, dict) and isinstance(read, dict):
        for name, value in written.items():
            yield from lost(value, read.get(name), f"{path}.{name}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for number, (value, other) in enumerate(zip(written, read, strict=True)):
            yield from lost(value, other, f"{path}[{number}]")
    elif written != read:
        yield path, written, read


def test_grafana_knows_every_field():
    register_default_plugins()
    written = json.loads((ROOT / "samples/grafana/batchdecode.json").read_text())
    read = json.loads(json.dumps(Dashboard.from_json(written), cls=JSONEncoder))
    assert list(lost(written, read)) == []
