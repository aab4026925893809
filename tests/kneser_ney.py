"""The n-gram model that a trained one has to beat: modified Kneser-Ney smoothing, interpolated.

Chen and Goodman, 1999, "An empirical study of smoothing techniques for language modeling", section
3.  `python tests/kneser_ney.py CORPUS CONFIG FOLDER` prints its loss on what a run of
`batchdecode train` with this config, which wrote the folder, has held out: of the same tokens.
"""

import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import yaml

from batcher.training.data import NO_TARGET, Material, Packing, TrainingSettings, read_material

ORDER = 5


class KneserNey:
    """What follows the last `order` - 1 tokens; a text begins with as many that are in none."""

    def __init__(self, texts, vocab_size, order=ORDER):
        self._vocab_size, self._order = vocab_size, order
        self._base = vocab_size + 1
        codes = self._codes(texts)
        counted = [np.unique(codes, return_counts=True)]
        for _ in range(order - 1):  # lower orders count what comes before, not how often
            shorter = counted[-1][0] % self._base ** (order - len(counted))
            counted.append(np.unique(shorter, return_counts=True))
        self._levels = [_Level(*level, self._base) for level in reversed(counted)]

    def log_probabilities(self, texts):
        """Return the natural logarithm of the probability of each token of all texts, [tokens]."""
        codes = self._codes(texts)
        probabilities = np.full(len(codes), 1 / self._vocab_size)
        for length, level in enumerate(self._levels, 1):
            probabilities = level.interpolated(codes % self._base**length, probabilities)
        return np.log(probabilities)

    def _codes(self, texts):
        """Return each token with those before it, as the digits of a number."""
        before = [self._vocab_size] * (self._order - 1)
        found = []
        for text in texts:
            tokens = np.array([*before, *text], np.int64)
            code = np.zeros(len(text), np.int64)
            for start in range(self._order):
                code = code * self._base + tokens[start : start + len(text)]
            found.append(code)
        return np.concatenate(found)


class _Level:
    """N-grams of one length, and how often each is counted."""

    def __init__(self, codes, counts, base):
        self._codes, self._counts, self._base = codes, counts, base
        self._discounts = _discounts(counts)[np.minimum(counts, 3)]
        self._contexts, numbers = np.unique(codes // base, return_inverse=True)
        self._totals = np.bincount(numbers, counts)
        self._left = np.bincount(numbers, self._discounts) / self._totals

    def interpolated(self, codes, shorter):
        """Return the probabilities of n-grams' last tokens, those of one token less given."""
        place, is_counted = _found(self._codes, codes)
        context, is_known = _found(self._contexts, codes // self._base)
        kept = np.where(is_counted, (self._counts - self._discounts)[place], 0)
        known = kept / self._totals[context] + self._left[context] * shorter
        return np.where(is_known, known, shorter)


def _discounts(counts):
    """Return what is taken off a count of 0, 1, 2, and 3 or more (their equation 26)."""
    ones, *others = (np.count_nonzero(counts == count) for count in (1, 2, 3, 4))
    too_few_to_tell = np.array([0, 0.5, 0.5, 0.5])
    if not (ones and all(others)):
        return too_few_to_tell
    share = ones / (ones + 2 * others[0])
    ratios = [more / less for less, more in pairwise([ones, *others])]
    taken = [n - (n + 1) * share * ratio for n, ratio in enumerate(ratios, 1)]
    if min(taken) <= 0:  # nothing would be left for tokens that were not seen
        return too_few_to_tell
    return np.array([0, *taken])


def _found(ordered, wanted):
    """Return where each wanted value is, and whether it is there."""
    places = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return places, ordered[places] == wanted


def held_out_loss(material: Material, seq_length: int) -> float:
    """Return the loss on the tokens by which a run of training judges its model."""
    said = KneserNey(material.training, material.vocab_size).log_probabilities(material.held_out)
    targets = Packing(material.held_out, seq_length).in_order().targets.ravel()
    return -float(said[1 : 1 + len(targets)][targets != NO_TARGET].mean())


if __name__ == "__main__":
    corpus, config, folder = map(Path, sys.argv[1:])
    settings = msgspec.convert(yaml.safe_load(config.read_text()), TrainingSettings)
    found = held_out_loss(read_material(corpus, settings, folder), settings.seq_length)
    print(f"{ORDER}-gram, Kneser-Ney: {found:.3f} nats a token")
