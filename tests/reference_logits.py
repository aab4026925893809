"""The logits of the simulated model, computed slowly from a prefix by the definition alone."""

import math
from collections import Counter

from batcher.models.simulated import (
    GRAMMAR_GAP,
    MASK,
    MULTIPLIER,
    NUM_RANKINGS,
    SHAPE_SHIFT,
    SHARPNESSES,
    TOP_LOGIT,
    ZIPF_EXPONENT,
    reference_next_token,
    uniform_bits,
)
from batcher.models.tokenizers import BEGIN_TOKEN_ID

NUM_CHOICES = 1024  # of a line


def reference_logits(model, prefix):
    """Return the logits [vocab] after `prefix`."""
    first = int(model.lines[prefix[-1] if prefix else BEGIN_TOKEN_ID])
    counts = Counter(model.choices[first : first + NUM_CHOICES].tolist())
    state = model.seed_hash
    for token_id in [BEGIN_TOKEN_ID, *prefix]:
        state = (state + token_id) * MULTIPLIER & MASK
    shape = state >> SHAPE_SHIFT
    ranking = shape // len(SHARPNESSES) % NUM_RANKINGS

    def comes_up(token):
        bits = uniform_bits(first // NUM_CHOICES, ranking, token)
        return token not in counts, -math.log((bits + 0.5) / 2**52) / max(1, counts[token])

    logits = dict.fromkeys(range(model.vocab_size), TOP_LOGIT)
    for rank, token in enumerate(sorted(logits, key=comes_up), 1):
        logits[token] -= ZIPF_EXPONENT * math.log(1 + rank)
        logits[token] -= 0 if token in counts else GRAMMAR_GAP
    logits[reference_next_token(model, prefix)] = TOP_LOGIT
    return [logit * SHARPNESSES[shape % len(SHARPNESSES)] for logit in logits.values()]
