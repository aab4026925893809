"""What --draft takes, and what it says to the rest."""

from pathlib import Path

import pytest

from batcher.errors import BatchdecodeError
from batcher.speculation.spec import (
    Draft,
    LayersDraft,
    LookupDraft,
    ModelDraft,
    NgramDraft,
    SuffixDraft,
    parse_draft,
)


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ("ngram", NgramDraft(4)),
        ("ngram:2", NgramDraft(2)),
        ("ngram:16", NgramDraft(16)),
        ("lookup:texts.jsonl", LookupDraft("texts.jsonl")),
        ("lookup:c:/texts", LookupDraft("c:/texts")),
        ("suffix", SuffixDraft()),
        ("layers:8", LayersDraft(8)),
        ("simulated", ModelDraft("simulated")),
        ("smollm2", ModelDraft("smollm2")),
        ("small.gguf", ModelDraft("small.gguf")),
        ("my.models:Small", ModelDraft("my.models:Small")),
    ],
)
def test_a_text_names_a_draft(text: str, draft: Draft) -> None:
    assert parse_draft(text) == draft


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    assert parse_draft(str(tmp_path)) == ModelDraft(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "give ngram, ngram:N, lookup:FILE, suffix, layers:K or a MODEL"),
        ("ngrams", "did you mean ngram?"),
        ("n-gram:3", "did you mean ngram?"),
        ("sufix", "did you mean suffix?"),
        ("layer:3", "did you mean layers?"),
        ("smollm", "did you mean smollm2?"),
        ("ngram:", "1 to 16"),
        ("ngram:0", "1 to 16"),
        ("ngram:17", "1 to 16"),
        ("ngram:-1", "1 to 16"),
        ("ngram:\N{SUPERSCRIPT TWO}", "1 to 16"),
        ("ngram:" + "9" * 10_000, "1 to 16"),
        ("layers", "the layers that draft, 1 to 10,000"),
        ("layers:x", "the layers that draft, 1 to 10,000"),
        ("lookup", "needs the FILE"),
        ("lookup:", "needs the FILE"),
        ("suffix:3", "takes nothing behind it"),
        (":name", "is nothing that drafts"),
    ],
)
def test_what_names_none_is_told_what_does(text: str, words: str) -> None:
    with pytest.raises(BatchdecodeError, match="--draft") as error:
        parse_draft(text)
    assert words in str(error.value)
