"""Constraints that take too much to compile are refused, and nothing else comes to harm."""

import os
import select

import pytest
from constrained import source

from batcher import Request, decode
from batcher.decoding.verification import TRIALS, Enforceable, Trials
from batcher.errors import GrammarError

SLOW = source("json_schema", {"multipleOf": 99_999})  # a second, 50 MB
HUGE = source("json_schema", {"multipleOf": 99_999_999})
GOOD = source("regex", "[ab]+")


@pytest.fixture
def fresh():
    """Trials that remember nothing."""
    own = Trials()
    yield own
    own.close()


def test_what_takes_too_long_is_refused_and_the_next_one_is_not(fresh):
    message = "it takes more than 0.1 seconds to compile; see --grammar-timeout"
    with pytest.raises(GrammarError, match=message) as caught:
        fresh.make(SLOW, 0.1)
    assert caught.value.path == ("json_schema",)
    assert fresh.make(GOOD, 10) == Enforceable(GOOD)


@pytest.mark.heavy
def test_what_takes_too_much_memory_is_refused_and_the_next_one_is_not(fresh):
    with pytest.raises(GrammarError, match="it takes more than 128 MiB of memory to compile"):
        fresh.make(HUGE, 100)
    assert fresh.make(GOOD, 10) == Enforceable(GOOD)


def test_a_trial_that_was_interrupted_leaves_no_answer_for_the_next(fresh, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(select, "select", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fresh.make(source("regex", "(a"), 10)
    assert fresh.make(GOOD, 10) == Enforceable(GOOD)


def test_a_process_that_has_died_is_replaced(fresh):
    assert fresh.make(GOOD, 10) == Enforceable(GOOD)
    os.kill(fresh._process.pid, 9)
    fresh._process.wait()
    assert fresh.make(source("regex", "c"), 10) == Enforceable(source("regex", "c"))


def test_a_request_without_a_constraint_starts_no_process(monkeypatch):
    monkeypatch.setattr(TRIALS, "_try", lambda *_: pytest.fail("tried"))
    assert decode([Request(prompt="a"), Request(prompt="b", temperature=1.0, stop=".")])
