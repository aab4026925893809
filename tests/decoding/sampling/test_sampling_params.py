"""Settings: what a request's fields become, and who can do without logits."""

import pytest

from batcher import Request
from batcher.decoding.filters import SamplingParams, sampling_params
from batcher.requests.validation import logit_fields_of

GREEDY = SamplingParams()

CASES = [
    ({}, GREEDY),
    ({"top_k": 5, "top_p": 0.3, "seed": 9, "mirostat": 2}, GREEDY),  # of no effect when greedy
    ({"n": 1, "echo": True, "max_tokens": 3}, GREEDY),
    (
        {"temperature": 0.5, "top_k": 5, "top_p": 0.3, "min_p": 0.1, "typical_p": 0.9},
        SamplingParams(temperature=0.5, top_k=5, top_p=0.3, min_p=0.1, typical_p=0.9),
    ),
    (
        {"temperature": 1, "mirostat": 1, "mirostat_tau": 4.0},
        SamplingParams(temperature=1, mirostat=1, mirostat_tau=4.0, mirostat_eta=0.1),
    ),
    (
        {"repetition_penalty": 1.2, "frequency_penalty": 1.0, "presence_penalty": -1.0},
        SamplingParams(repetition_penalty=1.2, frequency_penalty=1.0, presence_penalty=-1.0),
    ),
    ({"logit_bias": {"10": 2.0, "9": -1.0}}, SamplingParams(logit_bias=((9, -1.0), (10, 2.0)))),
    ({"allowed_token_ids": [5, 3, 5]}, SamplingParams(allowed_token_ids=(3, 5))),
    ({"bad_words": ["x"], "min_tokens": 3}, SamplingParams(bad_words=("x",), min_tokens=3)),
    ({"cfg_scale": 2.0, "negative_prompt": "no"}, SamplingParams(cfg_scale=2.0)),
    ({"logprobs": 0}, SamplingParams(num_logprobs=0, needs_cumulative=True)),
    (
        {"logprobs": 3, "logprobs_mode": "processed"},
        SamplingParams(num_logprobs=3, has_processed_logprobs=True, needs_cumulative=True),
    ),
    (
        {"temperature": 1, "best_of": 4, "logprobs_mode": "processed"},
        SamplingParams(temperature=1, needs_cumulative=True),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), CASES, ids=str)
def test_what_a_request_becomes(fields: dict, expected: SamplingParams) -> None:
    request = Request(prompt="", **fields)
    assert sampling_params(request) == expected
    assert bool(logit_fields_of(request)) == (expected != GREEDY)
