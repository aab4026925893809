"""Prompts of every kind, read into token ids."""

import os
import subprocess
import sys
from array import array
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher import BatchdecodeError, Engine, Request, SimulatedModel, decode
from batcher.errors import RequestError
from batcher.models.loading import as_model
from batcher.models.tokenizers import WordTokenizer
from batcher.planning.workload import workload_of
from batcher.prompts import Prompt, Undrawn, count_tokens, read_prompt
from batcher.request import PromptSegment
from batcher.splitmix64 import GAMMA, mix, mix_in_place, scramble
from batcher.tokens import MANY

MODEL = SimulatedModel()
ENCODE = MODEL.tokenizer.encode
MASK = 2**64 - 1


def read(prompt, model=MODEL):
    return read_prompt(prompt, "prompt", "a", model)


def drawn(seed, length, vocab_size=512):
    segment = PromptSegment(length=length, seed=seed)
    return Undrawn([segment], [length], vocab_size).draw(0, length)


def splitmix64(state):
    """Yield the numbers of splitmix64 as its authors write it."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        bits = state
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK
        yield bits ^ (bits >> 31)


def test_a_prompt_of_ids_is_the_list_itself_and_has_no_boundaries():
    tokens = [5, 6, 7]
    assert read(tokens).tokens is tokens
    assert read(tokens).segment_ends == read([]).segment_ends == read("Hi").segment_ends == ()
    assert read("Tell me") == Prompt(ENCODE("Tell me"))


class BosTokenizer(WordTokenizer):
    """Its texts begin with a token of their own, as those of Llama do."""

    prefix_token_ids = (1,)


def model_with_bos():
    model = SimulatedModel()
    model.tokenizer = BosTokenizer()
    return as_model(model)


def test_bos_stands_before_a_prompt_that_begins_with_a_text():
    model, text, other = model_with_bos(), PromptSegment(text="Hi"), PromptSegment(tokens=[9])
    hi = ENCODE("Hi")
    assert read("Hi", model).tokens == [1, *hi]
    assert read("", model).tokens == [1]
    assert read([7], model).tokens == [7]
    assert read([text, other, text], model).tokens == [1, *hi, 9, *hi]
    assert read([text, other], model).segment_ends[0] == (1 + len(hi), 0)
    assert read([other, text], model).tokens == [9, *hi]
    assert read_prompt("Hi", "prompt", "a", model, [5]).tokens == [5, *hi]
    assert read_prompt([text, text], "prompt", "a", model, [5]).tokens == [5, *hi, *hi]


def test_bos_is_one_of_the_tokens_of_a_prompt_once():
    turns = [Request(prompt="Hi", session="a", max_tokens=2), Request(prompt="You", session="a")]
    first, second = decode(turns, model=model_with_bos())
    assert first.usage.prompt_tokens == 1 + len(ENCODE("Hi"))
    history = first.usage.prompt_tokens + len(first.tokens)
    assert second.usage.prompt_tokens == history + len(ENCODE("You"))
    known = {(place, 0): result.tokens for place, result in enumerate((first, second))}
    jobs = workload_of(turns, model_with_bos(), known).jobs
    own = [first.usage.prompt_tokens, len(ENCODE("You"))]
    assert [job.num_prompt_tokens for job in jobs] == own
    [alone] = decode([Request(prompt=[1, *ENCODE("Hi")], max_tokens=2)], model=SimulatedModel())
    assert alone.tokens == first.tokens
    [echoed] = decode(
        [Request(prompt=[PromptSegment(text="Hi")], echo=True)], model=model_with_bos()
    )
    assert echoed.text.startswith("Hi")
    segment = PromptSegment(text="Hi")
    request = Request(prompt=[segment, segment], ignore_eos=True)
    [job] = workload_of([request], model_with_bos()).jobs
    assert job.num_prompt_tokens == 1 + 2 * len(ENCODE("Hi"))


@pytest.mark.parametrize("prefix", [["a"], [512], "a", None, [-1], 3])
def test_a_prefix_that_is_no_list_of_tokens(prefix):
    model = SimulatedModel()
    model.tokenizer = BosTokenizer()
    model.tokenizer.prefix_token_ids = prefix
    fault = r"prefix_token_ids are .*, not a list of token ids from 0 to 511"
    with pytest.raises(BatchdecodeError, match=fault):
        as_model(model)


def test_segments_stand_one_behind_the_other_and_each_ends_at_a_boundary():
    prompt = [
        PromptSegment(text="Be brief.", type="system"),
        PromptSegment(length=40, seed="book", pin=True),
        PromptSegment(tokens=[9, 8], type="user"),
        PromptSegment(text=" No", type="assistant"),
        PromptSegment(text="!"),
    ]
    parts = [ENCODE("Be brief."), drawn("book", 40), [9, 8], ENCODE(" No"), ENCODE("!")]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    assert read(prompt).num_tokens == ends[-1]
    assert read(prompt).tokens == [*chain(*parts)]
    assert read(prompt).segment_ends == tuple(zip(ends, [2, 3, 1, 0, 0], strict=True))
    assert count_tokens(prompt, MODEL.tokenizer) == ends[-1]


def test_what_is_drawn_is_splitmix64_of_the_hashed_seed_in_every_process():
    numbers = splitmix64(next(splitmix64(5)))
    assert drawn(5, 50, 1000) == [3 + ((next(numbers) >> 32) * 997 >> 32) for _ in range(50)]
    few, many = drawn(1, MANY), drawn(1, MANY + 1)
    assert isinstance(few, list)
    assert (type(many), many.itemsize) == (array, 2)
    assert many[:MANY].tolist() == few
    assert drawn(1, MANY + 1, None).tolist() == many.tolist()
    code = (
        "from batcher.prompts import Undrawn; from batcher.request import PromptSegment as S;"
        "parts = [S(length=9, seed='book'), S(length=9, seed=-3)];"
        "print(Undrawn(parts, [9, 18], 512).draw(0, 18))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert said == [f"{drawn('book', 9) + drawn(-3, 9)}\n"] * 2


@given(st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5), st.integers(1, 200))
def test_drawn_tokens_are_ordinary_tokens_of_the_model(seed, length):
    for vocab_size in (1, 3, 4, 5, 512, 2**31):
        tokens = drawn(seed, length, vocab_size)
        first = 3 if vocab_size > 3 else 0
        assert len(tokens) == length
        assert all(type(token) is int and first <= token < vocab_size for token in tokens)
    assert drawn(seed, length, None) == drawn(seed, length, 512)


def test_a_prompt_is_cut_at_a_boundary_of_its_own():
    prompt = Prompt([1, 2, 3, 4, 5], ((2, 2), (4, 0), (5, 1)))
    assert prompt.cut(5) == prompt
    assert prompt.cut(3) == Prompt([1, 2, 3], ((2, 2), (3, 0)))
    assert prompt.cut(2) == Prompt([1, 2], ((2, 2),))
    assert prompt.cut(0) == Prompt([])


class Faulty:
    """A tokenizer that gives no token for a space, a large one for "!", and fails on "?"."""

    token_bytes = [b"x"] * 10

    def encode(self, text):
        if text == "?":
            raise OSError("no")
        return [] if text == " " else [99 if text == "!" else 5]


def faulty_model():
    def model(prefixes):
        return [1 for _ in prefixes]

    model.tokenizer, model.vocab_size = Faulty(), 10
    return as_model(model)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("?", ("invalid-value", "the tokenizer raised OSError: no")),
        ("!", ("unknown-token", "the tokenizer returned token 99, and the model knows 0 to 9")),
    ],
)
def test_a_text_that_cannot_be_encoded_is_told_with_its_place(text, problem):
    code, why = problem
    model = faulty_model()
    for prompt, field in (
        (text, "prompt"),
        ([PromptSegment(tokens=[1]), PromptSegment(text=text)], "prompt[1].text"),
    ):
        expected = [(code, f"`{field}` cannot be encoded: {why}", field)]
        with pytest.raises(RequestError) as caught:
            read(prompt, model)
        assert [(p.code, p.message, p.field) for p in caught.value.problems] == expected
        with pytest.raises(RequestError) as caught:
            Engine(model).add(Request(prompt=prompt))
        assert [(p.code, p.message, p.field) for p in caught.value.problems] == expected


SEGMENTS = [
    PromptSegment(text="She opened"),
    PromptSegment(length=3, seed=2),
    PromptSegment(text=" the wind"),
]


def test_segments_give_what_their_tokens_give():
    tokens = read(SEGMENTS).tokens
    fields = {"max_tokens": 9, "heal": True}
    [of_segments] = decode([Request(prompt=SEGMENTS, **fields)])
    [of_tokens] = decode([Request(prompt=tokens, **fields)])
    assert of_segments == of_tokens
    assert of_segments.usage.prompt_tokens == len(tokens)
    assert of_segments.text.startswith("ow")
    prompt = [{"text": "She opened"}, {"length": 3, "seed": 2}, {"text": " the wind"}]
    assert decode([{"prompt": prompt}]) == decode([Request(prompt=SEGMENTS)])


@pytest.mark.parametrize("heal", [False, True])
def test_an_echo_begins_with_the_text_of_the_segments(heal):
    [plain] = decode([Request(prompt=SEGMENTS, heal=heal)])
    [echoed] = decode([Request(prompt=SEGMENTS, heal=heal, echo=True)])
    drawn_text = b"".join(MODEL.tokenizer.token_bytes[token] for token in drawn(2, 3))
    prompt = b"She opened" + drawn_text + b" the wind"
    assert echoed.text == prompt.decode("utf-8", "replace") + plain.text


@pytest.mark.parametrize(
    ("prompt", "text"), [(" the wind", " the wind"), (SEGMENTS[::2], "She opened the wind")]
)
def test_an_echo_leaves_out_what_the_session_has_before(prompt, text):
    first = Request(prompt="Tell me", session="s", max_tokens=5)
    turns = [first, Request(prompt=prompt, session="s", max_tokens=5)]
    told = [turns[0], Request(prompt=prompt, session="s", max_tokens=5, echo=True)]
    [_, plain], [_, echoed] = decode(turns), decode(told)
    assert echoed.text == text + plain.text
    assert echoed.usage.prompt_tokens > len(ENCODE(text))


def test_the_bits_are_those_of_its_authors():
    # the first outputs of their code with seed 1234567
    state, expected = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(state + number * GAMMA) % 2**64 for number in (1, 2, 3)]
    assert [mix(number) for number in states] == expected
    assert mix(np.array(states, np.uint64)).tolist() == expected
    assert mix_in_place(np.array(states, np.uint64)).tolist() == expected
    assert scramble(state) == expected[0]
