"""Every number that a summary or a time series may hold is defined in docs/metrics.md."""

import re
from pathlib import Path

import pytest

from batcher.metrics import counts, times
from batcher.metrics.slo import METRICS, UNITS, Goodput
from batcher.metrics.summary import RunSummary, Throughput

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
DOCUMENTED = set(re.findall(r"`([^`\n]+)`", PAGE))
RECORDS = [Goodput, Throughput, times.Distribution, times.Latencies, times.SeriesRow]
RECORDS += [counts.BlockedSteps, counts.BudgetUse, counts.Computed, counts.DraftChanges]
RECORDS += [counts.KvUse, counts.PositionAcceptance, counts.Preemptions, counts.PrefixHits]
RECORDS += [counts.Speculation, counts.Speedup]


@pytest.mark.parametrize("record", RECORDS)
def test_every_field_is_defined(record):
    assert set(record.__struct_fields__) <= DOCUMENTED


def test_every_optional_part_of_the_summary_is_defined():
    optional = RunSummary.__struct_fields__[-14:-3]
    assert optional[0] == "latencies"
    assert set(optional) <= DOCUMENTED


def test_every_metric_and_unit_of_an_slo_is_named():
    assert {*METRICS, *filter(None, UNITS)} <= DOCUMENTED
