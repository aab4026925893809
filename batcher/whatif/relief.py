"""What would help a deployment that does not meet its SLO: each limit relieved, one at a time.

Rule: nothing is inferred; every relief is simulated.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from batcher.settings import SchedulingSettings
from batcher.whatif.binding import Constraint
from batcher.whatif.deployments import MAX_BATCH, Deployment, Value
from batcher.whatif.measuring import Question, good_share, measure, problem_of


class Relief(Struct, frozen=True, kw_only=True):
    """A limit that was relieved, the setting and its value, and the share that meets the SLO so."""

    constraint: Constraint
    setting: str
    value: Value
    share: float


def reliefs_of(question: Question, deployment: Deployment) -> list[Relief]:
    """Return what it helps to double each limit of `deployment`, or to batch continuously."""
    reliefs = []
    for constraint, setting, relieved in _relieved(deployment):
        if problem_of(relieved) is None:
            share = good_share(measure(question, relieved))
            value = relieved.batch
            if setting != "batch":
                value = getattr(relieved.scheduling, setting)
            reliefs.append(Relief(constraint=constraint, setting=setting, value=value, share=share))
    return reliefs


def binding_of_reliefs(reliefs: Sequence[Relief], share: float) -> Constraint:
    """Return the constraint whose relief helps most where `share` meets the SLO without any.

    If none helps, it is the time that steps take.
    """
    best = max(reliefs, key=lambda relief: relief.share, default=None)
    return "compute" if best is None or best.share <= share else best.constraint


def _relieved(deployment: Deployment) -> Iterator[tuple[Constraint, str, Deployment]]:
    """Yield each constraint with the setting that relieves it, and the deployment so relieved."""
    scheduling = deployment.scheduling
    num_slots, budget = 2 * deployment.batch, scheduling.max_batch_tokens
    if num_slots <= MAX_BATCH:
        roomy = scheduling
        if budget is not None and budget < num_slots:
            roomy = replace(scheduling, max_batch_tokens=num_slots)
        yield "slots", "batch", replace(deployment, batch=num_slots, scheduling=roomy)

    def changed(**settings: Value) -> Deployment:
        relieved: SchedulingSettings = replace(scheduling, **settings)
        return replace(deployment, scheduling=relieved)

    if scheduling.kv_blocks is not None:
        yield "kv", "kv_blocks", changed(kv_blocks=2 * scheduling.kv_blocks)
    if budget is not None:
        yield "tokens", "max_batch_tokens", changed(max_batch_tokens=2 * budget)
    if scheduling.batching == "static":
        yield "static", "batching", changed(batching="continuous")
