"""The sampler: what a row is given depends on it alone, and what goes wrong stays with it."""

import math
from unittest.mock import patch

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from narrow_model import top_logits
from sampling_rows import Letters, drawn_from, language_like, one_step, start

from batcher.decoding import filters
from batcher.decoding.filters import BadWords, SamplingParams, Vocabulary
from batcher.decoding.sampling import Masks, Sampler, SamplingRow, row_key
from batcher.errors import Failure, InvariantError
from batcher.result import LOWEST_LOGPROB, TokenLogprob, TopLogprob

NAN, INF = math.nan, math.inf
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
VOCAB_SIZE = 300
NUM_STEPS = 6
POOL = [
    GREEDY,
    SAMPLED,
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, num_logprobs=3, needs_cumulative=True),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.01, typical_p=0.9),
    SamplingParams(temperature=1.1, typical_p=0.6, num_logprobs=2, has_processed_logprobs=True),
    SamplingParams(temperature=1.0, mirostat=1, mirostat_tau=3.0, mirostat_eta=0.5),
    SamplingParams(temperature=1.0, mirostat=2, mirostat_tau=2.0, mirostat_eta=0.5, num_logprobs=1),
    SamplingParams(repetition_penalty=1.7, frequency_penalty=0.5, presence_penalty=0.5),
    SamplingParams(temperature=1.0, bad_words=("ab", "Ā"), logit_bias=((3, 4.0),), min_tokens=3),
    SamplingParams(temperature=0.7, cfg_scale=1.8, top_k=30, num_logprobs=1),
    SamplingParams(allowed_token_ids=(1, 2, 3, 4, 5), needs_cumulative=True),
]


class Script:
    """What a model and a constraint would say of request `number`, whatever else is running."""

    def __init__(self, number):
        rng = np.random.default_rng(number)
        self.params = POOL[number % len(POOL)]
        self.logits = language_like(rng, 2 * NUM_STEPS, VOCAB_SIZE)  # own, negative prompt's
        if number % 3 == 0:
            self.logits = self.logits.round(1)  # ties
        self.allowed = rng.random((NUM_STEPS, VOCAB_SIZE)) < 0.3
        self.is_constrained = number % 4 == 0
        self.is_guided = self.params.cfg_scale != 1
        self.key = row_key(number, str(number), 0)
        self.prompt = rng.integers(0, VOCAB_SIZE, 9).tolist()


def play(scripts, num_slots, free):
    """What each request is given, token by token; `free` is the order in which slots are taken."""
    sampler = Sampler(num_slots, VOCAB_SIZE, Letters(VOCAB_SIZE))
    told = [[] for _ in scripts]
    waiting, running = list(range(len(scripts)))[::-1], {}  # slot -> number
    free = list(free)
    while waiting or running:
        while waiting and len(free) >= 1 + scripts[waiting[-1]].is_guided:
            number = waiting.pop()
            script, slot = scripts[number], free.pop()
            partner = free.pop() if script.is_guided else None
            running[slot] = number, partner
            row = SamplingRow(script.params, script.key, script.prompt, (0, 7), partner)
            sampler.open(slot, row)
        given = {}
        for slot, (number, partner) in running.items():
            own, negative = np.split(scripts[number].logits, 2)
            given[slot], given[partner] = own[len(told[number])], negative[len(told[number])]
        constrained = sorted(
            s for s, (number, _) in running.items() if scripts[number].is_constrained
        )
        allowed = [scripts[running[s][0]].allowed[len(told[running[s][0]])] for s in constrained]
        masks = Masks(np.array(constrained), np.array(allowed)) if constrained else None
        sampled = sampler.sample(np.array([given[slot] for slot in sampler.slots.tolist()]), masks)
        assert not sampled.failed
        for slot, (number, partner) in list(running.items()):
            token = int(sampled.tokens[slot])
            told[number].append((token, sampled.logprobs.get(slot)))
            if partner is not None:
                assert sampled.tokens[partner] == token
            if len(told[number]) == NUM_STEPS:
                told[number].append(sampler._cumulative.item(slot))
                sampler.close(slot)
                del running[slot]
                free += [slot] if partner is None else [partner, slot]
    return told


