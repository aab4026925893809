"""Fields that are right by themselves and contradict each other.

Rule: what a field asks for is done or refused, never dropped; the tables say which pairs do not go
together, and docs/requests-and-results.md shows them.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec import Struct

from batcher.errors import FieldProblem
from batcher.request import Request
from batcher.validation.capabilities import CONSTRAINT_FIELDS, LOGIT_FIELDS
from batcher.validation.states import find_doubled_markers, find_unreachable
from batcher.validation.stops import check_total_length
from batcher.validation.values import DEFAULTS


class Conflict(Struct, frozen=True):
    """A problem of one field, and the other field that it depends on, if there is one."""

    problem: FieldProblem
    other: str | None = None


class Exclusion(NamedTuple):
    """A field that cannot go with another one, and why; the first is the one to leave out."""

    name: str
    other: str
    why: str


class Need(NamedTuple):
    """A field that has no effect without another one, and how to give that."""

    name: str
    other: str
    remedy: str


Conflicts = Iterator[Conflict]

_CUTS = ("top_k", "top_p", "min_p", "typical_p")
EXCLUSIONS = (
    *(
        Exclusion(name, "num_beams", "beams are not sampled")
        for name in ("temperature", *_CUTS, "mirostat", "best_of")
    ),
    Exclusion("cfg_scale", "num_beams", "a beam has no negative prompt beside it"),
    Exclusion("logprobs", "num_beams", "beams are told by the `score` of the whole"),
    *(Exclusion(name, "mirostat", "it decides itself what to cut off") for name in _CUTS),
    *(
        Exclusion(name, other, "an output keeps one constraint")
        for place, name in enumerate(CONSTRAINT_FIELDS)
        for other in CONSTRAINT_FIELDS[:place]
    ),
    *(
        Exclusion("ignore_eos", name, "EOS ends an output that is whole")
        for name in CONSTRAINT_FIELDS
    ),
    *(Exclusion("heal", name, "it says how the output begins") for name in CONSTRAINT_FIELDS),
    *(
        Exclusion(name, "heal", "it writes the end of the prompt anew")
        for name in ("bad_words", "prompt_logprobs")
    ),
    Exclusion("include_stop_str_in_output", "states", "a marker belongs to none of them"),
    *(
        Exclusion(name, "session", "it goes on from one output")
        for name in ("n", "best_of", "num_beams", "cfg_scale")
    ),
    *(
        Exclusion(name, "session", "what goes before the prompt is generated already")
        for name in ("heal", "prompt_logprobs")
    ),
)
NEEDS = (
    *(
        Need(name, "num_beams", "give 2 beams or more")
        for name in ("length_penalty", "early_stopping")
    ),
    *(Need(name, "mirostat", "give version 1 or 2") for name in ("mirostat_tau", "mirostat_eta")),
    Need("mirostat", "temperature", "give one above 0"),
    Need("negative_prompt", "cfg_scale", "give one other than 1"),
    Need("logprobs_mode", "logprobs", "give 0 or more"),
    Need("initial_state", "states", "declare some"),
    Need("think_time", "session", "name one"),
)

# The values by which a field asks for nothing, where its default is not the only one.
_IDLE: dict[str, tuple[object, ...]] = {**LOGIT_FIELDS, "top_k": (0, -1)}


def find_conflicts(request: Request) -> Conflicts:
    """Yield the contradictions in `request`, each field of which is valid by itself."""
    blamed: set[str] = set()
    for conflict in _find_in_tables(request):
        name = str(conflict.problem.path[0])
        if name not in blamed:
            yield conflict
        blamed.add(name)
    for rule in _RULES:
        yield from rule(request)


def asks_for(request: Request, name: str) -> bool:
    """Return whether the field of this name has a value that asks for something."""
    return getattr(request, name) not in _IDLE.get(name, (DEFAULTS[name],))


def _find_in_tables(request: Request) -> Conflicts:
    for name, other, why in EXCLUSIONS:
        if asks_for(request, name) and asks_for(request, other):
            yield _make(name, other, f"`{name}` cannot go with `{other}`: {why}")
    for name, other, remedy in NEEDS:
        if asks_for(request, name) and not asks_for(request, other):
            yield _make(name, other, f"`{name}` has no effect without `{other}`; {remedy}")


def _make(name: str, other: str, message: str) -> Conflict:
    return Conflict(FieldProblem("conflicting-fields", (name,), message), other)


def _check_samples(request: Request) -> Conflicts:
    if request.best_of is not None and request.best_of < request.n:
        message = f"`best_of` is {request.best_of}, less than the {request.n} outputs of `n`"
        yield _make("best_of", "n", message)
    if request.num_beams > 1:
        if request.n > request.num_beams:
            message = f"`n` is {request.n}, but {request.num_beams} beams give no more outputs"
            yield _make("n", "num_beams", message)
    elif request.temperature == 0:
        for name, count in (("n", request.n), ("best_of", request.best_of)):
            if count is not None and count > 1:
                message = f"`{name}` is {count}, but with `temperature` 0 all outputs are the same"
                yield _make(name, "temperature", message)


def _check_lengths(request: Request) -> Conflicts:
    if request.min_tokens > request.max_tokens:
        message = (
            f"`min_tokens` is {request.min_tokens}, more than `max_tokens`, {request.max_tokens}"
        )
        yield _make("min_tokens", "max_tokens", message)


def _check_heal(request: Request) -> Conflicts:
    if request.heal and not request.prompt:
        yield _make("heal", "prompt", "`heal` needs a prompt with at least one token")


def _check_states(request: Request) -> Conflicts:
    states = request.states
    if states is None:
        return
    found = [*find_doubled_markers(states), *find_unreachable(request, states)]
    for problem in found:
        yield Conflict(problem, "initial_state" if problem.path[0] == "states" else "states")


def _check_deadline(request: Request) -> Conflicts:
    if request.deadline is not None and request.deadline < request.arrival_time:
        message = (
            f"`deadline` is {request.deadline:g}, before `arrival_time`, {request.arrival_time:g}"
        )
        yield _make("deadline", "arrival_time", message)


def _check_stop_lengths(request: Request) -> Conflicts:
    for problem in check_total_length(request):
        yield Conflict(problem)


_RULES: tuple[Callable[[Request], Conflicts], ...] = (
    _check_samples,
    _check_lengths,
    _check_heal,
    _check_states,
    _check_deadline,
    _check_stop_lengths,
)
