"""How many drafts rows are given: by hand, against all ways, and against the best fixed number."""

from itertools import product
from math import ceil
from random import Random
from statistics import median

import pytest
from examples import examples, rest_heavy
from hypothesis import given
from hypothesis import strategies as st

from batcher.speculation.lengths import AutoLengths, LengthChange, StepCosts
from batcher.speculation.settings import expected_tokens

MOST = 8
SECONDS = {
    "all alike": lambda _rows, _tokens: 1.0,
    "by tokens": lambda _rows, tokens: 0.1 + tokens,
    "in tiles": lambda _rows, tokens: float(ceil(tokens / 16)),
    "some free": lambda _rows, tokens: 1 + max(0.0, tokens - 32) / 40,
    "dearer soon": lambda _rows, tokens: 0.8 + 0.2 * tokens,
    "a bit dearer": lambda rows, tokens: 1 + 0.12 * (tokens - rows),
}


class Play:
    """Rows whose drafts are accepted as often as `acceptances` say; time and tokens add up."""

    def __init__(self, kind, acceptances, draft_seconds=0.0):
        self.step_seconds, self.acceptances = SECONDS[kind], acceptances
        self.draft_seconds = lambda rows: draft_seconds if rows else 0.0
        self.lengths = AutoLengths(MOST, self.step_seconds, self.draft_seconds)
        for slot in range(len(acceptances)):
            self.lengths.open(slot)
        self.random = Random(5)
        self.seconds, self.num_tokens = 0.0, 0
        self.wanted = {}

    def step(self):
        num_rows = len(self.acceptances)
        self.wanted = self.lengths.wanted(range(num_rows))
        self.seconds += self.seconds_of([self.wanted.get(slot, 0) for slot in range(num_rows)])
        for slot, acceptance in enumerate(self.acceptances):
            number = self.wanted.get(slot, 0)
            accepted = 0
            while accepted < number and self.random.random() < acceptance:
                accepted += 1
            self.num_tokens += accepted + 1
            self.lengths.learn([(slot, number, accepted)])
        return self.lengths.take_changes()

    def seconds_of(self, numbers):
        drafting = [sum(number >= place for number in numbers) for place in range(1, MOST + 1)]
        seconds = self.step_seconds(len(numbers), len(numbers) + sum(numbers))
        return seconds + sum(map(self.draft_seconds, drafting))

    def rate_of(self, numbers):
        given = zip(self.acceptances, numbers, strict=True)
        return sum(expected_tokens(a, k) for a, k in given) / self.seconds_of(numbers)

    def best_fixed(self):
        num_rows = len(self.acceptances)
        return max(self.rate_of([number] * num_rows) for number in range(MOST + 1))


CASES = [
    *product(SECONDS, ([0.9], [0.6], [0.2], [0.0]), (0.0, 0.05)),
    *product(SECONDS, ([0.8] * 4, [0.0, 0.3, 0.6, 0.9] * 5), (0.0,)),
]


FEW_FIRST = sorted(CASES, key=lambda case: CASES.index(case) % 4)


@pytest.mark.parametrize(("kind", "acceptances", "draft_seconds"), rest_heavy(15, FEW_FIRST))
def test_it_is_as_good_as_the_best_fixed_number(kind, acceptances, draft_seconds):
    play = Play(kind, acceptances, draft_seconds)
    for _ in range(400):
        play.step()
    assert play.num_tokens / play.seconds > 0.93 * play.best_fixed()


@pytest.mark.parametrize("kind", ["by tokens", "dearer soon", "in tiles"])
@pytest.mark.parametrize("num_rows", [1, 16])
def test_drafts_that_gain_nothing_cost_next_to_nothing(kind, num_rows):
    play = Play(kind, [0.0] * num_rows)
    for _ in range(200):
        play.step()
    play.seconds, play.num_tokens, num_drafts = 0.0, 0, 0
    for _ in range(1000):
        assert not any(change.reason == "gain" for change in play.step())
        num_drafts += sum(play.wanted.values())
    assert play.num_tokens / play.seconds > 0.97 * play.rate_of([0] * num_rows)
    assert num_drafts > 10, "it looks whether anything has changed"


def test_it_is_switched_off_and_on_again_and_says_why():
    play = Play("dearer soon", [0.9])
    for _ in range(50):
        play.step()
    assert play.wanted[0] > 2
    play.acceptances = [0.0]
    off = [change for _ in range(200) for change in play.step()]
    assert off[-1] == LengthChange(0, 0, "cost")
    assert all(change.reason == "cost" for change in off[-3:])
    play.acceptances = [0.9]
    on = [change for _ in range(400) for change in play.step()]
    assert on[0].reason == "gain"
    assert on[-1].tokens > 2
    assert play.wanted[0] > 2


