"""What a plan knows by the time somebody stops it: the values tried, or all but what would help."""

from collections.abc import Callable

from batcher.planning.deployments import Value
from batcher.planning.plan import Plan, Trial
from batcher.planning.search import Searched

from ..screen.terminal import counted
from .columns import good_percent


class SoFar:
    """Takes in what a search finds.

    found: the plan, once the search is over.
    """

    def __init__(self, searched: Searched, asked: float, named: Callable[[Value], str]) -> None:
        self._searched, self._asked, self._named = searched, asked, named
        self._trials: list[Trial] = []
        self.found: Plan | None = None

    def add(self, trial: Trial) -> None:
        """Take in a value that was tried."""
        self._trials.append(trial)

    def tell(self) -> str:
        """Return a line that says what was tried, and what of it is enough."""
        if not self._trials:
            return "stopped before any value was tried\n"
        trials = sorted(self._trials, key=lambda trial: trial.value)
        tried = ", ".join(
            f"{self._named(trial.value)} ({good_percent(trial.share)})" for trial in trials
        )
        enough = [trial.value for trial in trials if trial.share >= self._asked]
        best = "none meets the SLO by now"
        if enough:
            is_rate = self._searched == "rate"
            value = max(enough) if is_rate else min(enough)
            kind = "largest" if is_rate else "smallest"
            best = f"{self._named(value)} is the {kind} that meets the SLO by now"
        count = counted(len(trials), "value")
        asked = f"{self._asked * 100:g}% is asked"
        return f"stopped after {count}: {best}; tried {tried}, {asked}\n"
