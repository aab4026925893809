"""Helpers of the sampling tests: rows of a sampler, and what the next token is drawn from."""

import numpy as np
from msgspec import structs

from batcher.decoding.sampling import Sampler, SamplingRow

NEGATIVE = 1  # the slot of a negative prompt's row


class Letters:
    """A tokenizer whose token i is the character 256 + i, so that no text is cut in two ways."""

    def __init__(self, vocab_size):
        self.token_bytes = [chr(256 + token_id).encode() for token_id in range(vocab_size)]

    def encode(self, text):
        return [ord(character) - 256 for character in text]


def language_like(rng, num_rows, vocab_size):
    ranks = np.stack([rng.permutation(vocab_size) for _ in range(num_rows)]) + 1
    slopes = rng.uniform(0.9, 1.6, (num_rows, 1))
    return (3 - slopes * np.log(ranks) + rng.normal(0, 0.5, ranks.shape)).astype(np.float32)


def start(params, vocab_size, *, prompt=(), generated=(), stop_token_ids=(), is_beam=False):
    """A sampler whose slot 0 has a row with these tokens already."""
    sampler = Sampler(2, vocab_size, Letters(vocab_size))
    partner = None if params.cfg_scale == 1 else NEGATIVE
    row = SamplingRow(params, 7, list(prompt), stop_token_ids, partner, is_beam)
    sampler.open(0, row)
    for token in generated:
        sampler.extend({0: [token]})
    return sampler


def one_step(logits, params, **row):
    return start(params, len(logits), **row).sample(np.array([logits], np.float32))


def drawn_from(logits, params, masks=None, **row):
    """The log-probabilities [vocab] that slot 0's next token is drawn from, -inf if it cannot be.

    logits: [vocab], or [2, vocab] if a negative prompt's row stands below.
    """
    logits = np.atleast_2d(logits)
    vocab_size = logits.shape[1]
    params = structs.replace(params, num_logprobs=vocab_size, has_processed_logprobs=True)
    sampled = start(params, vocab_size, **row).sample(logits, masks)
    if sampled.failed:
        raise ValueError(sampled.failed[0].message)
    logprobs = np.full(vocab_size, -np.inf)
    for top in sampled.logprobs[0].top:
        logprobs[top.token] = top.logprob
    return logprobs
