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
BLOCKS = st.lists(st.lists(NAMES, min_size=1, max_size=8), max_size=20)


@given(BLOCKS, st.booleans())
def test_the_registry_answers_as_a_dict_would_and_takes_many_ids_only_if_all_are_new(blocks, one):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cli.run.input.MAX_RECENT", 3)
        registry, lines, line = IdRegistry(), {}, 0
        for names in blocks:
            numbers = range(line + 1, line + 1 + len(names))
            line += len(names)
            are_new = len(lines | dict.fromkeys(names)) == len(lines) + len(names)
            if not (one and line % 2):
                assert registry.add_new(names, numbers) == are_new
                if are_new:
                    lines |= zip(names, numbers, strict=True)
                    continue
            for name, number in zip(names, numbers, strict=True):
                assert registry.add(name, number) == lines.get(name)
                lines.setdefault(name, number)


def test_more_ids_than_memory_holds_are_told_apart():
    registry = IdRegistry()
    lines = range(1, 60_001)
    assert not any(registry.add(f"r-{line}", line) for line in lines)
    for line in (1, 49_999, 50_000, 50_001, 60_000):
        assert registry.add(f"r-{line}", 0) == line
    assert registry.add("r-0", 5) is None
    assert not registry.add_new(["s-1", "r-7"], [6, 7])
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