ALONE = {number: play([Script(number)], 2, [1, 0])[0] for number in range(3 * len(POOL))}


@examples(40)
@given(
    st.lists(st.sampled_from(sorted(ALONE)), min_size=1, max_size=16, unique=True),
    st.sampled_from([2, 3, 8, 64]),
    st.randoms(use_true_random=False),
)
def test_tokens_and_logprobs_are_those_of_decoding_alone(numbers, num_slots, random):
    free = random.sample(range(num_slots), num_slots)
    told = play([Script(number) for number in numbers], num_slots, free)
    assert told == [ALONE[number] for number in numbers]


@pytest.mark.parametrize("params", POOL, ids=str)
@pytest.mark.parametrize("has_processed_logprobs", [False, True])
def test_rows_of_one_group_do_not_change_each_others_last_bit(params, *, has_processed_logprobs):
    params = structs.replace(
        params, num_logprobs=30, has_processed_logprobs=has_processed_logprobs, cfg_scale=1.0
    )
    logits = language_like(np.random.default_rng(0), 7, VOCAB_SIZE)
    logits *= np.array([[1, 3, 0.1, 30, 1, 2, 0.5]], np.float32).T

    def told(rows):
        sampler = Sampler(len(rows), VOCAB_SIZE, Letters(VOCAB_SIZE))
        for slot, row in enumerate(rows):
            sampler.open(slot, SamplingRow(params, row, [row, 5, 7], (0,)))
        steps = [sampler.sample(logits[rows]) for _ in range(2)]
        return [
            tuple((int(step.tokens[slot]), step.logprobs[slot]) for step in steps)
            for slot in range(len(rows))
        ]

    assert told([4, 3, 2, 1, 0, 6, 5]) == [told([row])[0] for row in [4, 3, 2, 1, 0, 6, 5]]


UNUSABLE = [
    ([0, NAN, 1], "a logit is not a number"),
    ([0, INF, 1], "a logit is infinite"),
    ([INF, NAN, 1], "a logit is not a number"),
    ([-INF, -INF, -INF], "every logit is -inf, so that no token has a probability"),
]


@pytest.mark.parametrize(("logits", "message"), UNUSABLE, ids=str)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams(min_tokens=1)], ids=str)
def test_unusable_logits_fail_their_row_alone(params, logits, message):
    sampler = Sampler(3, 3, Letters(3))
    for slot in range(3):
        sampler.open(slot, SamplingRow(params, slot, []))
    sampled = sampler.sample(np.array([[0, 0, 50], logits, [0, 50, 0]], np.float32))
    assert sampled.failed == {1: Failure("model-error", message)}
    assert sampled.tokens.tolist() == [2, 0, 1]


def test_a_row_that_the_model_failed_is_not_looked_at():
    sampler = Sampler(2, 2, Letters(2))
    for slot in range(2):
        sampler.open(slot, SamplingRow(GREEDY, slot, []))
    sampled = sampler.sample(np.array([[NAN, 0], [0, 1]], np.float32), skip=[0])
    assert sampled.failed == {}
    assert sampled.tokens.tolist() == [0, 1]


NOTHING_LEFT = Failure("constraint-error", "the settings of the request allow no token")


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("more", [{}, {"top_k": 1}, {"repetition_penalty": 2.0}])
def test_settings_that_leave_nothing_fail_the_row_alone(num_rows, more):
    sampler = Sampler(2, 3, Letters(3))
    for slot in range(num_rows):
        params = SamplingParams(temperature=0.5, allowed_token_ids=(1,), **more)
        sampler.open(slot, SamplingRow(params, 0, []))
    sampled = sampler.sample(np.array([[0, -INF, 0], [0, 0, 0]][:num_rows], np.float32))
    assert sampled.failed == {0: NOTHING_LEFT}
    assert sampled.tokens.tolist() == [0, num_rows - 1]


