"""What --draft and --draft-tree take, what they answer to the rest, and what drafts gain."""

from pathlib import Path

import pytest

from batcher.errors import BatchdecodeError
from batcher.speculation.settings import (
    LINE,
    ModelDraft,
    NgramDraft,
    TreeShape,
    expected_speedup,
    expected_tokens,
    parse_draft,
    parse_tree,
    simple_return,
)


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ("ngram", NgramDraft(4)),
        ("ngram:16", NgramDraft(16)),
        ("simulated", ModelDraft("simulated")),
        ("smollm2", ModelDraft("smollm2")),
        ("small.gguf", ModelDraft("small.gguf")),
        ("my.models:Small", ModelDraft("my.models:Small")),
    ],
)
def test_a_text_names_a_draft(text: str, draft: NgramDraft | ModelDraft) -> None:
    assert parse_draft(text) == draft


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    assert parse_draft(str(tmp_path)) == ModelDraft(str(tmp_path))


ALLOWED = "(use ngram, ngram:N (N from 1 to 16), simulated:RATE or a MODEL)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ALLOWED),
        ("ngrams", "did you mean ngram?"),
        ("smollm", "did you mean smollm2?"),
        *((f"ngram:{n}", "1 to 16") for n in ("", 0, 17, -1, "\N{SUPERSCRIPT TWO}", "9" * 10_000)),
        (":name", ALLOWED),
        *((text, ALLOWED) for text in ("suffix", "lookup:texts.jsonl", "lookup:x", "layers:8")),
    ],
)
def test_what_names_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(BatchdecodeError, match="--draft") as error:
        parse_draft(text)
    assert words in str(error.value)


def test_a_shape_is_read() -> None:
    assert parse_tree("3x4") == TreeShape(3, 4)
    assert parse_tree("64x1").size == LINE.size == 64


@pytest.mark.parametrize(
    "text", ["", "3", "x", "0x3", "3x0", "-1x2", "9x8", "3x4x5", "65x1", "٣x٤"]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(BatchdecodeError, match=f"^--draft-tree {text}: expected WxD, such as 3x4"):
        parse_tree(text)


def test_by_hand() -> None:
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.7, 0) == 1
    assert expected_speedup(0.5, 2, 0.0) == 1.75
    assert expected_speedup(0.5, 2, 0.25) == pytest.approx(1.75 / 1.5)
    assert simple_return(0.5, 4, 0.25) == pytest.approx(1.6)
