"""What binds, where it can be worked out by hand: a step lasts a second if nothing else is said."""

import pytest
from served import outcome_of

AT_ONCE = [(0, 1, 10)] * 4


def check(outcome, constraint, **shares):
    assert outcome.binding.constraint == constraint
    assert outcome.binding.shares == pytest.approx(shares, abs=1e-6)
    assert outcome.binding.share == outcome.binding.shares[constraint]


@pytest.mark.parametrize(
    ("rows", "settings", "constraint", "shares"),
    [
        # one after another: somebody waits for 30 of 40 seconds
        (AT_ONCE, {"batch": 1}, "slots", {"slots": 0.75, "compute": 0.25}),
        # nobody waits, and nobody is to come
        (AT_ONCE, {"batch": 4}, "compute", {"compute": 1.0}),
        # 8 + 5 - 1 tokens are 3 blocks of 4, so one runs at a time: 5 seconds each
        (
            [(0, 8, 5)] * 3,
            {"batch": 2, "kv_blocks": 3, "block_size": 4},
            "kv",
            {"kv": 10 / 15, "compute": 5 / 15},
        ),
        # each prompt takes two steps of 4 tokens
        (
            [(0, 8, 1)] * 3,
            {"batch": 4, "max_batch_tokens": 4},
            "tokens",
            {"tokens": 4 / 6, "compute": 2 / 6},
        ),
        # in the first step both slots are taken, then one is kept empty for 4
        (
            [(0, 1, 1), (0, 1, 5), (0, 1, 1)],
            {"batch": 2, "batching": "static"},
            "static",
            {"slots": 1 / 6, "static": 4 / 6, "compute": 1 / 6},
        ),
        # 2 busy seconds, 8 idle ones, 2 of the last request
        (
            [(0, 1, 2), (10, 1, 2)],
            {"batch": 4},
            "arrivals",
            {"arrivals": 10 / 12, "compute": 2 / 12},
        ),
        # busy while nobody waits is arrivals until the last has come
        ([(0, 1, 10), (6, 1, 4)], {"batch": 4}, "arrivals", {"arrivals": 0.6, "compute": 0.4}),
        # nobody can ever run
        (
            [(0, 40, 1), (3, 40, 1)],
            {"batch": 2, "kv_blocks": 4, "block_size": 4},
            "kv",
            {"kv": 1.0},
        ),
    ],
)
def test_what_is_waited_for_binds(rows, settings, constraint, shares):
    check(outcome_of(*rows, **settings), constraint, **shares)


@pytest.fixture
def profile(tmp_path):
    def write(**terms):
        path = tmp_path / "p.yaml"
        every = dict.fromkeys(["t0", "w", "f", "g", "d", "h", "e"], 0) | terms
        path.write_text("\n".join(f"{name}: {value}" for name, value in every.items()))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("t0", "binds"), [(500, "slots"), (115, "slots"), (105, "compute"), (0, "compute")]
)
def test_a_tenth_more_is_what_pays(profile, t0, binds):
    # 2 (t0 + f) / (t0 + 2 f) - 1 = t0 / (t0 + 2 f), of f = 500: 0.103 and 0.095
    binding = outcome_of(*AT_ONCE, batch=1, profile=profile(t0=t0, f=500)).binding
    assert binding.doubling == pytest.approx(t0 / (t0 + 1000), abs=1e-6)
    assert binding.constraint == binds


@pytest.mark.parametrize("term", ["f", "g", "d", "e"])
def test_a_step_twice_as_large_has_twice_of_all_that_takes_time(profile, term):
    outcome = outcome_of(*[(0, 50, 50)] * 4, batch=2, profile=profile(**{"f": 1, term: 1000}))
    assert outcome.binding.doubling == 0


def test_who_was_preempted_waits_even_while_nobody_is_to_come():
    # both grow to 2 blocks of 4; the third block of one is that of the other, which waits from
    # step 5 to 8, computes 9 tokens again and has its last in step 12
    outcome = outcome_of(*[(0, 4, 9)] * 2, batch=2, kv_blocks=4, block_size=4, prefix_cache=False)
    assert (outcome.preemptions, outcome.steps) == (1, 13)
    check(outcome, "compute", kv=4 / 13, compute=9 / 13)
