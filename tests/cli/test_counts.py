"""One run, one count: a request is a line of the file, an output one of its results, everywhere."""

import json
import re

import pytest
from process import ROOT, batchdecode, lines_of

SAMPLE = (ROOT / "samples" / "requests.jsonl").read_bytes()
PLAIN = {"prompt": "Once", "max_tokens": 5}
FILES = {
    "the sample, with a request for no token": (SAMPLE, "27 requests"),
    "samples, beams and no tokens": (
        lines_of(
            PLAIN | {"n": 3, "temperature": 1},
            PLAIN | {"max_tokens": 0},
            PLAIN | {"max_tokens": 0, "n": 2, "temperature": 1},
            PLAIN | {"num_beams": 4, "n": 2},
            PLAIN | {"best_of": 4, "n": 2, "temperature": 1},
            PLAIN | {"negative_prompt": "no", "cfg_scale": 2},
        ),
        "6 requests · 11 outputs",
    ),
    "a line that is no request": (lines_of(PLAIN, {"promt": 1}), "2 requests · 1 failed"),
    "a prompt that can never run": (
        lines_of(PLAIN, PLAIN | {"prompt": [1] * 5000}),
        "2 requests · 1 failed",
    ),
}


SAMPLES = "samples, beams and no tokens"


@pytest.mark.parametrize(("name", "workers"), [*((name, None) for name in FILES), (SAMPLES, "2")])
def test_every_view_counts_alike(tmp_path, name, workers):
    content, told = FILES[name]
    (tmp_path / "in").write_bytes(content)
    options = ["--keep-going", "--kv-blocks", "99", "--summary-json", "s", "--trace", "t"]
    options += [] if workers is None else ["--workers", workers, "-b", "8"]
    batchdecode("run", "in", "-o", "out", *options, cwd=tmp_path)
    summary = json.loads((tmp_path / "s").read_bytes())
    parts = told.split(" · ")
    num_requests = int(parts[0].split()[0])
    num_outputs = int(parts[1].split()[0]) if "outputs" in told else num_requests
    assert (summary["requests"], summary["outputs"]) == (num_requests, num_outputs)
    assert len((tmp_path / "out").read_bytes().splitlines()) == num_outputs
    shown = batchdecode("trace", "t", "--format", "gantt", cwd=tmp_path).stdout.decode()
    assert re.search(rf"busy · {re.escape(told)}(?! · \d+ outputs)\b", shown)
