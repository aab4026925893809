"""The bits are those of SplitMix64, of one number or of many."""

import numpy as np

from batcher.splitmix64 import GAMMA, mix, mix_in_place, scramble


def test_the_bits_are_those_of_its_authors() -> None:
    # the first outputs of their code with seed 1234567
    state, expected = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(state + number * GAMMA) % 2**64 for number in (1, 2, 3)]
    assert [mix(number) for number in states] == expected
    assert mix(np.array(states, np.uint64)).tolist() == expected
    assert mix_in_place(np.array(states, np.uint64)).tolist() == expected
    assert scramble(state) == expected[0]
