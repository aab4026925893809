"""What arrives and is not served, where it can be worked out by hand: a step lasts a second."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import outcome_of

from batcher.metrics.arrays import ServedTimes
from batcher.planning.backlog import Backlog, backlog_of

ROWS = [(place, 1, 2) for place in range(400)]  # one a second, of two steps each


def test_where_more_arrives_than_is_served_the_queue_grows():
    found = outcome_of(*ROWS, batch=1).backlog
    per_second = pytest.approx(1.0, abs=0.01), pytest.approx(0.5, abs=0.01)
    assert found == Backlog(*per_second, is_short=False)


@pytest.mark.parametrize("batch", [2, 3, 400])
def test_where_all_that_arrives_is_served_there_is_none(batch):
    assert outcome_of(*ROWS, batch=batch).backlog is None


def test_what_arrives_at_once_has_no_rate():
    assert outcome_of(*[(0, 1, 10)] * 400, batch=1).backlog is None


def test_what_chance_makes_of_few_requests_is_none():
    assert outcome_of(*[(place, 1, 3) for place in range(20)], batch=2).backlog is None


def test_a_run_as_short_as_its_requests_tells_nothing_of_the_queue():
    found = outcome_of(*[(place / 10, 1, 30) for place in range(400)], batch=400).backlog
    assert found is not None
    assert found.is_short
    assert outcome_of(*[(place / 10, 1, 50) for place in range(400)], batch=400).backlog is None


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 50), st.floats(0, 50)), min_size=0, max_size=60
    )
)
def test_less_is_served_than_arrives_wherever_there_is_one(rows):
    arrival, wait, service = np.array(rows, float).reshape(-1, 3).T
    admitted = arrival + wait
    end = admitted + service
    found = backlog_of(ServedTimes(arrival, admitted, end, end, np.ones(len(rows), np.int64)))
    assert found is None or found.served_per_s < found.offered_per_s
