"""Duplicate ids, in memory and beyond."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import BatchdecodeError
from batcher.requests import ids
from batcher.requests.ids import IdRegistry


@pytest.fixture
def small(monkeypatch):
    """Sizes with which a handful of ids goes through every part."""
    monkeypatch.setattr(ids, "MAX_RECENT", 3)
    monkeypatch.setattr(ids, "MIN_PLACES", 4)
    monkeypatch.setattr(ids, "CHUNK_SIZE", 16)


NAMES = st.one_of(
    st.integers(0, 30).map(str),
    st.sampled_from(["", "\n", '"', '\\"', '["a",1]', "é", "\U0001f600", '",5]\n["x', "[", " 1"]),
)


@pytest.mark.usefixtures("small")
@given(st.lists(NAMES, max_size=80), st.sampled_from([2, 32]))
def test_the_registry_answers_as_a_dict_would(names, mark_bits):
    # With marks of two bits most lookups find their mark by chance, and the file has to decide.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids, "MARK_BITS", mark_bits)
        patch.setattr(ids, "LARGEST_MARK", 2**mark_bits - 1)
        registry, lines = IdRegistry(), {}
        for line, name in enumerate(names, 1):
            assert registry.add(name, line) == lines.get(name)
            lines.setdefault(name, line)


@pytest.mark.usefixtures("small")
@given(
    st.lists(st.lists(NAMES, min_size=1, max_size=8), max_size=20),
    st.sampled_from([2, 32]),
    st.booleans(),
)
def test_many_ids_are_taken_at_once_only_if_all_are_new(blocks, mark_bits, is_mixed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids, "MARK_BITS", mark_bits)
        patch.setattr(ids, "LARGEST_MARK", 2**mark_bits - 1)
        registry, lines, line = IdRegistry(), {}, 0
        for names in blocks:
            numbers = range(line + 1, line + 1 + len(names))
            line += len(names)
            are_new = len(lines | dict.fromkeys(names)) == len(lines) + len(names)
            if not (is_mixed and line % 2) and registry.add_new(names, numbers):
                assert are_new
                lines |= zip(names, numbers, strict=True)
                continue
            assert not are_new or mark_bits == 2 or is_mixed
            for name, number in zip(names, numbers, strict=True):
                assert registry.add(name, number) == lines.get(name)
                lines.setdefault(name, number)


def test_more_ids_than_memory_holds_are_told_apart():
    registry = IdRegistry()
    lines = range(1, 60_001)
    assert not any(registry.add(f"r-{line}", line) for line in lines)
    assert all(registry.add(f"r-{line}", 0) == line for line in (1, 49_999, 50_000, 50_001, 60_000))
    assert registry.add("r-0", 5) is None
    assert not registry.add_new(["s-1", "r-7"], [6, 7])
    assert registry.add_new([f"s-{line}" for line in lines], lines)
    assert registry.add("s-57777", 8) == 57_777
    assert len(registry._recent) < ids.MAX_RECENT


@pytest.mark.usefixtures("small")
def test_a_full_disk_is_an_error_that_says_so(monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    registry = IdRegistry()
    registry.add("a", 1)
    registry.add("b", 2)
    with pytest.raises(BatchdecodeError, match="No space left"):
        registry.add("c", 3)