def test_a_beam_with_nothing_left_has_come_to_a_dead_end():
    sampler = Sampler(2, 3, Letters(3))
    for slot in range(2):
        params = SamplingParams(allowed_token_ids=(1,))
        sampler.open(slot, SamplingRow(params, 0, [], is_beam=True))
    sampled = sampler.sample(np.array([[0, -INF, 0], [0, 0, 0]], np.float32))
    assert not sampled.failed
    assert sampled.beam_scores[0].tolist() == [-INF] * 3
    assert np.isfinite(sampled.beam_scores[1]).tolist() == [False, True, False]


def masked(allowed, params, stops):
    logits = np.zeros(len(allowed), np.float32)
    masks = Masks(np.array([0]), np.array([allowed]))
    return np.isfinite(drawn_from(logits, params, masks, stop_token_ids=stops)).tolist()


def test_min_tokens_holds_off_every_stop_until_there_are_so_many():
    params = SamplingParams(min_tokens=2)
    logits = np.zeros(4, np.float32)
    for generated, expected in [([], [2, 3]), ([2], [2, 3]), ([2, 3], [0, 1, 2, 3])]:
        left = drawn_from(logits, params, generated=generated, stop_token_ids=(0, 1, 10**6))
        assert np.isfinite(left).nonzero()[0].tolist() == expected


def test_min_tokens_gives_way_where_a_constraint_leaves_only_stops():
    params = SamplingParams(min_tokens=2)
    assert masked([True, False, True], params, (0,)) == [False, False, True]
    assert masked([True, True, False], params, (0, 1)) == [True, True, False]
    only_stops = structs.replace(params, allowed_token_ids=(0,))
    with pytest.raises(ValueError, match="allow no token"):  # there is no constraint here
        drawn_from(np.zeros(3, np.float32), only_stops, stop_token_ids=(0,))


def test_bias_cannot_bring_back_what_is_ruled_out():
    params = SamplingParams(
        allowed_token_ids=(0, 1), logit_bias=((2, 100.0),), repetition_penalty=0.01
    )
    assert one_step([0, 1, 2], params, prompt=[2]).tokens[0] == 1


def test_penalties_look_at_prompt_and_output_as_they_should():
    logits = np.array([2.0, 2.0, -2.0, 2.0])

    def after(**fields):
        """What the penalties have taken from each logit, but for what they share."""
        row = {"prompt": [0, 0, 2], "generated": [1, 2, 2]}
        own = drawn_from(logits.astype(np.float32), SamplingParams(temperature=1, **fields), **row)
        return own - own[3] - (logits - logits[3])

    np.testing.assert_allclose(after(repetition_penalty=2.0), [-1, -1, -2, 0], atol=1e-6)
    np.testing.assert_allclose(after(frequency_penalty=0.5), [0, -0.5, -1, 0], atol=1e-6)
    np.testing.assert_allclose(after(presence_penalty=0.5), [0, -0.5, -0.5, 0], atol=1e-6)


def test_no_setting_makes_a_logit_infinite():
    low = SamplingParams(temperature=1.0, repetition_penalty=1e-5)
    assert one_step([3e38, 0], low, prompt=[0]).tokens[0] == 0
    assert guided([0, 9], [9, 0], temperature=1.0, cfg_scale=3e38).tokens[0] == 1


def test_a_beam_is_told_its_scores_and_moves_on_by_append():
    params = SamplingParams(repetition_penalty=2.0, allowed_token_ids=(0, 1))
    sampler = start(params, 3, is_beam=True)
    logits = np.log(np.array([[0.5, 0.25, 0.25]], np.float32)) + 3
    for token in (0, 1):
        scores = sampler.sample(logits).beam_scores[0]
        seen = 2.0 if token else 1.0
        np.testing.assert_allclose(scores, [seen * math.log(0.5), math.log(0.25), -INF], rtol=1e-6)
        assert scores.dtype == np.float32
        sampler.extend({0: [token]})


