"""What somebody else's Model answers is checked before it can mix anything up."""

import numpy as np
import pytest
from narrow_model import top_logits

from batcher import BatchdecodeError, Engine, Request, SimulatedModel, decode
from batcher.errors import ModelError
from batcher.models.base import Batch, Chunk, ModelOutput, Pages, can_verify, can_verify_trees
from batcher.models.loading import as_model
from batcher.models.tokenizers import ByteTokenizer

REQUESTS = [Request(prompt=[7] * n, max_tokens=4, ignore_eos=True) for n in (1, 2, 3)]


class Faulty:
    """A Model of another's making; `spoil` changes the third answer."""

    def __init__(self, spoil):
        self._inner, self._spoil, self._num_calls = SimulatedModel(), spoil, 0
        self.name, self.settings = "faulty", {}
        self.tokenizer, self.vocab_size = self._inner.tokenizer, self._inner.vocab_size
        self.eos_token_id = self._inner.eos_token_id
        self.allocate, self.release = self._inner.allocate, self._inner.release

    def forward(self, batch):
        self._num_calls += 1
        tokens = self._inner.forward(batch).tokens
        return self._spoil(tokens.copy()) if self._num_calls == 3 else ModelOutput(tokens)


def decoded(spoil):
    return decode(REQUESTS, model=Faulty(spoil), batch_size=2)


class OwnError(BaseException):
    """Not an Exception."""


def fail(error):
    raise error


def put(slot, value):
    def spoil(tokens):
        tokens[slot] = value
        return ModelOutput(tokens)

    return spoil


def test_a_good_model_gives_what_it_gives_unchecked():
    assert decoded(ModelOutput) == decode(REQUESTS, batch_size=2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda _: fail(RuntimeError("out of memory")), "raised RuntimeError: out of memory"),
        (lambda _: fail(ModelError("shape mismatch")), "shape mismatch"),
        (lambda _: fail(GeneratorExit()), "raised GeneratorExit"),
        (lambda _: fail(OwnError("mine")), "raised OwnError: mine"),
        (lambda _: None, "raised AttributeError"),
        (lambda tokens: ModelOutput(tokens[:1]), r"returned int64 [1], not integers [2]"),
        (lambda tokens: ModelOutput(tokens[:, None]), r"returned int64 [2, 1], not integers [2]"),
        (lambda tokens: ModelOutput(tokens * 1.0), r"returned float64 [2], not integers [2]"),
        (lambda tokens: ModelOutput(tokens > 0), r"returned bool [2], not integers [2]"),
    ],
)
def test_no_answer_fails_the_batch(spoil, message):
    results = decoded(spoil)
    assert [result.finish_reason for result in results] == ["error", "error", "length"]
    for result in results[:2]:
        assert len(result.tokens) == 2
        assert result.error.message.startswith("step 2: ")
        assert message in result.error.message


@pytest.mark.parametrize("value", [-1, 512, 2**40])
def test_a_token_out_of_range_fails_its_row_alone(value):
    good = decode(REQUESTS, batch_size=2)
    results = decoded(put(0, value))
    assert results[0].error.message.startswith(f"step 2: faulty returned {value}, not a token id")
    assert [result.tokens for result in results[1:]] == [result.tokens for result in good[1:]]


def test_only_rows_that_are_there_can_fail():
    [result] = decode(REQUESTS[:1], model=Faulty(put(1, 10**6)), batch_size=2)
    assert result == decode(REQUESTS[:1], batch_size=2)[0]
    results = decoded(lambda tokens: ModelOutput(tokens, {1: "context is full"}))
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert results[1].error.message == "step 2: context is full"


def test_a_model_serves_one_engine_and_its_cache_may_raise_anything():
    model = Faulty(ModelOutput)
    model.release = lambda _: fail(OwnError("mine"))
    with pytest.raises(BatchdecodeError, match="faulty cannot release slot 0: OwnError: mine"):
        decode(REQUESTS, model=model)
    model = as_model(inner := Forking(None))
    inner.fork = lambda *_: fail(GeneratorExit())
    with pytest.raises(BatchdecodeError, match="giver cannot fork slot 3: GeneratorExit"):
        model.fork(3, 1)
    model = Faulty(ModelOutput)
    first = Engine(model, 2)
    first.add(REQUESTS[0])
    first.step()
    Engine(model, 2)
    with pytest.raises(BatchdecodeError, match="another engine has taken the model"):
        first.step()


