"""Counts the outputs that drafts change: `python tests/draft_campaign.py --outputs 100000`.

Requests and schedules are those of test_speculation.py, with all that a request can ask for; each
case is decoded with one kind of drafts, and compared with its requests alone.  There may be no
difference.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from random import Random

import conftest  # noqa: F401 - which has the profiles that random tests name
from control_requests import control_requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from reference import english_requests
from test_scheduling_invariance import Case, Outputs, attentive, cases
from test_speculation import drafted, oracle, outputs_of

from batcher import SimulatedModel
from batcher.speculation.proposal import Drafter
from batcher.speculation.settings import SpeculationSettings

CASES = cases(st.one_of(english_requests(), control_requests()))
NAMED = ("ngram", "ngram:2", "simulated:0.5", "simulated:0.9", "simulated")
TREES = (None, None, "2x3", "3x4", "4x1")
NUM_TOKENS = (1, 4, 9)
CHANCES = (0.0, 0.1, 0.5, 1.0)
CASES_AT_ONCE = 50

Kind = Callable[[Case, Outputs], SpeculationSettings | Drafter]


def kind_of(draw: Random) -> tuple[str, Kind]:
    """Return the name of some kind of drafts, and what makes them for a case."""
    name = draw.choice([*NAMED, "oracle"])
    if name == "oracle":
        chance = draw.choice(CHANCES)
        return name, lambda case, expected: oracle(case, expected, chance, draw.randrange(10))
    tree = draw.choice(TREES)
    shape = {"draft_tree": tree} if tree else {"draft_tokens": draw.choice(NUM_TOKENS)}
    told = f"{name}, {'trees' if tree else 'lines'}"
    return told, lambda _case, _expected: SpeculationSettings(draft=name, **shape)


def num_different(case: Case, expected: Outputs, kind: Kind, draw: Random) -> int:
    """Return how many outputs of a case drafts change."""
    model, is_streaming = draw.choice([SimulatedModel, attentive]), draw.random() < 1 / 2
    try:
        found = drafted(case, model, kind(case, expected), is_streaming=is_streaming)
    except AssertionError as error:  # what was streamed is not what came
        print(f"{case}: {error}")
        return len(expected)
    different = [name for name in expected.keys() | found if expected.get(name) != found.get(name)]
    if different:
        print(f"{case}: {different}")
    return len(different)


def count_some(number: int, outputs: Counter[str], different: Counter[str]) -> None:
    """Decode CASES_AT_ONCE cases, those of a number; count their outputs by the kind of drafts."""
    draw = Random(number)

    @seed(number)
    @settings(
        max_examples=CASES_AT_ONCE,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(CASES)
    def count(case: Case) -> None:
        name, kind = kind_of(draw)
        expected = outputs_of(case)
        outputs[name] += len(expected)
        different[name] += num_different(case, expected, kind, draw)

    count()


def main() -> int:
    """Print for each kind of drafts how many outputs it had, and how many differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="where an earlier run ended")
    options = parser.parse_args()
    outputs, different, number = Counter[str](), Counter[str](), options.seed
    while outputs.total() < options.outputs:
        count_some(number, outputs, different)
        number += 1
        print(f"{outputs.total():,} outputs, {different.total():,} differ", flush=True)
    for name in sorted(outputs):
        print(f"{name}: {outputs[name]:,} outputs, {different[name]:,} differ")
    print(f"the next --seed is {number}")
    return 1 if different.total() else 0


if __name__ == "__main__":
    sys.exit(main())
