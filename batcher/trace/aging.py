"""Which admissions `--aging` decided, and not the policy.

Rule: no event tells of it.  Who has waited for as long as that, and is admitted, was put first by
it: all that came before it had waited longer, and would have gone first.
"""

from batcher.events import AdmitEvent, ArriveEvent, RunEvent
from batcher.settings import DEFAULT_AGING, DEFAULT_SCHEDULING


def aging_of(run: RunEvent) -> float | None:
    """Return how long who waits goes by the policy; None if always, or if urgency counts, too."""
    if run.policy == DEFAULT_SCHEDULING.policy or run.scheduling.get("preempt_for") is not None:
        return None
    return float(run.scheduling.get("aging", DEFAULT_AGING))


def is_aged(admit: AdmitEvent, arrive: ArriveEvent | None, aging: float) -> bool:
    """Return whether one that arrived by itself had waited for `aging` when it was admitted."""
    return arrive is not None and admit.time - arrive.time >= aging
