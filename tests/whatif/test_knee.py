"""The knee of a row of batch sizes."""

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import deployment_of

from batcher.planning.compare import Size, knee_of, knees_of


def sizes_of(curve):
    """Sizes that something else than arrivals binds, of (batch, what it serves)."""
    return [Size(batch=batch, served=served) for batch, served in curve]


@pytest.mark.parametrize(
    ("curve", "knee"),
    [
        ([(1, 10), (2, 20), (4, 40), (8, 41)], 4),
        ([(1, 10), (2, 20), (4, 40)], None),  # who knows what comes after 4
        ([(1, 10), (2, 10.5), (4, 20)], None),  # 2 adds little, but 4 doubles
        ([(4, 100), (16, 120)], 4),  # 9.5 % a doubling
        ([(8, 0), (16, 0)], None),
        ([(8, 10)], None),
    ],
)
def test_the_knee_is_the_smallest_that_no_larger_one_beats_by_a_tenth_a_doubling(curve, knee):
    place = knee_of(sizes_of(curve), 0.1)
    assert (None if place is None else curve[place][0]) == knee


CURVES = st.dictionaries(st.integers(1, 64), st.floats(0.1, 100), min_size=1, max_size=8).map(
    lambda sizes: sorted(sizes.items())
)


@given(CURVES, st.floats(0.01, 1))
def test_it_is_what_its_definition_says(curve, growth):
    found = knee_of(sizes_of(curve), growth)
    gains = [
        max(
            (
                (later / served) ** (1 / log2(larger / batch)) - 1
                for larger, later in curve[at + 1 :]
            ),
            default=None,
        )
        for at, (batch, served) in enumerate(curve)
    ]
    for place, gain in enumerate(gains[:-1]):
        if abs(gain - growth) < 1e-9:
            return  # rounding decides
        if gain < growth:
            assert found == place
            return
    assert found is None


def test_each_family_that_differs_in_batch_only_has_its_own():
    cells = [
        (deployment_of(4, policy="fcfs"), Size(batch=4, served=10)),
        (deployment_of(4, policy="sjf"), Size(batch=4, served=10)),
        (deployment_of(16, policy="sjf"), Size(batch=16, served=20)),
        (deployment_of(8, policy="fcfs"), Size(batch=8, served=10)),
        (deployment_of(8, policy="sjf"), Size(batch=8, served=20)),
        (deployment_of(2, policy="fcfs"), None),
    ]
    assert knees_of(cells, 0.1) == {0, 4}


@pytest.mark.parametrize(
    ("rows", "knee"),
    [
        # (batch, served, p99 of TTFT, serves all that arrives)
        ([(8, 90, 9.0, False), (16, 95, 1.0, True), (32, 95, 0.1, True), (64, 95, 0.1, True)], 32),
        ([(8, 95, 0.1, True), (16, 95, 0.1, True)], 8),
        ([(8, 95, 0.2, True), (16, 95, 0.1, True)], None),  # who knows what comes after 16
        ([(8, 95, 0.1, True), (16, 95, 0.2, True), (32, 95, 0.3, True)], 8),
        ([(8, 95, 9.0, False), (16, 95, 1.0, False)], 8),  # nothing tells but what is served
        ([(8, 95, 9.0, True), (16, 95, 1.0, False), (32, 95, 1.0, False)], 16),
        ([(8, 95, None, True), (16, 95, None, True)], 8),
    ],
)
def test_where_arrivals_bind_a_shorter_tail_of_ttft_is_worth_more_slots(rows, knee):
    sizes = [Size(batch=b, served=y, ttft=ttft, is_fed=fed) for b, y, ttft, fed in rows]
    place = knee_of(sizes, 0.1)
    assert (None if place is None else sizes[place].batch) == knee