def test_a_fork_goes_on_as_its_source_would_and_they_part():
    params = SamplingParams(temperature=1.0, presence_penalty=9.0, bad_words=("ĀĀ",))
    sampler = Sampler(3, 50, Letters(50))
    logits = language_like(np.random.default_rng(0), 3, 50)
    logits[:] = logits[0]
    sampler.open(0, SamplingRow(params, 5, [1, 2]))
    sampler.open(2, SamplingRow(SAMPLED, 6, []))
    sampler.sample(logits[:2])
    sampler.fork(0, 2)
    sampler.fork(0, 1)
    assert sampler.slots.tolist() == [0, 1, 2]
    tokens = sampler.sample(logits).tokens
    assert tokens[0] == tokens[1] == tokens[2]
    favourite = int(logits[0].argmax())
    sampler.extend({0: [favourite]})
    sampler.extend({1: [3]})
    sampler.extend({2: [3]})
    assert sampler._seen[0][favourite]
    assert sampler._positions.tolist() == [3, 3, 3]
    tokens = sampler.sample(logits).tokens
    assert tokens[1] == tokens[2]


def test_slots_are_those_of_open_rows_and_their_partners():
    sampler = Sampler(6, 3, Letters(3))
    sampler.open(4, SamplingRow(SamplingParams(cfg_scale=2.0), 0, [], partner=1))
    sampler.open(3, SamplingRow(GREEDY, 0, []))
    assert sampler.slots.tolist() == [1, 3, 4]
    sampler.close(1)  # a partner leaves with its first
    sampler.extend({1: [0]})
    assert sampler.slots.tolist() == [1, 3, 4]
    sampler.close(4)
    assert sampler.slots.tolist() == [3]
    sampler.close(3)
    assert len(sampler.slots) == len(sampler._groups) == 0


def guided(own, negative, **fields):
    sampler = start(SamplingParams(**{"cfg_scale": 2.0, **fields}), len(own))
    return sampler.sample(np.array([own, negative], np.float32))


def test_guidance_leads_away_from_the_negative_prompt():
    sampled = guided([2, 1.9, 0], [5, 0, 0])
    assert sampled.tokens.tolist() == [1, 1]


def test_a_token_that_either_prompt_rules_out_stays_out():
    assert guided([0, 0, -INF], [-INF, 0, 0], temperature=1.0).tokens.tolist() == [1, 1]
    assert guided([0, -INF], [-INF, 0]).failed == {0: NOTHING_LEFT}


@pytest.mark.parametrize(("logits", "message"), UNUSABLE, ids=str)
def test_a_failed_partner_fails_its_sample(logits, message):
    sampled = guided([0, 0, 0], logits)
    assert sampled.failed == {0: Failure("model-error", f"negative prompt: {message}")}
    sampled = guided(logits, [0, 0, 0])
    assert sampled.failed == {0: Failure("model-error", message)}
    sampler = start(SamplingParams(cfg_scale=2.0), 3)
    sampled = sampler.sample(np.array([[0, 0, 0], logits], np.float32), skip={1})
    assert list(sampled.failed) == [0]


def logs(*probabilities):
    return [math.log(probability) for probability in probabilities]


def rounded(told):
    return told.token, round(told.logprob, 5), [(t.token, round(t.logprob, 5)) for t in told.top]


def test_raw_logprobs_are_the_models_whatever_is_done_to_its_logits():
    fields = {"allowed_token_ids": (3,), "num_logprobs": 3, "needs_cumulative": True}
    sampler = start(SamplingParams(**fields), 4)
    logits = np.array([logs(0.25, 0.5, 0.15, 0.1)], np.float32) + 3
    sampled = sampler.sample(logits)
    low, half, fourth = (round(x, 5) for x in logs(0.1, 0.5, 0.25))
    third = round(math.log(0.15), 5)
    assert rounded(sampled.logprobs[0]) == (3, low, [(1, half), (0, fourth), (2, third)])
    sampler.sample(logits)
    assert sampler._cumulative.item(0) == pytest.approx(2 * math.log(0.1))


