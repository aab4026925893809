"""The simulated model is a function of the prefix, as slowly defined; so are its drafts."""

from itertools import pairwise

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from reference import ENGLISH, as_text
from reference_logits import reference_logits

from batcher import BatchdecodeError, SimulatedModel, SimulatedSettings, decode
from batcher.models.base import Batch, Chunk, Pages, can_score, join_bytes
from batcher.models.simulated import SimulatedDraft, reference_next_token, simulated_draft
from batcher.models.tokenizers import EOS_TOKEN_ID, FIRST_WORD_ID, WordTokenizer

prompts = st.lists(st.integers(0, 511), max_size=30)


@given(st.lists(prompts, min_size=1, max_size=5), st.integers(0, 2**70))
def test_every_row_is_the_function_of_its_prefix(rows, seed):
    model = SimulatedModel(SimulatedSettings(seed=seed))
    model.allocate(len(rows))
    batch = Batch(len(rows))
    for slot, prompt in enumerate(rows):
        batch.join(Chunk(slot, prompt, 0))
    prefixes = [list(prompt) for prompt in rows]
    for _ in range(4):
        tokens = model.forward(batch).tokens
        assert tokens.tolist() == [reference_next_token(model, prefix) for prefix in prefixes]
        for prefix, token in zip(prefixes, tokens.tolist(), strict=True):
            prefix.append(token)
        batch.chunks, batch.tokens = [], tokens.copy()


@examples(30)  # the definition is slow
@given(st.lists(prompts, min_size=1, max_size=4), st.data())
def test_the_logits_of_any_slots_are_the_function_of_their_prefixes(rows, data):
    model = SimulatedModel(SimulatedSettings(seed=data.draw(st.integers(0, 99))))
    model.allocate(len(rows))
    heads, batch = Batch(len(rows)), Batch(len(rows))
    prefixes = [list(prompt) for prompt in rows]
    for slot, prompt in enumerate(rows):
        boundary = data.draw(st.integers(0, max(0, len(prompt) - 1)))
        if boundary:  # a prompt in two chunks
            heads.join(Chunk(slot, prompt[:boundary], 0))
        batch.join(Chunk(slot, prompt[boundary:], boundary))
    model.forward(heads)
    for _ in range(3):
        wanted = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
        batch.logit_slots = np.array(wanted)
        output = model.forward(batch)
        check_logits(output.logits, [reference_logits(model, prefixes[slot]) for slot in wanted])
        tokens = [data.draw(st.integers(0, 511)) for _ in rows]
        for prefix, token in zip(prefixes, tokens, strict=True):
            prefix.append(token)
        if len(rows) > 1 and data.draw(st.booleans()):
            model.fork(0, 1)
            prefixes[1] = [*prefixes[0][:-1], tokens[1]]
        batch.chunks, batch.tokens = [], np.array(tokens)


def check_logits(logits, expected):
    assert logits is not None
    assert logits.dtype == np.float32
    assert logits.flags.c_contiguous
    assert logits.shape == np.shape(expected)
    assert np.abs(logits - expected).max() < 1e-5


MODEL = SimulatedModel()  # one for many tests, since it makes its table of logits once


def logits_after(prefixes):
    """Return the logits [rows, vocab] after some prompts in one batch, and the greedy tokens."""
    model = MODEL
    model.allocate(len(prefixes))
    batch = Batch(len(prefixes))
    for slot, prefix in enumerate(prefixes):
        batch.join(Chunk(slot, prefix, 0))
    batch.logit_slots = batch.slots
    output = model.forward(batch)
    assert output.logits is not None
    return output.logits, output.tokens.tolist()


MANY = [[prompt, prompt % 7] for prompt in range(2, 512)] + [
    [i, t] for t in range(512) for i in (3, 4)
]


def test_the_greedy_token_stands_out_and_logits_are_the_same_in_any_batch():
    logits, tokens = logits_after(MANY)
    assert np.isfinite(logits).all()
    assert logits.argmax(axis=1).tolist() == tokens
    best_two = np.partition(logits, -2)[:, -2:]
    assert (best_two[:, 1] - best_two[:, 0]).min() > 0.5
    together = logits_after(MANY[:64])[0].copy()
    for prefix, row in zip(MANY[:64], together, strict=True):
        alone, _ = logits_after([prefix])
        assert (alone[0] == row).all()


