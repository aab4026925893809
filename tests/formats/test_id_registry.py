"""Duplicate ids, in memory and beyond."""

import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import BatchdecodeError
from cli.run.input import IdRegistry

NAMES = st.one_of(
    st.integers(0, 30).map(str),
    st.sampled_from(["", "\n", '"', '\\"', "\0", "a\0", "é", "É", "\U0001f600", "[", " 1", "1 "]),
)


@given(st.lists(NAMES, max_size=40))
def test_the_registry_answers_as_a_dict_would(names):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cli.run.input.MAX_RECENT", 3)
        registry, lines = IdRegistry(), {}
        for number, name in enumerate(names, 1):
            assert registry.add(name, number) == lines.get(name)
            lines.setdefault(name, number)


def test_more_ids_than_memory_holds_are_told_apart():
    registry = IdRegistry()
    lines = range(1, 60_001)
    assert not any(registry.add(f"r-{line}", line) for line in lines)
    for line in (1, 49_999, 50_000, 50_001, 60_000):
        assert registry.add(f"r-{line}", 0) == line
    assert registry.add("r-0", 5) is None
    assert len(registry._recent) < 50_000


def test_a_full_disk_is_an_error_that_says_so(monkeypatch):
    def fail(*_, **__):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("cli.run.input.MAX_RECENT", 3)
    monkeypatch.setattr("sqlite3.connect", fail)
    registry = IdRegistry()
    registry.add("a", 1)
    registry.add("b", 2)
    with pytest.raises(BatchdecodeError, match="disk is full"):
        registry.add("c", 3)
