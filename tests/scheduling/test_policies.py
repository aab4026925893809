"""Policies by name, and those that people bring."""

from textwrap import dedent

import pytest
from engine_runs import drained
from waiting import waiting

from batcher import Engine, Request, SimulatedModel
from batcher.errors import BatchdecodeError
from batcher.scheduling.queue import POLICIES, policy_of
from batcher.settings import SchedulingSettings


@pytest.fixture
def own(tmp_path, monkeypatch, request):
    """Write a module with a function `rank` of that body; return what names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = iter(range(100))

    def write(body):
        name = f"own_policy_{abs(hash(request.node.name))}_{next(modules)}"
        text = f"def rank(candidate):\n{body}\n"
        (tmp_path / f"{name}.py").write_text(dedent(text))
        return f"{name}:rank"

    return write


def test_ties_are_broken_by_who_came_first():
    for name, policy in POLICIES.items():
        first, second = waiting("a", queue_number=0), waiting("b", queue_number=1)
        assert policy(first) < policy(second), name


def test_an_unknown_name_lists_what_exists():
    with pytest.raises(BatchdecodeError) as caught:
        policy_of("sfj")
    message = str(caught.value)
    assert message == (
        "unknown policy 'sfj'; did you mean sjf? "
        f"(known: {', '.join(POLICIES)}, or module:function)"
    )


def test_a_policy_of_ones_own_is_told_of_the_request(own):
    policy = policy_of(own("    return (candidate.prompt_tokens, -candidate.generated)"))
    near = waiting("a", num_prompt_tokens=3, num_tokens=3, queue_number=5)
    preempted = waiting("b", num_prompt_tokens=3, num_tokens=9, queue_number=7)
    far = waiting("c", num_prompt_tokens=8, num_tokens=8, queue_number=0)
    assert sorted([far, near, preempted], key=policy) == [preempted, near, far]


def test_a_policy_of_ones_own_orders_a_run(own):
    settings = SchedulingSettings(policy=own("    return -candidate.priority"))
    engine = Engine(SimulatedModel(), 1, settings=settings)
    for number in range(4):
        engine.add(Request(id=str(number), prompt="a", max_tokens=1, priority=number))
    assert [result.id for result in drained(engine).results] == ["3", "2", "1", "0"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    raise ValueError('no idea')", "raised ValueError: no idea"),
        ("    raise SystemExit(3)", "raised SystemExit: 3"),
        ("    return float('nan')", "returned nan, not a number or a tuple of numbers"),
        ("    return None", "returned None, not a number"),
        ("    return 'first'", "returned 'first', not a number"),
        ("    return (1, 'b')", r"returned \(1, 'b'\), not a number"),
        ("    return (1, float('nan'))", r"returned \(1, nan\), not a number"),
        ("    return [1]", r"returned \[1\], not a number"),
    ],
)
def test_a_policy_that_gives_no_number_is_named(own, body, message):
    name = own(body)
    with pytest.raises(BatchdecodeError, match=message) as caught:
        policy_of(name)(waiting("a"))
    assert f"the policy {name} " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere_at_all:rank", "cannot import nowhere_at_all"),
        ("math:inff", "math has no 'inff'; did you mean math:inf"),
        ("math:pi", "the policy math:pi is a float, not a function"),
        (":rank", "unknown policy ':rank'"),
        ("math:", "unknown policy 'math:'"),
        ("mo dule:rank", "is not a package.module"),
    ],
)
def test_what_names_no_function_is_refused(name, message):
    with pytest.raises(BatchdecodeError, match=message):
        policy_of(name)