def test_processed_logprobs_are_of_what_is_drawn_from():
    fields = {"num_logprobs": 3, "has_processed_logprobs": True, "needs_cumulative": True}
    params = SamplingParams(temperature=0.5, top_k=2, logit_bias=((0, -99.0),), **fields)
    sampler = start(params, 4)
    sampled = sampler.sample(np.array([logs(0.25, 0.5, 0.15, 0.1)], np.float32))
    weights = 0.25, 0.0225
    expected = [(1, math.log(weights[0] / sum(weights))), (2, math.log(weights[1] / sum(weights)))]
    assert rounded(sampled.logprobs[0])[2] == [(i, round(value, 5)) for i, value in expected]
    chosen = sampled.logprobs[0].token
    assert sampled.logprobs[0].logprob == pytest.approx(dict(expected)[chosen], abs=1e-5)
    assert sampler._cumulative.item(0) == pytest.approx(math.log([0, 0.5, 0.15][chosen]))


def test_equal_logprobs_are_listed_by_id_and_no_more_than_there_are():
    params = SamplingParams(num_logprobs=2)
    told = one_step([0, 1, 1, 1], params).logprobs[0]
    assert [top.token for top in told.top] == [1, 2]
    told = one_step([0, -INF, 0], structs.replace(params, num_logprobs=9)).logprobs[0]
    assert [top.token for top in told.top] == [0, 2]
    assert one_step([0, 1], structs.replace(params, num_logprobs=0)).logprobs[0].top == []
    told = one_step([0] + [1] * 200, structs.replace(params, num_logprobs=50)).logprobs[0]
    assert [top.token for top in told.top] == list(range(1, 51))


def test_no_logprob_is_below_the_lowest():
    params = SamplingParams(num_logprobs=2, needs_cumulative=True, allowed_token_ids=(0,))
    told = one_step([-1e30, 0], params).logprobs[0]
    assert told == TokenLogprob(
        0, LOWEST_LOGPROB, [TopLogprob(1, 0.0), TopLogprob(0, LOWEST_LOGPROB)]
    )


def test_logits_are_left_as_they_are():
    for params in POOL:
        logits = language_like(np.random.default_rng(0), 2, VOCAB_SIZE)
        sampler = start(params, VOCAB_SIZE, prompt=[1, 2], stop_token_ids=(3,))
        given = logits[: len(sampler.slots)]
        before = given.copy()
        masks = Masks(np.array([0]), np.arange(VOCAB_SIZE)[None] % 2 == 0)
        sampler.sample(given, masks)
        np.testing.assert_array_equal(given, before)


def test_what_the_engine_must_not_do_is_a_bug():
    sampler = Sampler(2, 3, Letters(3))
    with pytest.raises(InvariantError):
        sampler.open(0, SamplingRow(SamplingParams(cfg_scale=2.0), 0, []))
    with pytest.raises(InvariantError):
        sampler.open(0, SamplingRow(GREEDY, 0, [], partner=1))
    with pytest.raises(InvariantError):
        sampler.fork(0, 1)
    with pytest.raises(InvariantError):
        sampler.sample(np.zeros((1, 3), np.float32))


PIECES = (b"", b"a", b"b", b"c", b"ab", b"ba", b"abc", b"bca", b"\xc3", b"\xa9", b"x\xc3", b"cab")


class Pieces:
    token_bytes = PIECES


TEXTS = st.lists(st.sampled_from([*"abc", "é", "ab", "ca"]), min_size=1, max_size=4).map("".join)


def opened(bad_words, vocab_size: int = len(PIECES), num_slots=1):
    sampler = Sampler(num_slots, vocab_size, Pieces())
    params = SamplingParams(bad_words=tuple(bad_words))
    for slot in range(num_slots):
        sampler.open(slot, SamplingRow(params, 0, []))
    return sampler


