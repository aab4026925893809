"""Models of six letters that say what follows each: all there is to know of their outputs."""

import numpy as np

from batcher import ModelOutput

LETTERS = "abcdef"
WANTED = np.array([0.38, 0.01, 0.01, 0.34, 0.23, 0.03])  # after an a; others follow others alike
DRAFTED = np.array([0.30, 0.01, 0.40, 0.22, 0.01, 0.06])


def logits_of(probabilities):
    rows = [np.roll(np.log(probabilities), place) for place in range(len(LETTERS))]
    return np.array(rows, np.float32)


class Letters:
    def __init__(self):
        self.token_bytes = [letter.encode() for letter in LETTERS]

    def encode(self, text):
        return [LETTERS.index(letter) for letter in text]


class Target:
    """A paged model that verifies drafts; it needs no more than the last token of each row."""

    gives, vocab_size, eos_token_id = "logits", len(LETTERS), None
    is_paged = verifies_drafts = True
    logits = logits_of(WANTED)

    def __init__(self):
        self.name, self.tokenizer, self.settings = type(self).__name__, Letters(), {}

    def allocate(self, num_slots):
        self.tokens = np.zeros(num_slots, np.int64)

    def allocate_pages(self, num_slots, num_blocks, block_size):
        self.allocate(num_slots)

    def forward(self, batch):
        last, drafts = batch.tokens.copy(), []
        for chunk in batch.chunks:
            num_known = len(chunk.token_ids) - chunk.num_drafts
            last[chunk.slot] = chunk.token_ids[num_known - 1]
            drafts += chunk.token_ids[num_known:]
        return ModelOutput(
            self.tokens,
            logits=self.logits[last[batch.logit_slots]],
            draft_logits=self.logits[drafts] if drafts else None,
        )

    def fork(self, source, target):
        """Nothing is kept."""

    def release(self, slot):
        """Nothing is kept."""


class Good(Target):
    logits = logits_of(0.745 * WANTED + 0.255 * DRAFTED)


class Fair(Target):
    logits = logits_of(0.419 * WANTED + 0.581 * DRAFTED)


class Weak(Target):
    logits = logits_of(DRAFTED)


class Hot(Target):
    """What draws at four times the temperature."""

    logits = Target.logits / 4
