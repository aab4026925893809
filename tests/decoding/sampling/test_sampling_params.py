"""Settings: what a request's fields become, and who can do without logits."""

import pytest

from batcher import Request
from batcher.decoding.filters import SamplingParams, sampling_params
from batcher.requests.validation import logit_fields_of

CASES = [
    ({}, {}),
    ({"top_k": 5, "top_p": 0.3, "seed": 9, "mirostat": 2}, {}),  # of no effect when greedy
    ({"n": 1, "echo": True, "max_tokens": 3}, {}),
    (
        {"temperature": 0.5, "top_k": 5, "top_p": 0.3, "min_p": 0.1, "typical_p": 0.9},
        {"temperature": 0.5, "top_k": 5, "top_p": 0.3, "min_p": 0.1, "typical_p": 0.9},
    ),
    (
        {"temperature": 1, "mirostat": 1, "mirostat_tau": 4.0},
        {"temperature": 1, "mirostat": 1, "mirostat_tau": 4.0, "mirostat_eta": 0.1},
    ),
    (
        {"repetition_penalty": 1.2, "frequency_penalty": 1.0, "presence_penalty": -1.0},
        {"repetition_penalty": 1.2, "frequency_penalty": 1.0, "presence_penalty": -1.0},
    ),
    ({"logit_bias": {"10": 2.0, "9": -1.0}}, {"logit_bias": ((9, -1.0), (10, 2.0))}),
    ({"allowed_token_ids": [5, 3, 5]}, {"allowed_token_ids": (3, 5)}),
    ({"bad_words": ["x"], "min_tokens": 3}, {"bad_words": ("x",), "min_tokens": 3}),
    ({"cfg_scale": 2.0, "negative_prompt": "no"}, {"cfg_scale": 2.0}),
    ({"logprobs": 0}, {"num_logprobs": 0, "needs_cumulative": True}),
    (
        {"logprobs": 3, "logprobs_mode": "processed"},
        {"num_logprobs": 3, "has_processed_logprobs": True, "needs_cumulative": True},
    ),
    (
        {"temperature": 1, "best_of": 4, "logprobs_mode": "processed"},
        {"temperature": 1, "needs_cumulative": True},
    ),
]


@pytest.mark.parametrize(("fields", "expected"), CASES, ids=str)
def test_what_a_request_becomes(fields, expected):
    request = Request(prompt="", **fields)
    assert sampling_params(request) == SamplingParams(**expected)
    assert bool(logit_fields_of(request)) == bool(expected)