LOGITS = np.arange(8, dtype=np.float32).reshape(2, 4)


class Giver:
    """Gives `output` whatever it is asked."""

    name, settings, tokenizer, vocab_size, eos_token_id = "giver", {}, ByteTokenizer(), 4, None
    gives = "both"

    def __init__(self, output):
        self.output, self.forks = output, []

    def allocate(self, num_slots): ...

    def release(self, slot): ...

    def forward(self, batch):
        batch.logit_slots = np.array([9])  # it may
        return self.output


class Forking(Giver):
    def fork(self, source, target):
        if source == target:
            raise MemoryError("no blocks")
        self.forks.append((source, target))


def answer_to(output, logit_slots):
    model = as_model(Giver(output))
    model.allocate(4)
    batch = Batch(4)
    for slot in (0, 1, 3):
        batch.join(Chunk(slot, [1], 0))
    batch.logit_slots = np.array(logit_slots)
    batch.logit_slots.flags.writeable = False  # it is the engine's own
    return model.forward(batch)


def test_logits_are_handed_on_row_by_row_for_those_that_want_them():
    output = answer_to(ModelOutput(np.array([-1, 2, 99, 3]), {3: "full"}, LOGITS), [0, 3])
    assert output.logits.tolist() == LOGITS.tolist()
    assert output.tokens.tolist() == [0, 2, 0, 0]  # a token beside logits means nothing
    assert output.failed == {3: "full"}
    for given in (LOGITS, LOGITS.astype(np.float64), np.asfortranarray(LOGITS), LOGITS.tolist()):
        output = answer_to(ModelOutput(np.zeros(4, np.int64), {}, given), [0, 3])
        assert output.logits.flags.c_contiguous
        assert output.logits.dtype == np.float32
        assert (output.logits == LOGITS).all()
    large = LOGITS.astype(np.float64) * 1e300
    output = answer_to(ModelOutput(np.zeros(4, np.int64), {}, large), [0, 3])
    assert output.logits[1].tolist() == [np.inf] * 4


class Verifying(Giver):
    is_paged = verifies_drafts = True

    def allocate_pages(self, num_slots, num_blocks, block_size): ...


def after_drafts(output):
    model = as_model(Verifying(output))
    model.allocate_pages(4, 9, 4)
    batch = Batch(4, Pages(4, [[0], [1], [], []], num_blocks=9))
    for slot in (0, 1):
        batch.join(Chunk(slot, [1, 2], 0, num_drafts=1))
    return model.forward(batch)


def test_logits_after_drafts_are_handed_on():
    output = after_drafts(ModelOutput([1, 2, 0, 0], draft_logits=LOGITS.astype(np.float64)))
    assert output.tokens.tolist() == [1, 2, 0, 0]
    assert output.draft_logits.dtype == np.float32
    assert (output.draft_logits == LOGITS).all()
    assert answer_to(ModelOutput(np.zeros(4, int), draft_logits=LOGITS), []).draft_logits is None


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (None, r"object \[\], not numbers \[2, 4\]"),
        (LOGITS[:1], r"float32 \[1, 4\], not numbers \[2, 4\]"),
        (LOGITS[:, :3], r"float32 \[2, 3\], not numbers \[2, 4\]"),
        (LOGITS[0], r"float32 \[4\], not numbers"),
        (LOGITS > 0, r"bool \[2, 4\], not numbers"),
        (LOGITS * 1j, "complex"),
        ([[1.0], [1.0, 2.0]], None),
    ],
)
def test_logits_that_are_none_fail_the_batch(logits, message):
    output = ModelOutput(np.zeros(4, np.int64), {}, logits, draft_logits=logits)
    asked_for = {"": lambda: answer_to(output, [0, 3]), "of drafts ": lambda: after_drafts(output)}
    for kind, asked in asked_for.items():
        said = "raised ValueError" if message is None else f"returned logits {kind}{message}"
        with pytest.raises(ModelError, match=said):
            asked()


def test_a_checked_model_verifies_drafts_exactly_if_its_own_does():
    for kind, verifies in ((Verifying, True), (Giver, False), (Forking, False)):
        assert can_verify(as_model(kind(None))) == verifies
    branching = Verifying(None)
    assert not can_verify_trees(as_model(branching))
    branching.verifies_trees = True
    assert can_verify_trees(as_model(branching))
    branching.verifies_drafts = False
    assert not can_verify_trees(as_model(branching))
    recomputing = Verifying(None)
    assert not as_model(recomputing).recomputes_drafts
    recomputing.recomputes_drafts = True
    assert as_model(recomputing).recomputes_drafts


