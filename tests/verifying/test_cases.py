"""The settings that a proof goes through."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from batcher import Request, SimulatedModel
from batcher.scheduling.queue import POLICIES
from batcher.scheduling.scheduler import check_effects, check_settings
from batcher.verifying import Needs, arranged, make_cases, needs_of

SMALL = Needs(1, [(1, 40), (1, 7)])
needs = st.builds(
    lambda sizes: Needs(max(rows for rows, _ in sizes), sizes),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 300)), min_size=1, max_size=5),
)


@given(needs, st.integers(0, 9))
def test_all_settings_make_sense_and_have_room_for_each_request(needs, seed):
    for case in make_cases(needs, 80, seed):
        settings = case.settings
        check_settings(case.batch, settings)
        check_effects(to_builtins(settings), [settings])
        assert case.batch >= needs.num_slots
        if settings.kv_blocks is not None:
            assert settings.kv_blocks >= needs.num_blocks(settings.block_size)


def test_a_case_follows_from_its_number_and_the_seed():
    cases = make_cases(SMALL, 80, 3)
    assert make_cases(SMALL, 20, 3) == cases[:20]
    others = make_cases(SMALL, 80, 4)
    same = [one == other for one, other in zip(cases, others, strict=True)]
    assert all(same[0:60:2])  # by system
    assert sum(same[1::2]) < 3
    assert [case.number for case in cases] == [*range(1, 81)]


def test_everything_that_can_be_set_is_tried_by_default():
    cases = make_cases(SMALL, 64, 0)
    tried = {name: {getattr(case.settings, name) for case in cases} for name in NAMES}
    assert tried["policy"] == set(POLICIES)
    assert tried["batching"] == {"continuous", "static"}
    assert tried["prefill_order"] == {"decode-first", "prefill-first"}
    assert tried["capacity"] == {"on-demand", "watermark", "no-evict"}
    assert tried["prefix_cache"] == {None, True, False}
    assert tried["block_size"] >= {1, 2, 4, 16, 32}
    assert None in tried["kv_blocks"]
    assert SMALL.num_blocks(4) in tried["kv_blocks"]  # as few as there can be
    assert {1, 3, 16, None} <= tried["long_prefill_threshold"]
    assert {case.arrivals for case in cases} == {"given", "at-once", "shuffled", "scattered"}
    assert {case.is_streaming for case in cases} == {True, False}
    assert {case.batch for case in cases} >= {1, 2, 3, 8, 64}


NAMES = make_cases(SMALL, 1, 0)[0].settings.__struct_fields__


def test_a_request_needs_room_for_its_rows_and_a_turn_for_the_turns_before_it():
    requests = [
        Request(id="a", prompt="12345", max_tokens=5),
        Request(id="b", prompt="1", max_tokens=3, num_beams=4),
        Request(id="c", prompt="1", max_tokens=9, cfg_scale=2.0, negative_prompt="123456"),
        Request(id="d", prompt="1234", max_tokens=6, session="s"),
        Request(id="e", prompt="12", max_tokens=3, session="s"),
    ]
    found = needs_of(requests, SimulatedModel())
    assert found == Needs(4, [(1, 10), (4, 4), (2, 15), (1, 10), (1, 15)])
    assert found.num_blocks(4) == 2 * 4
    assert found.num_blocks(1) == 30


def test_whatever_the_order_of_arrival_turns_keep_theirs():
    requests = [
        Request(id=str(place), prompt="x", session="s" if place % 3 == 0 else None)
        for place in range(12)
    ]
    orders = set()
    for case in make_cases(SMALL, 64, 0):
        ids = [request.id for request in arranged(case, requests, 0)]
        assert sorted(ids, key=int) == [str(place) for place in range(12)]
        assert [name for name in ids if int(name) % 3 == 0] == ["0", "3", "6", "9"]
        assert case.arrivals != "given" or arranged(case, requests, 0) == requests
        orders.add(tuple(ids))
    assert len(orders) > 10