@given(
    st.lists(st.floats(0.01, 0.98), min_size=1, max_size=3, unique=True),
    st.lists(st.floats(0, 1), min_size=12, max_size=12),
)
@examples(100)
def test_the_drafts_that_are_taken_are_the_best(acceptances, steps):
    """Against all ways to give three rows up to three drafts each, whatever tokens cost."""
    times = [1.0]
    for more in steps:
        times.append(times[-1] + more)

    def step_seconds(num_rows, num_tokens):
        return times[num_tokens - num_rows]

    lengths = AutoLengths(3, step_seconds)
    for slot, acceptance in enumerate(acceptances):
        lengths.open(slot)
        assert lengths._rows[slot].num_drafts == 0, "nothing is known of what steps cost"
        lengths._rows[slot].accepted = acceptance * 1e9
        lengths._rows[slot].tried = 1e9
    lengths._credit = -1e9  # no probes
    wanted = lengths.wanted(range(len(acceptances)))

    def rate(numbers):
        given = zip(acceptances, numbers, strict=True)
        return sum(expected_tokens(a, k) for a, k in given) / times[sum(numbers)]

    best = max(map(rate, product(range(4), repeat=len(acceptances))))
    assert rate(tuple(wanted.get(slot, 0) for slot in range(len(acceptances)))) > 0.97 * best


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.booleans()), max_size=60))
@examples(60)
def test_rows_come_and_go(moves):
    """Never more than there may be, never for a row that is not asked for; changes add up."""
    costs = StepCosts()
    lengths, rows = AutoLengths(4, costs.estimate), dict[int, int]()
    for slot, accepted, is_move in moves:
        if is_move and slot in rows:
            lengths.close(slot)
            del rows[slot]
        elif is_move:
            lengths.open(slot)
            rows[slot] = lengths._rows[slot].num_drafts
        wanted = lengths.wanted(rows)
        assert wanted.keys() <= rows.keys()
        assert all(1 <= number <= 4 for number in wanted.values())
        for drafted, number in wanted.items():
            lengths.learn([(drafted, number, min(accepted, number))])
        if rows:
            costs.learn(len(rows) + sum(wanted.values()), 1.0 + accepted)
        for change in lengths.take_changes():
            if change.slot in rows:
                assert change.reason == ("gain" if change.tokens > rows[change.slot] else "cost")
                rows[change.slot] = change.tokens
        assert rows == {row: lengths._rows[row].num_drafts for row in rows}


def test_what_is_not_known_is_not_spent():
    lengths = AutoLengths(4, StepCosts().estimate)
    lengths.open(0)
    assert lengths.wanted([0]) in ({}, {0: 1})
    assert lengths.wanted([]) == {}


def costs_of(steps):
    costs = StepCosts()
    for num_tokens, seconds in steps.items():
        costs.learn(num_tokens, seconds)
    return costs


@pytest.mark.parametrize(
    ("steps", "num_tokens", "seconds"),
    [
        ({}, 5, 0.0),
        ({4: 2.0}, 2, 1.0),  # in proportion
        ({4: 2.0}, 6, 3.0),
        ({4: 2.0, 8: 4.0}, 4, 2.0),
        ({4: 2.0, 8: 4.0}, 8, 4.0),
        ({4: 2.0, 8: 4.0}, 6, 2.5),  # half the way, a quarter of the time
        ({4: 2.0, 8: 4.0}, 2, 1.0),
        ({4: 2.0, 8: 3.0}, 16, 5.0),  # as far again twice
        ({4: 2.0, 8: 3.0}, 32, 10.0),  # and in proportion beyond
        ({4: 2.0, 8: 1.0}, 9, 1.0),  # less time for more is noise
    ],
)
def test_costs_by_hand(steps, num_tokens, seconds):
    assert costs_of(steps).estimate(1, num_tokens) == pytest.approx(seconds)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.001, 9)), min_size=1))
@examples(100)
def test_what_was_seen_is_the_median_of_its_latest_steps(steps):
    costs = StepCosts()
    for num_tokens, seconds in steps:
        costs.learn(num_tokens, seconds)
    for number in {num_tokens for num_tokens, _ in steps}:
        own = [seconds for num_tokens, seconds in steps if num_tokens == number][-5:]
        assert costs.estimate(1, number) == pytest.approx(median(own))