@pytest.mark.parametrize(
    ("name", "value", "lack"),
    [("is_paged", False, "is not paged"), ("gives", "tokens", "gives no logits")],
)
def test_a_model_that_cannot_verify_drafts_is_told_so(name, value, lack):
    model = Verifying(None)
    setattr(model, name, value)
    with pytest.raises(BatchdecodeError, match=f"says that it verifies_drafts, and {lack}"):
        as_model(model)


def test_forks_are_handed_on():
    model = as_model(inner := Forking(None))
    model.fork(2, 1)
    assert inner.forks == [(2, 1)]
    with pytest.raises(BatchdecodeError, match="giver cannot fork slot 3: MemoryError: no blocks"):
        model.fork(3, 3)


class Forkless(Giver):
    """Remembers what it is told."""

    def __init__(self):
        super().__init__(ModelOutput(np.zeros(4, np.int64)))
        self.told = []

    def forward(self, batch):
        chunks = [(chunk.slot, chunk.token_ids, chunk.start) for chunk in batch.chunks]
        self.told.append((batch.slots.tolist(), chunks))
        return self.output

    def release(self, slot):
        self.told.append(slot)


def test_a_model_without_fork_is_handed_whole_prefixes_instead():
    model = as_model(inner := Forkless())
    model.allocate(4)
    batch = Batch(4)
    batch.join(Chunk(0, [1, 2], 0))
    batch.join(Chunk(1, [3], 0))
    model.forward(batch)
    batch.chunks, batch.tokens = [Chunk(1, [3, 3], 1)], np.array([5, 0, 0, 0])
    model.forward(batch)
    batch.chunks, batch.tokens = [], np.array([6, 7, 8, 9])
    model.fork(0, 1)  # whose row is forgotten
    model.fork(0, 3)  # where there was none
    model.fork(0, 2)
    model.release(2)  # before it was told of
    batch.enter(3)
    model.forward(batch)
    batch.chunks = []
    model.forward(batch)
    model.release(3)
    assert inner.told == [
        ([0, 1], [(0, [1, 2], 0), (1, [3], 0)]),
        ([0, 1], [(1, [3, 3], 1)]),
        1,
        ([0, 1, 3], [(1, [1, 2, 5, 7], 0), (3, [1, 2, 5, 9], 0)]),
        ([0, 1, 3], []),
        3,
    ]


class Narrow:
    """A Model that returns only the largest logits of rows; num_rows: fewer in its answer."""

    gives, num_top_logits = "both", 8

    def __init__(self, num_rows=0):
        self._inner, self._num_rows = SimulatedModel(), num_rows
        self.name, self.settings = "narrow", {}
        self.tokenizer, self.vocab_size = self._inner.tokenizer, self._inner.vocab_size
        self.eos_token_id = self._inner.eos_token_id
        self.allocate, self.release = self._inner.allocate, self._inner.release

    def forward(self, batch):
        num_whole, slots = len(batch.logit_slots), [*batch.logit_slots, *batch.top_slots]
        order = np.argsort(slots)
        batch.logit_slots = np.array(slots, np.int64)[order]
        output = self._inner.forward(batch)
        if output.logits is None:
            return output
        logits = output.logits[order.argsort()]
        top = top_logits(logits[num_whole:], 8, batch.edits)
        top = top.of(np.arange(len(batch.top_slots) - self._num_rows))
        return ModelOutput(output.tokens, logits=logits[:num_whole], top_logits=top)


SAMPLED = [
    Request(prompt=[7] * n, max_tokens=9, seed=n, ignore_eos=True, **fields)
    for n, fields in enumerate(
        [
            {"temperature": 1.0, "top_k": 5},
            {"logprobs": 2},
            {"temperature": 1.0},
            {"temperature": 1.0, "top_k": 7, "presence_penalty": 0.5},
            {"temperature": 1.0, "min_p": 0.2, "logprobs": 1},
        ],
        1,
    )
]


def test_a_model_may_return_the_largest_logits_only():
    for batch_size in (1, 3):
        found = decode(SAMPLED, model=Narrow(), batch_size=batch_size)
        assert found == decode(SAMPLED, batch_size=batch_size)


def test_missing_largest_logits_are_an_error():
    [result, *_] = decode(SAMPLED, model=Narrow(1), batch_size=2)
    assert "narrow returned largest logits [(" in result.error.message