def test_the_logits_are_shaped_like_a_language_models():
    """A few words are likely, how many varies; what breaks the grammar is rare, not impossible."""
    model = SimulatedModel()
    words = [[i, word] for word in model.tokenizer.words["object"] for i in range(2, 40)]
    logits, _ = logits_after(words)
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    bits = -(probabilities * np.log2(probabilities)).sum(axis=1)
    assert 1.5 < np.median(bits) < 4
    assert np.quantile(bits, 0.9) - np.quantile(bits, 0.1) > 1
    line = model.lines[words[0][-1]]
    followers = np.unique(model.choices[line : line + 1024])
    in_grammar = probabilities[:, followers].sum(axis=1)
    assert 0.97 < in_grammar.mean() < 0.999
    assert probabilities.min() > 0
    frequent, rare = model.tokenizer.encode("."), model.tokenizer.encode(",")
    assert probabilities[:, frequent].mean() > 2 * probabilities[:, rare].mean()


def test_golden_logits_and_a_golden_text():
    """Samples stay the same from release to release; the reference says that they are right."""
    model = SimulatedModel()
    logits = reference_logits(model, model.tokenizer.encode("Tell me a story"))
    best = sorted(range(512), key=lambda token: -logits[token])[:5]
    words = [model.tokenizer.token_bytes[token].decode() for token in best]
    assert words == [" The", " Each", " Another", " This", " His"]
    expected = [13.3209, 11.9359, 11.1257, 10.5509, 10.105]
    assert [logits[token] for token in best] == pytest.approx(expected, abs=1e-4)
    # Results stay the same from release to release; the reference says that they are right.
    [result] = decode([{"prompt": "Tell me a story", "max_tokens": 24}])
    assert result.text == (
        " The librarian carefully sold another red hill. Our pilot admired my broken wheel beyond"
        " every key. Her dog closed our golden garden"
    )


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_eos_comes_as_often_as_the_settings_say(rate):
    model = SimulatedModel(SimulatedSettings(eos_rate=rate))
    requests = [{"prompt": [i], "max_tokens": 300, "ignore_eos": True} for i in range(60)]
    tokens = [token for result in decode(requests, model=model) for token in result.tokens]
    stop = model.tokenizer.encode(".")[0]
    after = [second for first, second in pairwise(tokens) if first == stop]
    assert len(after) > 800
    assert sum(token == EOS_TOKEN_ID for token in after) / len(after) == pytest.approx(
        rate, abs=0.05
    )


@given(st.text())
def test_any_text_round_trips(text):
    tokenizer = WordTokenizer()
    assert join_bytes(tokenizer.encode(text), tokenizer.token_bytes).decode() == text


def test_the_vocabulary_is_512_tokens_each_its_own():
    tokenizer = WordTokenizer()
    assert len(tokenizer.token_bytes) == 512
    words = tokenizer.token_bytes[FIRST_WORD_ID:]
    assert len(set(words)) == len(words)
    assert tokenizer.encode(" The engineer") == [
        tokenizer.token_bytes.index(w) for w in (b" The", b" engineer")
    ]
    assert as_text(tokenizer.encode("—"), ENGLISH) == "—"


SETTINGS = SimulatedSettings(seed=5)
MODEL, DRAFT = SimulatedModel(SETTINGS), SimulatedDraft(SETTINGS, 0.7)
PREFIXES = [[number, token] for number in range(40) for token in range(512)]


def answer(model, prefixes, slots):
    model.allocate(len(prefixes))
    batch = Batch(len(prefixes))
    for slot, prefix in enumerate(prefixes):
        batch.join(Chunk(slot, prefix, 0))
    batch.logit_slots = np.array(slots, np.int64)
    return model.forward(batch)


@pytest.mark.parametrize("agreement", [0.0, 0.25, 0.7, 1.0])
def test_tokens_agree_as_often_as_they_should(agreement):
    draft = SimulatedDraft(SETTINGS, agreement)
    tokens = answer(MODEL, PREFIXES, []).tokens.copy()
    is_equal = answer(draft, PREFIXES, []).tokens == tokens
    assert abs(is_equal.mean() - agreement) < 0.02
    assert is_equal.all() == (agreement == 1)
    assert is_equal.any() == (agreement > 0)
    last = np.array([prefix[-1] for prefix in PREFIXES])
    for part in (last < 256, last >= 256):  # whatever comes before
        assert abs(is_equal[part].mean() - agreement) < 0.02


def test_logits_are_those_of_the_model_or_of_another_choice():
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
def test_drafts_are_the_same_in_any_batch_and_in_pages(rows, data):
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


def test_a_draft_is_made_by_its_name():
    draft = simulated_draft("simulated:0.25", SETTINGS)
    assert draft.name == "simulated:0.25"
    assert draft.settings == MODEL.settings
    assert simulated_draft("simulated", SETTINGS).name == "simulated:1"
    assert not can_score(draft)


@pytest.mark.parametrize("rate", ["", "1.5", "-0.1", "nan", "x", "0.5:1", "1e400"])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(
        BatchdecodeError, match=f"^simulated:{rate}: RATE must be the share of correct drafts"
    ):
        simulated_draft(f"simulated:{rate}", SETTINGS)
