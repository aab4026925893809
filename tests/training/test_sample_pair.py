"""The pair in samples/shakespeare: a target that writes English, and a draft that foresees it."""

from collections import Counter

import pytest
from consoles import ROOT

from batcher import decode, load_model

PAIR = ROOT / "samples" / "shakespeare"
COMMON = {
    "the",
    "and",
    "to",
    "of",
    "my",
    "is",
    "not",
    "that",
    "me",
    "in",
    "it",
    "be",
    "you",
    "will",
}


@pytest.fixture(scope="module")
def written():
    """What the target writes after a name, as a result, with the ids of the name."""
    target = load_model(str(PAIR / "target"))
    prompt = target.tokenizer.encode("FIRST LORD.\n")
    return prompt, decode([{"prompt": prompt, "max_tokens": 80}], model=target)[0]


def test_the_target_writes_english(written):
    words = Counter(written[1].text.lower().split())
    assert sum(words[word] for word in COMMON) > words.total() / 5


def test_the_draft_has_the_target_s_tokens_and_foresees_half_of_them(written):
    prompt, result = written
    tokenizers = [(PAIR / name / "tokenizer.json").read_bytes() for name in ("target", "draft")]
    assert tokenizers[0] == tokenizers[1]
    rows = [
        {"prompt": [*prompt, *result.tokens[:length]], "max_tokens": 1}
        for length in range(len(result.tokens))
    ]
    drafted = decode(rows, model=load_model(str(PAIR / "draft")), batch_size=16)
    agreed = sum(token == row.tokens[0] for token, row in zip(result.tokens, drafted, strict=True))
    assert agreed > len(rows) / 2


def test_they_take_a_few_megabytes():
    sizes = [path.stat().st_size for path in PAIR.rglob("*") if path.is_file()]
    assert sum(sizes) < 4_000_000
