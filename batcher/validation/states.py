"""The states of a request: what each may hold, and whether every one of them can be reached."""

from collections.abc import Mapping
from typing import Any

from batcher.errors import FieldProblem, Path
from batcher.request import Request, Transition
from batcher.validation.capabilities import ModelCapabilities
from batcher.validation.stops import check_marker
from batcher.validation.values import (
    MAX_SHOWN,
    Problems,
    check_text_or_tokens,
    is_text,
    quote,
    show,
    wrong,
)

ANY_STATE = "*"  # its transitions leave every state
MAX_NAMED = 8  # states that a message lists
MAX_NAME = MAX_SHOWN  # characters, so that a message can hold one

States = dict[str, list[Transition]]


def initial_state_of(request: Request) -> str | None:
    """Return the state in which a valid `request` begins: the first declared, unless it says."""
    if request.initial_state is not None or request.states is None:
        return request.initial_state
    return next(name for name in request.states if name != ANY_STATE)


def check_states(states: object, path: Path, capabilities: ModelCapabilities) -> Problems:
    """Yield the problems of what is no object of states with their transitions."""
    if not isinstance(states, dict):
        yield wrong("invalid-type", path, "an object of states", states)
        return
    if not states.keys() - {ANY_STATE}:
        yield FieldProblem("invalid-value", path, f"{quote(path)} declares no state")
    for name, transitions in states.items():
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not is_text(name):
            expected = f"a state's name is a string of 1 to {MAX_NAME} characters"
            message = f"{quote(path)}: {expected}, not {show(name)}"
            yield FieldProblem("invalid-value", path, message)
        elif not isinstance(transitions, list):
            yield wrong("invalid-type", (*path, name), "a list of transitions", transitions)
        else:
            for index, transition in enumerate(transitions):
                yield from _check_transition(transition, (*path, name, index), states, capabilities)


def find_doubled_markers(states: States) -> Problems:
    """Yield the transitions whose marker the same state, or any state, has already."""
    everywhere = {_key(transition) for transition in states.get(ANY_STATE, [])}
    for name, transitions in states.items():
        others = set() if name == ANY_STATE else everywhere
        seen: set[str | tuple[int, ...]] = set()
        for index, transition in enumerate(transitions):
            if _key(transition) in seen or _key(transition) in others:
                path = ("states", name, index, "on")
                also = "" if name == ANY_STATE else f' or "{ANY_STATE}"'
                message = f"{quote(path)}: state {show(name)}{also} has this marker already"
                yield FieldProblem("invalid-value", path, message)
            seen.add(_key(transition))


def find_unreachable(request: Request, states: States) -> Problems:
    """Yield the states that the valid ones `states` never lead to."""
    initial = initial_state_of(request)
    if initial not in states or initial == ANY_STATE:
        message = f"`initial_state` {show(initial)} is not declared; {_declared(states)}"
        yield FieldProblem("invalid-value", ("initial_state",), message)
        return
    reached: set[str] = set()
    open_ends = {initial} | _destinations(states.get(ANY_STATE, []))
    while open_ends:
        name = open_ends.pop()
        reached.add(name)
        open_ends |= _destinations(states[name]) - reached
    for name in states:
        if name not in reached and name != ANY_STATE:
            message = f"state {show(name)} can never be reached from {show(initial)}"
            yield FieldProblem("invalid-value", ("states", name), message, is_key=True)


def _check_transition(
    transition: object, path: Path, states: dict[object, object], capabilities: ModelCapabilities
) -> Problems:
    if not isinstance(transition, Transition):
        yield wrong("invalid-type", path, "an object with `on` and `to`", transition)
        return
    on: object = transition.on
    yield from check_text_or_tokens(
        on, (*path, "on"), capabilities, "give one transition for each text"
    )
    yield from check_marker(on, (*path, "on"))
    to: object = transition.to
    if to is None:
        return
    if not isinstance(to, str):
        yield wrong("invalid-type", (*path, "to"), "the name of a state or null", to)
    elif to not in states or to == ANY_STATE:
        message = f"{quote((*path, 'to'))} {show(to)} is not declared; {_declared(states)}"
        yield FieldProblem("invalid-value", (*path, "to"), message)


def _destinations(transitions: list[Transition]) -> set[str]:
    return {way.to for way in transitions if way.to is not None}


def _declared(states: Mapping[Any, object]) -> str:
    names = [show(name) for name in states if name != ANY_STATE]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"the states are {', '.join(names[:MAX_NAMED])}{more}"


def _key(transition: Transition) -> str | tuple[int, ...]:
    return transition.on if isinstance(transition.on, str) else tuple(transition.on)
