"""What would help a deployment that does not meet its SLO: each limit relieved, then all of them.

Rule: nothing is inferred but from requests that can never run; every relief is simulated.
"""

from collections.abc import Sequence
from math import floor

from msgspec import Struct

from batcher.whatif.binding import Constraint
from batcher.whatif.deployments import AXES, Deployment, Value
from batcher.whatif.limits import SETTINGS, doubled, limits_of, without
from batcher.whatif.measuring import Outcome, Question, good_share, measure, problem_of


class Relief(Struct, frozen=True, kw_only=True):
    """A limit that was relieved, the setting and its value, and the share that meets the SLO so."""

    constraint: Constraint
    setting: str
    value: Value
    share: float


class Removal(Struct, frozen=True, kw_only=True):
    """Limits that were out of the way together, and the share that meets the SLO so."""

    constraints: list[Constraint]
    share: float


class Analysis(Struct, frozen=True, kw_only=True):
    """What binds a deployment, in the order of SETTINGS, and what that rests on.

    removal: the fewest limits that have to go together, None if doubling one of them is enough.
    """

    binding: list[Constraint]
    reliefs: list[Relief]
    removal: Removal | None = None


def analyse(question: Question, deployment: Deployment, outcome: Outcome) -> Analysis:
    """Return what binds `deployment`, which comes to `outcome`, so that more do not meet the SLO.

    It is the limit that doubled helps most; if none does, the fewest that together do if nobody
    meets them; if these do not either, the time that steps take.  Where too many requests can never
    run there are too few blocks, whatever else.
    """
    share, removal = good_share(outcome), None
    reliefs = reliefs_of(question, deployment)
    best = max(reliefs, key=lambda relief: relief.share, default=None)
    binding: set[Constraint] = set()
    if best is not None and best.share > share:
        binding = {best.constraint}
    else:
        removal = _removal(question, deployment, share)
        binding.update(removal.constraints if removal else ())
    num_allowed = floor((1 - question.asked) * (outcome.served + outcome.failed) + 1e-9)
    if outcome.failed > num_allowed:
        binding.add("kv")
    return Analysis(
        binding=[limit for limit in SETTINGS if limit in binding] or ["compute"],
        reliefs=reliefs,
        removal=removal,
    )


def reliefs_of(question: Question, deployment: Deployment) -> list[Relief]:
    """Return what it helps to double each limit of `deployment`, or to batch continuously."""
    reliefs = []
    for limit in limits_of(deployment):
        relieved, setting = doubled(deployment, limit), SETTINGS[limit]
        if relieved != deployment and problem_of(relieved) is None:
            share = good_share(measure(question, relieved))
            value = AXES[setting].value_of(relieved)
            reliefs.append(Relief(constraint=limit, setting=setting, value=value, share=share))
    return reliefs


def _removal(question: Question, deployment: Deployment, share: float) -> Removal | None:
    """Return the fewest limits without which more than `share` meet the SLO, None if none do."""

    def share_without(limits: Sequence[Constraint]) -> float:
        return good_share(measure(question, without(deployment, limits, question.workload)))

    limits = limits_of(deployment)
    reached = share_without(limits)
    if reached <= share:
        return None
    for limit in list(limits):
        others = [other for other in limits if other != limit]
        if others and share_without(others) >= reached:
            limits = others
    return Removal(constraints=limits, share=reached)
