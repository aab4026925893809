"""What is searched, as whole numbers: the smaller the better.

Rule: a rate is tried at steps of a 64th of a doubling, 1.1 %; all else at every whole number.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.simulation.workload import Workload
from batcher.whatif.deployments import AXES, MAX_BATCH, Deployment, Value
from batcher.whatif.limits import num_blocks, num_tokens
from batcher.whatif.search import doublings

Searched = Literal["batch", "kv_blocks", "max_batch_tokens", "rate"]

STEPS_OF_DOUBLING = 64
MAX_DOUBLINGS = 10  # of a rate, up and down


class Ladder:
    """The values of what is `searched` in deployments that are as `base` otherwise.

    rungs: the numbers of the first tries, ascending; they are the bounds, too.
    start: the place of the very first.
    """

    def __init__(self, workload: Workload, base: Deployment, searched: Searched) -> None:
        self.base, self.searched = base, searched
        self.rungs, self.start = self._make_rungs(workload)

    def value_of(self, number: int) -> Value:
        """Return what a whole number stands for."""
        return 2 ** (-number / STEPS_OF_DOUBLING) if self.searched == "rate" else number

    def step_at(self, number: int) -> int:
        """Return how far from `number` another one is that differs by about a hundredth."""
        return 1 if self.searched == "rate" else max(1, number // STEPS_OF_DOUBLING)

    def deployment_of(self, number: int, base: Deployment | None = None) -> Deployment:
        """Return the deployment with that value; `base`: as it is otherwise."""
        base, value = base or self.base, self.value_of(number)
        if self.searched == "rate":
            return replace(base, rate=value)
        return AXES[self.searched].set(base, value)

    def _make_rungs(self, workload: Workload) -> tuple[Sequence[int], int]:
        """Return the numbers of the first tries, and the place of the very first.

        Raises:
            BatchdecodeError: there is nothing to search.
        """
        scheduling = self.base.scheduling
        if self.searched == "rate":
            if rate_of(workload) is None:
                raise BatchdecodeError("--search rate: all requests arrive at once")
            bound = STEPS_OF_DOUBLING * MAX_DOUBLINGS
            return range(-bound, bound + 1, STEPS_OF_DOUBLING), MAX_DOUBLINGS
        if self.searched == "batch":
            most = min(len(workload.jobs), MAX_BATCH, scheduling.max_batch_tokens or MAX_BATCH)
            return doublings(1, max(1, most)), 0
        if self.searched == "max_batch_tokens":
            first = max(self.base.batch, scheduling.block_size if scheduling.is_paged else 1)
            most = num_tokens(workload)
            return doublings(first, max(first, most)), 0
        most = num_blocks(workload, scheduling.block_size)
        return doublings(1, max(1, most)), 0


def rate_of(workload: Workload) -> float | None:
    """Return the mean rate of arrivals, requests a second; None if all arrive at once."""
    arrivals = [job.arrival_time for job in workload.jobs if not job.index]
    first, last = min(arrivals, default=0.0), max(arrivals, default=0.0)
    return (len(arrivals) - 1) / (last - first) if last > first else None
