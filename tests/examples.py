"""How much of what could be tried is: a tenth of the examples of random tests, and some cases.

`pytest -m "heavy or hypothesis" --hypothesis-profile thorough` tries all; continuous integration
runs it.
"""

import pytest
from hypothesis import settings

USUAL = 100  # where a test does not say how many
PART = 10


def examples(number):
    is_thorough = settings.default is settings.get_profile("thorough")
    return settings(max_examples=number if is_thorough else -(-number // PART))


def mostly_heavy(cases, *quick):
    every = list(cases)
    assert all(case in every for case in quick), "a quick case is none of them"
    return [
        case if case in quick else pytest.param(case, marks=pytest.mark.heavy) for case in every
    ]


def rest_heavy(num_quick, cases):
    every = list(cases)
    rest = [pytest.param(*case, marks=pytest.mark.heavy) for case in every[num_quick:]]
    return [*every[:num_quick], *rest]
