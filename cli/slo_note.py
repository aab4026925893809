"""What is said of an SLO that may not be meant as it is written."""

from collections.abc import Sequence

from batcher.metrics.slo import doubtful_limits

from .running.problems import say


def say_of_slo(texts: Sequence[str]) -> None:
    """Say which limits are that many seconds, in a run whose steps take as long as real ones."""
    for remark in doubtful_limits(texts):
        say(f"--slo: {remark}\n")
