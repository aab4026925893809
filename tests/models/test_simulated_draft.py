"""A simulated draft agrees with its model after the share of prefixes that it is told."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher import BatchdecodeError, SimulatedModel, SimulatedSettings
from batcher.models.base import Batch, Chunk, ModelOutput, Pages, can_score
from batcher.models.simulated import SimulatedDraft, simulated_draft

SETTINGS = SimulatedSettings(seed=5)
MODEL, DRAFT = SimulatedModel(SETTINGS), SimulatedDraft(SETTINGS, 0.7)
PREFIXES = [[number, token] for number in range(40) for token in range(512)]


def answer(model: SimulatedModel, prefixes: list[list[int]], slots: list[int]) -> ModelOutput:
    model.allocate(len(prefixes))
    batch = Batch(len(prefixes))
    for slot, prefix in enumerate(prefixes):
        batch.join(Chunk(slot, prefix, 0))
    batch.logit_slots = np.array(slots, np.int64)
    return model.forward(batch)


@pytest.mark.parametrize("agreement", [0.0, 0.25, 0.7, 1.0])
def test_tokens_agree_as_often_as_they_should(agreement: float) -> None:
    draft = SimulatedDraft(SETTINGS, agreement)
    tokens = answer(MODEL, PREFIXES, []).tokens.copy()
    is_equal = answer(draft, PREFIXES, []).tokens == tokens
    assert abs(is_equal.mean() - agreement) < 0.02
    assert is_equal.all() == (agreement == 1)
    assert is_equal.any() == (agreement > 0)
    last = np.array([prefix[-1] for prefix in PREFIXES])
    for part in (last < 256, last >= 256):  # whatever comes before
        assert abs(is_equal[part].mean() - agreement) < 0.02


def test_logits_are_those_of_the_model_or_of_another_choice() -> None:
    prefixes = PREFIXES[::13]
    every = [*range(len(prefixes))]
    theirs = answer(MODEL, prefixes, every).logits.copy()
    output = answer(DRAFT, prefixes, every)
    assert (output.logits.argmax(1) == output.tokens).all()
    is_equal = (output.logits == theirs).all(1)
    assert (is_equal == (theirs.argmax(1) == output.tokens)).all()
    assert 0.65 < is_equal.mean() < 0.75


@given(
    st.lists(st.lists(st.integers(0, 511), min_size=2, max_size=9), min_size=1, max_size=6),
    st.data(),
)
def test_drafts_are_the_same_in_any_batch_and_in_pages(
    rows: list[list[int]], data: st.DataObject
) -> None:
    slots = [slot for slot in range(len(rows)) if data.draw(st.booleans())]
    output = answer(DRAFT, rows, slots)
    tokens = output.tokens.tolist()
    logits = None if output.logits is None else output.logits.copy()
    assert (logits is None) == (not slots)
    DRAFT.allocate_pages(len(rows), 9 * len(rows), 1)
    tables = [[*range(9 * slot, 9 * slot + 9)] for slot in range(len(rows))]
    batch = Batch(len(rows), Pages(1, tables, num_blocks=9 * len(rows)))
    for slot, row in enumerate(rows):
        batch.add_part(Chunk(slot, row[:-1], 0))
    DRAFT.forward(batch)
    batch.chunks = []
    for slot, row in enumerate(rows):
        batch.join(Chunk(slot, row[-1:], len(row) - 1))
    batch.logit_slots = np.array(slots, np.int64)
    paged = DRAFT.forward(batch)
    assert paged.tokens.tolist() == tokens
    if logits is not None:
        assert (paged.logits == logits).all()
    for slot, row in enumerate(rows):
        alone = answer(DRAFT, [row], [0])
        assert alone.tokens[0] == tokens[slot] == alone.logits[0].argmax()


def test_a_draft_is_made_by_its_name() -> None:
    draft = simulated_draft("simulated:0.25", SETTINGS)
    assert draft.name == "simulated:0.25"
    assert draft.settings == MODEL.settings
    assert simulated_draft("simulated", SETTINGS).name == "simulated:1"
    assert not can_score(draft)


@pytest.mark.parametrize("rate", ["", "1.5", "-0.1", "nan", "x", "0.5:1", "1e400"])
def test_a_rate_that_is_none_is_refused(rate: str) -> None:
    with pytest.raises(BatchdecodeError, match=f"^simulated:{rate}: RATE says how often"):
        simulated_draft(f"simulated:{rate}", SETTINGS)
