"""Makes samples/tiny.gguf, which the docs use; `python tests/sample_checkpoint.py` renews it.

Its weights are random, but for those that let it say words: it is small, and knows nothing.
"""

from itertools import accumulate
from pathlib import Path

import numpy as np
from tiny_checkpoints import BYTES, SPECIAL, Vocabulary, config_json, random_tensors, write_gguf

PATH = Path(__file__).parent.parent / "samples" / "tiny.gguf"
SEED = 3
SPACE = "\u0120"  # as byte-level BPE writes one
WORDS = "the a my our that this one fox owl cat king river stone train garden letter lamp moon"
WORDS += " storm finds sees keeps takes loves hides sells wants old red small quiet golden empty"
WORDS += " green"
MARKS = [".", ",", "!"]


def vocabulary():
    """All bytes, and words with a space before them, with all they are merged from."""
    tokens, merges = [*SPECIAL, *BYTES], []
    for word in WORDS.split():
        for start, letter in zip(accumulate(f"{SPACE}{word}"), word, strict=False):
            if start + letter not in tokens:
                merges.append(f"{start} {letter}")
                tokens.append(start + letter)
    types = [3 if token in SPECIAL else 1 for token in tokens]
    return Vocabulary(tokens, types, merges)


def write(path):
    """Write the checkpoint; return its path."""
    words = vocabulary()
    fields = config_json(vocab_size=len(words.tokens))
    tensors = random_tensors(fields, SEED)
    said = {*MARKS, *(f"{SPACE}{word}" for word in WORDS.split())}
    tensors = {
        name: tensor + 1 if tensor.ndim == 1 else tensor * 3 if "layers" in name else tensor
        for name, tensor in tensors.items()
    }
    likely = np.array([token in said for token in words.tokens])
    tensors["lm_head.weight"][~likely] *= np.float32(0.2)
    tensors["lm_head.weight"][SPECIAL.index("<|im_end|>")] *= np.float32(4)
    return write_gguf(
        path, kind="Q8_0", tensors=tensors, vocabulary=words, vocab_size=len(words.tokens)
    )


if __name__ == "__main__":
    write(PATH)
