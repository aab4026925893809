"""Memory that prompts take: in the queue next to none, and when decoded a few times their size."""

import json
import tracemalloc
from array import array

import pytest
from engine_runs import drained
from examples import mostly_heavy
from hypothesis import given
from hypothesis import strategies as st

from batcher import Engine, Request, SimulatedModel
from batcher.models.tokenizers import WordTokenizer
from batcher.prompts import Prompt, block_contents, encoded, read_prompt
from batcher.request import PromptSegment
from batcher.requests.lines import RequestParser
from batcher.settings import SchedulingSettings
from batcher.tokens import MANY

MEGABYTE = 2**20
WORDS = WordTokenizer()


def peak_of(function):
    """Return the most bytes that were held at once while `function` ran, beside those before."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.heavy  # each allocation is traced
def test_prompts_by_length_take_no_memory_until_they_are_admitted_or_looked_for():
    engine = Engine(SimulatedModel(), 1, settings=SchedulingSettings(policy="sjf"))
    drained(engine)  # what is made once

    def add_all():
        for number in range(20):
            segments = [PromptSegment(length=MEGABYTE // 8, seed=number)]
            engine.add(Request(id=f"r{number}", prompt=segments, max_tokens=1))
        engine.step()

    # One is drawn: 2 bytes for each token, and a few times 8 while that is made.
    assert peak_of(add_all) < 50 * MEGABYTE // 8
    assert peak_of(lambda: drained(engine)) < 50 * MEGABYTE // 8
    settings = SchedulingSettings(policy="lpm", prefix_cache=True)
    first, engine = (Engine(SimulatedModel(), 1, settings=settings) for _ in range(2))
    first.add(Request(prompt=[PromptSegment(length=10**5, seed="first")], max_tokens=2))
    drained(first)  # what is made once, as constants of the longest prompt
    for number in range(20):
        segments = [PromptSegment(length=64, seed="z"), PromptSegment(length=10**5, seed=number)]
        engine.add(Request(id=f"r{number}", prompt=segments, max_tokens=2))
    # One is drawn, one comes after it, and the blocks of both are kept.
    assert peak_of(lambda: [engine.step() for _ in range(3)]) < 10 * MEGABYTE


@pytest.mark.parametrize(
    "text",
    mostly_heavy(["Once upon a time the brave fox, found. ", "0123456789", "x"], "0123456789"),
    ids=["words", "digits", "one word"],
)
def test_a_long_text_takes_at_most_eight_times_its_size(text):
    line = json.dumps({"prompt": text * (2 * MEGABYTE // len(text.encode()))}, ensure_ascii=False)
    data = line.encode()
    engine = Engine(SimulatedModel(), 1)
    engine.add(Request(prompt="x", max_tokens=1))
    drained(engine)
    results = []

    def decode():
        request = RequestParser(engine.capabilities).parse(data, 1).request
        engine.enqueue(request)
        del request
        results.extend(drained(engine).results)

    assert peak_of(decode) + len(data) < 8 * len(data)
    assert results[0].usage.prompt_tokens > MEGABYTE // 4


def test_a_long_chat_takes_no_more_than_its_text():
    text = "hello world. " * (2 * MEGABYTE // 13)
    data = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    engine = Engine(SimulatedModel(), 1)
    parser = RequestParser(engine.capabilities)
    parser.parse(b'{"messages":[{"role":"user","content":"x"}]}', 1)
    requests = []
    assert peak_of(lambda: requests.append(parser.parse(data, 1).request)) < 7 * len(data)
    assert requests[0].prompt == f"user: {text}\nassistant:"


@given(
    st.lists(
        st.sampled_from([" the", "the", " ", "\n", "x" * 70, " boat", "é", "—", "9"]), max_size=30
    ).map("".join),
    st.integers(60_000, 70_000),
)
def test_an_encoding_in_windows_is_the_same(text, size):
    filled = ("a" * (size % 70) + text) * (size // (len(text) + 70) + 1)
    assert WORDS.encode_array(filled).tolist() == WORDS.encode(filled)


@given(st.data())
def test_a_part_of_a_prompt_is_that_part_of_the_whole(data):
    segments = data.draw(
        st.lists(
            st.one_of(
                st.builds(PromptSegment, length=st.integers(1, 3000), seed=st.integers(0, 3)),
                st.builds(PromptSegment, text=st.sampled_from(["the fox", "x" * 9])),
                st.builds(PromptSegment, tokens=st.lists(st.integers(0, 511), min_size=1)),
            ),
            min_size=1,
        )
    )
    prompt = read_prompt(segments, "prompt", "a", SimulatedModel())
    whole = read_prompt(segments, "prompt", "a", SimulatedModel()).tokens
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    assert [*prompt.read(start, stop)] == [*whole[start:stop]]
    output, size = [7, 8, 9, 10, 11], data.draw(st.integers(1, 200))
    known = [*whole, *output]
    stop = data.draw(st.integers(start, len(known)))
    after = known[max(start, len(whole)) : stop]
    for kept in (prompt, Prompt(whole)):
        blocks = [*block_contents(kept, after, start, stop, size, "H")]
        parts = [known[at : min(at + size, stop)] for at in range(start, stop, size)]
        assert blocks == [array("H", part).tobytes() for part in parts]
    assert isinstance(prompt.drawn, list | array) == (len(whole) <= MANY), "no long one is kept"


class ListTokenizer:
    """A tokenizer that knows of no arrays."""

    token_bytes = (b"a", b"b")

    def encode(self, text):
        return [0, 1] * len(text)


def test_a_long_prompt_is_decoded_as_the_list_of_its_tokens_and_given_as_one():
    assert encoded("x" * MANY, ListTokenizer(), 2) == array("H", [0, 1] * MANY)
    assert encoded("x", ListTokenizer(), 2) == [0, 1]
    text = "Once upon a time. " * 400
    tokens = SimulatedModel().tokenizer.encode(text)
    assert len(tokens) > MANY
    for settings in ({}, {"kv_blocks": 2000}, {"max_batch_tokens": 3000}):
        outputs = []
        for prompt in (text, tokens, [PromptSegment(text=text)], [PromptSegment(tokens=tokens)]):
            engine = Engine(SimulatedModel(), 2, settings=SchedulingSettings(**settings))
            engine.add(Request(prompt=prompt, max_tokens=8))
            [result] = drained(engine).results
            outputs.append((result.tokens, result.usage))
        assert outputs == outputs[:1] * 4
    kinds = set()

    def model(prefixes):
        kinds.update(type(prefix) for prefix in prefixes)
        kinds.update(type(token) for prefix in prefixes for token in prefix)
        return [0] * len(prefixes)

    engine = Engine(model, 1)
    engine.add(Request(prompt="x" * 2 * MANY, max_tokens=2))
    drained(engine)
    assert kinds == {list, int}
