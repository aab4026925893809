"""A group of a fleet that scales: its replicas, its policy, and what that is told of requests.

Rule: a group knows nothing of others, but for what waits at the router, or is refused there.
"""

from collections.abc import MutableSequence, Sequence
from math import inf

import numpy as np

from batcher.metrics.arrays import goodput_of
from batcher.planning.autoscaling import Autoscale, Autoscaler
from batcher.planning.fleet_result import ServedColumns
from batcher.planning.replica import ReplicaSettings


class ScaledGroup:
    """A group that scales.

    members: which replicas there ever were of it.

    Raises:
        BatchdecodeError: the settings of the policy make no sense.
    """

    def __init__(
        self,
        autoscale: Autoscale,
        replicas: Sequence[ReplicaSettings],
        columns: ServedColumns,
        served_by: MutableSequence[int],
    ) -> None:
        self.autoscale, self.autoscaler = autoscale, Autoscaler(autoscale)
        name = replicas[-1].group if autoscale.group is None else autoscale.group
        self.members = [index for index, each in enumerate(replicas) if each.group == name]
        self.settings = replicas[self.members[0]]
        own = self.members if self.settings.role == "both" else None
        self.recent = Recent(columns, served_by, own, autoscale.limits)

    def num_told(self, num_held: int) -> int:
        """Return how many of the requests that wait at the router wait for this group."""
        return 0 if self.settings.role == "decode" else num_held


class Recent:
    """What has ended on some replicas, or was refused, since that was asked last.

    served_by: the replica of each in `columns`.  members: those replicas; None: all.
    limits: of the SLO that good ones meet; without any all are good.
    """

    def __init__(
        self,
        columns: ServedColumns,
        served_by: MutableSequence[int],
        members: Sequence[int] | None,
        limits: dict[str, float],
    ) -> None:
        self._columns, self._served_by, self._members = columns, served_by, members
        self._limits = limits
        self._place = self._num_refused = 0  # of the first in `columns` that may count
        self._last = -inf  # when it was asked

    def take(self, now: float, num_refused: int) -> tuple[int, int, int]:
        """Return how many have ended by `now`, and of them were good, and how many were refused.

        num_refused: all up to now.
        """
        times = self._columns.since(self._place)
        served_by = np.array(self._served_by[self._place :], np.int32)
        is_later = times.end > now
        self._place += int(is_later.argmax()) if is_later.any() else len(is_later)
        is_recent = ~is_later & (times.end > self._last)
        if self._members is not None:
            is_recent &= np.isin(served_by, self._members)
        recent = times.where(is_recent)
        good = goodput_of(self._limits, recent, 0, recent.makespan).good
        refused, self._num_refused = num_refused - self._num_refused, num_refused
        self._last = now
        return len(recent.end), good, refused
