"""Samplers give what Hugging Face's processors gave; tests/parity makes the file and says how."""

import json
from pathlib import Path

import numpy as np
import pytest
from sampling_rows import drawn_from

from batcher.decoding.filters import SamplingParams

GOLDEN = Path(__file__).parents[2] / "golden" / "samplers.json"
CASES = json.loads(GOLDEN.read_text())["cases"]


def as_tuples(value):
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["settings"]))
def test_a_golden_vector(case):
    fields = {name: as_tuples(value) for name, value in case["settings"].items()}
    params = SamplingParams(**{"temperature": 1.0, **fields})
    logits = np.array(case["logits"], np.float32)
    own = logits if params.cfg_scale != 1 else logits[0]
    row = {"prompt": [3, 1, 3], "generated": [2, 4, 2, 4], "stop_token_ids": (0,)}
    expected = np.array([-np.inf if value is None else value for value in case["expected"]])
    np.testing.assert_allclose(drawn_from(own, params, **row), expected, atol=1e-5)
