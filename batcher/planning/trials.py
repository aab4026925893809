"""Trials: simulations with a prefix cache in which blocks are only counted while that will do.

Where no two jobs begin with the same tokens, nobody finds a block but who was preempted, and comes
back to what it had computed.  Until then as many blocks are held and free as without the cache.

Rule: a trial comes to what the simulation with the cache does, or is given up.
"""

from msgspec.structs import replace

from batcher.scheduling.policies import LONGEST_PREFIX_MATCH, POLICIES
from batcher.settings import SchedulingSettings


class Preempted(Exception):  # noqa: N818 - it is no error
    """Somebody was preempted in a trial, and may find blocks."""


def settings_of_trial(settings: SchedulingSettings) -> SchedulingSettings | None:
    """Return those of a trial for jobs that share nothing; None if it would not do, or not help.

    A policy of one's own is asked by no simulation that may be given up: it may count.
    """
    is_known = settings.policy in POLICIES and settings.policy != LONGEST_PREFIX_MATCH
    if not (is_known and settings.has_prefix_cache) or settings.preempt_for is not None:
        return None
    return None if settings.kv_blocks is None else replace(settings, prefix_cache=False)
