"""A step time below which no step goes, as where the host launches kernels one by one.

Rule: of steps that only decode each takes as long as the one before or longer, so those that are
lifted come first.
"""

from typing import Any

from batcher.timing.formulas import TICKS_PER_MILLISECOND, whole_ticks
from batcher.timing.step_time import RankTicks, StepTime


class LeastStepTime:
    """A step takes what `step_time` says, but at least `least` milliseconds."""

    __slots__ = ("_least", "_step_time", "name", "settings")

    def __init__(self, step_time: StepTime, least: float) -> None:
        self.name = step_time.name
        self.settings: dict[str, Any] = step_time.settings | {"least": least}
        self._step_time = step_time
        self._least = max(whole_ticks(least, TICKS_PER_MILLISECOND), 1)

    def ticks(self, num_tokens: int, num_sequences: int, kv_read: int, prefill_work: int) -> int:
        """Return how long a step takes."""
        return max(
            self._step_time.ticks(num_tokens, num_sequences, kv_read, prefill_work), self._least
        )

    def ticks_of_decodes(self, num_sequences: int, kv_read: int, num_steps: int) -> int:
        """Return the sum over `num_steps` steps in which so many rows decode, and nothing else."""
        lifted = self._num_lifted(num_sequences, kv_read, num_steps)
        rest = self._step_time.ticks_of_decodes(
            num_sequences, kv_read + lifted * num_sequences, num_steps - lifted
        )
        return lifted * self._least + rest

    def num_decodes_until(self, num_sequences: int, kv_read: int, ticks: int) -> int:
        """Return the least number of such steps that take `ticks` together."""
        enough = -(-ticks // self._least)  # if all of them were lifted
        lifted = self._num_lifted(num_sequences, kv_read, enough)
        if lifted == enough:
            return enough
        rest = self._step_time.num_decodes_until(
            num_sequences, kv_read + lifted * num_sequences, ticks - lifted * self._least
        )
        return lifted + rest

    def of_rank(self, num_ranks: int) -> RankTicks | None:
        """Return what a step takes a rank, but at least the least; None if there are no experts."""
        ticks, least = self._step_time.of_rank(num_ranks), self._least
        return None if ticks is None else lambda *stats: max(ticks(*stats), least)

    def _num_lifted(self, num_sequences: int, kv_read: int, num_steps: int) -> int:
        """Return how many of the first `num_steps` steps would be shorter than the least."""
        low, high = 0, num_steps
        while low < high:
            step = (low + high) // 2
            read = kv_read + step * num_sequences
            if self._step_time.ticks(num_sequences, num_sequences, read, 0) < self._least:
                low = step + 1
            else:
                high = step
        return low
