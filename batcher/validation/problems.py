"""Everything that is wrong with a request."""

from itertools import islice

from msgspec.structs import replace

from batcher.errors import FieldProblem
from batcher.request import Request
from batcher.validation.capabilities import ModelCapabilities, find_unserved
from batcher.validation.conflicts import find_conflicts
from batcher.validation.fields import CHECKS
from batcher.validation.plain import plain_copy
from batcher.validation.values import DEFAULTS

MAX_PROBLEMS = 100  # of one field


def find_problems(request: Request, capabilities: ModelCapabilities) -> list[FieldProblem]:
    """Return everything wrong with `request`, to be decoded by `capabilities`; [] if nothing is."""
    return (
        [] if plain_copy(request, capabilities) is not None else look_closely(request, capabilities)
    )


def look_closely(request: Request, capabilities: ModelCapabilities) -> list[FieldProblem]:
    """Return what `find_problems` does, by every check there is."""
    problems = list(
        islice(CHECKS["prompt"](request.prompt, ("prompt",), capabilities), MAX_PROBLEMS)
    )
    for name, default in DEFAULTS.items():
        value = getattr(request, name)
        if value is not default:
            problems += islice(CHECKS[name](value, (name,), capabilities), MAX_PROBLEMS)
    bad = {str(problem.path[0]) for problem in problems}
    sound = replace(request, **{name: DEFAULTS.get(name, "") for name in bad}) if bad else request
    problems += [
        conflict.problem
        for conflict in find_conflicts(sound)
        if conflict.problem.path[0] not in bad and conflict.other not in bad
    ]
    problems += find_unserved(sound, capabilities)
    return problems
