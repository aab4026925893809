"""The second tier of the prefix cache against a slow one that keeps whole prefixes in a list."""

from hypothesis import given
from hypothesis import strategies as st

from batcher.scheduling.host_tier import HostTier


class SlowTier:
    """Prefixes, the most recently used last."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks, self.prefixes = max_blocks, list[tuple[object, ...]]()

    def num_found(self, chain: tuple[object, ...]) -> int:
        lengths = range(2, len(chain) + 1)
        return max((length - 1 for length in lengths if chain[:length] in self.prefixes), default=0)

    def store(self, chain: tuple[object, ...]) -> None:
        for length in range(min(len(chain), self.max_blocks + 1), 1, -1):
            if chain[:length] in self.prefixes:
                self.prefixes.remove(chain[:length])
            self.prefixes.append(chain[:length])
        self.prefixes = self.prefixes[-self.max_blocks :]


CHAINS = st.tuples(st.sampled_from([-1, "salt"]), st.lists(st.integers(-2, 1), max_size=7))


@given(st.integers(1, 12), st.lists(st.tuples(CHAINS, CHAINS), max_size=30))
def test_it_holds_what_was_used_last_and_never_a_block_without_those_before_it(
    max_blocks: int, steps: list[tuple[tuple[int | str, list[int]], tuple[int | str, list[int]]]]
) -> None:
    tier, slow = HostTier(max_blocks), SlowTier(max_blocks)
    for stored, asked in steps:
        before = tier.num_changes, tier.num_found(*asked)
        tier.store(*stored)
        slow.store((stored[0], *stored[1]))
        assert tier.num_blocks == len(slow.prefixes) <= max_blocks
        assert tier.num_found(*asked) == slow.num_found((asked[0], *asked[1]))
        if tier.num_changes == before[0]:
            assert tier.num_found(*asked) == before[1], "nobody is told that it changed"


def test_of_a_chain_that_is_too_long_the_first_blocks_stay() -> None:
    tier = HostTier(2)
    tier.store(-1, [5, 6, 7])
    assert tier.num_found(-1, [5, 6, 7]) == 2


def test_chains_with_other_roots_are_others() -> None:
    tier = HostTier(8)
    tier.store("a", [5])
    assert (tier.num_found("a", [5]), tier.num_found("b", [5]), tier.num_found(-1, [5])) == (
        1,
        0,
        0,
    )
