"""We compute what transformers did of tiny models; tests/parity/golden_transformers.py asked it."""

import json
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_allclose
from one_forward import logits_after_each
from tiny_checkpoints import CLASSES, GOLDEN_PROMPT, write_named

from batcher import ByteTokenizer, Engine, Request
from batcher.models.transformer import TransformerModel
from batcher.transformer.checkpoint import open_checkpoint
from batcher.transformer.linear import WholeLinears
from batcher.transformer.transformer import Transformer

PATH = Path(__file__).parents[1] / "golden" / "transformers.json"
CASES = json.loads(PATH.read_text())


def test_every_architecture_is_there() -> None:
    assert {case["fields"]["architectures"][0] for case in CASES} == {*CLASSES.values()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["fields"]["architectures"][0])
def test_logits_and_tokens_are_those_of_transformers(case: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_named(tmp_path, case["fields"]))
    transformer = Transformer(checkpoint.config, checkpoint.read, WholeLinears())
    logits = logits_after_each(transformer, GOLDEN_PROMPT)[-1]
    assert_allclose(logits, case["logits"], atol=1e-4)

    num_tokens = len(case["tokens"])
    engine = Engine(TransformerModel(transformer, ByteTokenizer(), "tiny", {}), 1)
    engine.add(Request(prompt=GOLDEN_PROMPT, max_tokens=num_tokens, ignore_eos=True))
    [result] = [result for _ in range(num_tokens) for result in engine.step().results]
    assert result.tokens == case["tokens"]
