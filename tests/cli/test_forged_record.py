"""A .run.json that no run has written is refused in a line, whatever it holds."""

import json

import pytest
from process import batchdecode, lines_of

REQUESTS = lines_of({"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 2})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a run that has finished, and its record."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "in").write_bytes(REQUESTS)
    assert batchdecode("run", "in", "-o", "out", "-q", cwd=folder).returncode == 0
    return folder, json.loads((folder / "out.run.json").read_bytes())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"scheduling": {"kv_blocks": "many"}}, "scheduling.kv_blocks"),
        ({"scheduling": {"batching": "x"}}, "scheduling.batching"),
        ({"step_time": 5}, "step_time"),
        ({"settings": None}, "settings"),
        ({"finished": "yes"}, "finished"),
    ],
)
def test_a_record_of_other_types_is_no_record(finished, changes, field):
    folder, record = finished
    (folder / "out.run.json").write_text(json.dumps(record | {"finished": False} | changes))
    done = batchdecode("run", "in", "-o", "out", "-q", "--resume", cwd=folder)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot read out.run.json, the record of a run: ")
    assert f"its `{field}` is not what this version of batchdecode writes" in done.stderr
    assert "Expected" not in done.stderr
    assert done.stderr.endswith("--force starts over.\n")


def test_settings_that_json_writes_differently_are_the_same(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def model(prefixes):\n    return [1 for _ in prefixes]\n"
        "model.settings = {1: (2, 3), 'a': 1}\n"
    )
    (tmp_path / "in").write_bytes(REQUESTS)
    command = ["run", "in", "-o", "out", "-q", "--model", "mine:model"]
    assert batchdecode(*command, cwd=tmp_path).returncode == 0
    record = json.loads((tmp_path / "out.run.json").read_bytes()) | {"finished": False}
    (tmp_path / "out.run.json").write_text(json.dumps(record))
    done = batchdecode(*command, "--resume", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
