"""What the tests of constraints share: small vocabularies, and random walks over allowed tokens."""

import json
import random

from batcher.decoding.constraints import ConstraintCompiler, allowed_tokens
from batcher.decoding.grammars import ConstraintSource
from batcher.models.tokenizers import EOS_TOKEN_ID, WordTokenizer

WORDS = WordTokenizer()
NUM_WORDS = len(WORDS.token_bytes)


BYTES = [b"", *(bytes([byte]) for byte in range(256))]  # EOS, and one token for each byte


class Vocabulary:
    """A tokenizer that is nothing but its tokens."""

    def __init__(self, token_bytes):
        self.token_bytes = token_bytes

    def encode(self, text):
        raise NotImplementedError


def compiler(
    token_bytes=WORDS.token_bytes, vocab_size=None, eos_token_ids=(EOS_TOKEN_ID,), **settings
):
    """A compiler for these tokens, EOS first."""
    size = len(token_bytes) if vocab_size is None else vocab_size
    return ConstraintCompiler(Vocabulary(token_bytes), size, eos_token_ids, **settings)


def source(kind, constraint):
    """A constraint as a request would state it."""
    is_text = isinstance(constraint, str) and kind not in {"json_schema", "choice"}
    return ConstraintSource(kind, constraint if is_text else json.dumps(constraint))


def language(kind, constraint):
    """What tells whether an output is a whole, as the compiled constraint has it."""
    compiled = compiler(BYTES).compile(source(kind, constraint))
    return lambda output: compiled.accepts([byte + 1 for byte in output])


def ids_allowed(row, vocab_size=NUM_WORDS):
    """The tokens that a row allows, in order."""
    return allowed_tokens([row], vocab_size)[0].nonzero()[0].tolist()


def bytes_allowed(row, token_bytes=WORDS.token_bytes):
    """The bytes that a row allows next; b"" stands for EOS."""
    return {token_bytes[token_id] for token_id in ids_allowed(row, len(token_bytes))}


def may_end(row):
    """Whether the output so far is a whole; its EOS may be an id that no mask for a model holds."""
    return any(map(row.allows, row.eos_token_ids))


def forced_token(row):
    """The only token that is allowed next, if there is but one, and it is not EOS."""
    return next(iter(row.forced_tokens(1)), None)


def must_end(row):
    """Whether a row allows nothing but EOS, in the numbering of its own tokenizer."""
    ends = sum(1 << token_id for token_id in row.eos_token_ids)
    return int.from_bytes(row.packed_mask(), "little") == ends


def follow(row, text, token_bytes=WORDS.token_bytes):
    """Let a row follow `text`, byte by byte, and return it."""
    for byte in text.encode():
        row.advance(token_bytes.index(bytes([byte])))
    return row


def random_outputs(constraint, num_outputs, seed, *, weights=None, max_tokens=2000):
    """The bytes of outputs made of tokens drawn from those allowed, all rows masked in one call.

    weights: token id -> how much more often than others it is drawn.
    """
    rng = random.Random(seed)
    rows = [constraint.new_row() for _ in range(num_outputs)]
    texts = [b""] * num_outputs
    running = list(range(num_outputs))
    for _ in range(max_tokens):
        masks = allowed_tokens([rows[number] for number in running], NUM_WORDS)
        still_running = []
        for number, mask in zip(running, masks, strict=True):
            tokens = mask.nonzero()[0].tolist()
            [token] = rng.choices(tokens, [(weights or {}).get(token, 1) for token in tokens])
            if token != EOS_TOKEN_ID:
                rows[number].advance(token)
                texts[number] += WORDS.token_bytes[token]
                still_running.append(number)
        running = still_running
        if not running:
            return texts
    raise AssertionError(f"outputs that do not end: {[texts[number] for number in running]}")
