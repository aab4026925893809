"""The numbers of a run: its summary, its latencies and what it used, from events alone.

Rule: the events are enough, live or from a trace; docs/metrics.md defines every number.
"""

from batcher.metrics.distributions import Distribution, Histogram, SecondsDistribution
from batcher.metrics.latencies import Latencies
from batcher.metrics.run_metrics import RunMetrics
from batcher.metrics.slo import Goodput, Slo, parse_slo
from batcher.metrics.slots import IdleCauses
from batcher.metrics.summary import (
    ConstraintCounts,
    FinishCounts,
    RunSummary,
    Throughput,
    encode_summary,
)

__all__ = [
    "ConstraintCounts",
    "Distribution",
    "FinishCounts",
    "Goodput",
    "Histogram",
    "IdleCauses",
    "Latencies",
    "RunMetrics",
    "RunSummary",
    "SecondsDistribution",
    "Slo",
    "Throughput",
    "encode_summary",
    "parse_slo",
]
