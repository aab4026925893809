import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.run.resume import ResultIndex

ids = st.sampled_from(["", "a", "b", "ab", "é"])
entries = st.lists(st.tuples(ids, st.integers(-3, 3), st.integers(0, 2**40)), max_size=30)


def index_of(added):
    index = ResultIndex()
    for entry in added:
        index.add(*entry)
    index.sort()
    return index


@given(entries)
def test_everything_is_found_where_it_was_put(added):
    index = index_of(added)
    for request_id, number, _ in added:
        found = list(index.find(request_id, number))
        assert {start for *key, start in added if key == [request_id, number]} <= set(found)
        assert len(found) <= sum(key[0] == request_id for key in added)
    assert list(index.find("c", 0)) == []


def test_nothing_is_found_in_an_empty_index():
    index = index_of([])
    assert list(index.find("a", 0)) == []
    assert list(index.alike()) == []


def test_what_is_alike_is_told():
    index = index_of([("a", 0, 10), ("b", 0, 20), ("a", 0, 30), ("a", 1, 40), ("a", 0, 50)])
    assert list(index.alike()) == [[10, 30, 50]]


def test_an_index_is_small():
    index = index_of((f"request-{i}", 0, i) for i in range(1000))
    assert sum(len(part.tobytes()) for part in (index._hashes, index._starts)) == 16_000


@pytest.fixture
def equal_hashes(monkeypatch):
    monkeypatch.setattr("cli.run.resume.hash", lambda _: 5, raising=False)


@pytest.mark.usefixtures("equal_hashes")
def test_what_has_the_same_hash_is_a_candidate():
    assert list(index_of([("a", 0, 10), ("b", 1, 20)]).find("b", 1)) == [10, 20]
