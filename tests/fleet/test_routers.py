"""Routers by themselves: which replica is least, whatever happened before."""

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batcher.planning import routers
from batcher.planning.routers import LeastTokens, ReplicaView

MOVES = st.one_of(
    st.tuples(st.just("note"), st.integers(0, 5), st.integers(-3, 5)),
    st.tuples(st.just("use"), st.permutations(range(6)), st.integers(1, 6)),
)


@examples(100)
@given(st.lists(MOVES, max_size=60), st.sampled_from([1, 8]))
def test_the_least_is_that_which_has_been_so_for_longest(moves, max_outdated):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routers, "MAX_OUTDATED", max_outdated)
        views = [ReplicaView(number) for number in range(6)]
        router, noted = LeastTokens(), list(views)  # in the order in which each was noted last
        router.use(views)
        for kind, first, second in moves:
            if kind == "use":
                noted = [views[number] for number in first[:second]]
                router.use(noted.copy())
            else:
                view = views[first]
                view.num_tokens = max(0, view.num_tokens + second)
                if view in noted:
                    noted.remove(view)
                    noted.append(view)
                router.note(view)
            assert router.choose(None, 0.0) is min(noted, key=lambda view: view.num_tokens)
            assert len(router._heap) <= max_outdated * len(noted)
