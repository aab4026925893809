"""The least number that is enough: exact where the assumption holds, frank where it does not."""

from hypothesis import given
from hypothesis import strategies as st

from batcher.planning.plan import NUM_PROBES, LeastSearch, doublings


def search(is_enough, *, high=1000, start=0):
    return searched(lambda number: (float(is_enough(number)), 0.0), high, start)


def searched(score, high, start=0):
    found = LeastSearch(1.0, doublings(1, high))
    for number in found.asks(start):
        found.scores[number] = score(number)
    return found


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 100))
def test_of_what_stays_enough_the_least_is_found_in_few_tries(least, high, start):
    rungs = doublings(1, high)
    found = search(lambda number: number >= least, high=high, start=start % len(rungs))
    assert found.least == (least if least <= high else None)
    assert found.contradictions == []
    assert len(found.scores) <= 2 * len(rungs) + NUM_PROBES + 8
    assert all(1 <= number <= high for number in found.scores)


@given(st.sets(st.integers(1, 200)), st.integers(1, 200))
def test_whatever_it_is_told_is_what_it_has_seen(enough, high):
    asked = []

    def is_enough(number):
        asked.append(number)
        return number in enough

    found = search(is_enough, high=high)
    assert len(asked) == len(set(asked)), "nothing is simulated twice"
    seen = sorted(set(asked) & enough)
    assert found.least == (seen[0] if seen else None)
    if seen:
        assert found.least == 1 or found.least - 1 in asked, "the one before it was tried"
        assert found.contradictions == sorted(n for n in asked if n > seen[0] and n not in enough)


def test_a_band_between_two_rungs_is_found():
    found = search(lambda number: 80 <= number <= 110, high=128)
    assert found.least is None or found.least >= 80  # which rung is nearest is not known here
    score = lambda number: (1.0 if 80 <= number <= 110 else 0.5, -abs(number - 90))  # noqa: E731
    found = searched(score, 1000)
    assert found.least == 80
    assert found.contradictions