@given(st.lists(TEXTS, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_no_text_ever_has_a_bad_word_and_nothing_else_is_banned(words, random):
    sampler = opened(words)
    text = b""
    for _ in range(12):
        order = random.sample(range(len(PIECES)), len(PIECES))  # the model likes the first best
        logits = np.empty((1, len(PIECES)), np.float32)
        logits[0, order] = -np.arange(len(PIECES))
        token = int(sampler.sample(logits).tokens[0])
        allowed = [t for t in order if not any(w.encode() in text + PIECES[t] for w in words)]
        assert token == allowed[0]
        text += PIECES[token]


def test_a_word_that_was_forced_does_not_end_the_watch():
    sampler = opened(["ab", "cc"])
    for token in (1, 2, 3):  # a, b: a grammar may write what is banned; then c
        sampler.extend({0: [token]})
    likes_c = np.array([[0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 8]], np.float32)
    assert sampler.sample(likes_c).tokens.tolist() == [0]  # neither c nor cab


def test_ids_beyond_the_tokenizer_show_as_a_replacement_character():
    sampler = opened(["\N{REPLACEMENT CHARACTER}"], vocab_size=len(PIECES) + 2)
    logits = np.zeros((1, len(PIECES) + 2), np.float32)
    logits[0, -2:], logits[0, 5] = 9, 1
    assert sampler.sample(logits).tokens.tolist() == [5]


def test_every_row_has_a_state_of_its_own():
    sampler = opened(["ab"], num_slots=3)
    for slot, token in enumerate((1, 2, 4)):
        sampler.extend({slot: [token]})
    likes_b = np.zeros((3, len(PIECES)), np.float32)
    likes_b[:, 2], likes_b[:, 3] = 9, 1
    assert sampler.sample(likes_b).tokens.tolist() == [3, 2, 2]
    sampler.extend({1: [1]})
    sampler.fork(1, 2)
    assert sampler.sample(likes_b).tokens.tolist() == [2, 3, 3]


@pytest.mark.parametrize("words", [["aa"], ["a", "aa"], ["é"], ["abab", "bb", "cé"]])
def test_the_automaton_is_that_of_a_search(words):
    with patch.object(filters, "MAX_LINES", 2):
        automaton = BadWords(words, Vocabulary(PIECES, len(PIECES)))
    rng = np.random.default_rng(0)
    for _ in range(50):
        state, text = 0, b""
        for token in rng.integers(0, len(PIECES), 10).tolist():
            ends = range(len(text) + 1, len(text) + len(PIECES[token]) + 1)
            text += PIECES[token]
            found = any(text[:end].endswith(word.encode()) for end in ends for word in words)
            assert automaton.completes([state, 0])[0, token] == found
            assert automaton._line.cache_info().currsize <= 2
            state = automaton.next_state(state, token)


NARROW = [
    structs.replace(GREEDY, num_logprobs=2, needs_cumulative=True),
    SamplingParams(temperature=0.8, top_k=4, top_p=0.9, typical_p=0.95),
    SamplingParams(temperature=1.7, top_k=6, num_logprobs=3),
    SamplingParams(temperature=1.7, top_k=6, num_logprobs=3, has_processed_logprobs=True),
    SamplingParams(temperature=0.5, min_p=0.3),
    SamplingParams(temperature=2.0, min_p=0.01, num_logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.6, num_logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.3, min_p=0.2),
    SamplingParams(temperature=0.6, top_p=0.8, num_logprobs=3, has_processed_logprobs=True),
    SamplingParams(temperature=1.0, top_k=3, bad_words=("a", "b")),
    SamplingParams(temperature=1.0, top_k=3, repetition_penalty=1.3, presence_penalty=-1.0),
    SamplingParams(temperature=0.9, min_p=0.1, logit_bias=((3, 4.0), (4, -9.0)), min_tokens=2),
    SamplingParams(temperature=1.0, top_p=0.5, allowed_token_ids=(1, 2, 58), num_logprobs=0),
    SamplingParams(min_tokens=2, frequency_penalty=0.7, needs_cumulative=True),
    SamplingParams(
        temperature=1.5,
        top_k=5,
        repetition_penalty=0.6,
        num_logprobs=2,
        has_processed_logprobs=True,
    ),
]


@given(seed=st.integers(0, 2**32 - 1), num_top=st.integers(7, 40), num_digits=st.integers(0, 3))
@examples(50)
def test_the_largest_logits_choose_what_all_logits_choose(seed, num_top, num_digits):
    rng = np.random.default_rng(seed)
    logits = language_like(rng, len(NARROW) + 1, 60).round(num_digits)  # many ties
    logits[:, : rng.choice([0, 0, 30, 55])] = -INF
    logits[0, 59] = rng.choice([0, NAN, INF])
    logits[14] = np.maximum(logits[14] * np.float32(1e37), -3e38)  # penalties cut what is too much
    slots = np.flatnonzero(rng.random(len(logits)) < 0.4)
    masks = Masks(slots, rng.random((len(slots), 60)) < rng.choice([0.02, 0.1, 0.5, 1.0]))
    whole, narrow = (Sampler(len(logits), 60, Letters(60)) for _ in range(2))
    for slot, params in enumerate([*NARROW, SAMPLED]):
        row = SamplingRow(params, slot, rng.integers(0, 60, 5).tolist(), (0, 59, 60))
        is_narrow = params.is_narrow(num_top, is_constrained=slot in slots)
        whole.open(slot, row)
        narrow.open(slot, row._replace(is_narrow=is_narrow))
        has_raw = params.num_logprobs and not params.has_processed_logprobs
        assert is_narrow == (slot < len(NARROW) and not (slot in slots and has_raw))
    for _ in range(3):
        expected = whole.sample(logits, masks, [1])
        top = top_logits(logits[narrow.narrow_slots], num_top, narrow.edits(masks))
        found = narrow.sample(logits[narrow.slots], masks, [1], top=top)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.failed == expected.failed
        assert found.logprobs == expected.logprobs
        assert narrow._cumulative.tolist() == whole._cumulative.tolist()


def test_a_partner_has_all_logits_whichever_row_had_its_slot():
    sampler = Sampler(2, 60, Letters(60))
    sampler.open(1, SamplingRow(GREEDY, 1, [], is_narrow=True))
    assert sampler.narrow_slots.tolist() == [1]
    sampler.close(1)
    sampler.open(0, SamplingRow(SamplingParams(cfg_scale=2.0), 0, [], partner=1))
    assert sampler.slots.tolist() == [0, 1]


@pytest.mark.parametrize(
    "params",
    [
        SAMPLED,
        SamplingParams(temperature=1.1, top_p=0.9),
        SamplingParams(temperature=1.0, top_p=0.9, typical_p=0.9),
        SamplingParams(temperature=1.0, top_k=10),
        SamplingParams(bad_words=("a",), num_logprobs=1),
        SamplingParams(repetition_penalty=1.1, num_logprobs=1),
        SamplingParams(logit_bias=((3, 4.0),), num_logprobs=1),
        SamplingParams(min_tokens=2, num_logprobs=1),
        SamplingParams(allowed_token_ids=(1, 2), num_logprobs=1),
        SamplingParams(temperature=1.0, top_k=3, cfg_scale=1.5),
        SamplingParams(temperature=1.0, top_k=3, mirostat=2),
        SamplingParams(num_logprobs=11),
        SamplingParams(num_logprobs=1, has_processed_logprobs=True),
        SamplingParams(temperature=1.0, min_p=0.1, typical_p=0.9),
    ],
)
def test_rows_that_may_need_other_tokens_have_all_logits(params):
    assert not params.is_narrow(10)
