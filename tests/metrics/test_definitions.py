"""The documentation defines every number, and the dashboard asks Prometheus only for those."""

import json
import re
from pathlib import Path
from typing import get_args

import promql_parser
import pytest

from batcher.events import BlockedReason, SpeculateReason
from batcher.metrics import counts, summary, times
from batcher.metrics.prometheus import COUNTS, GAUGES, LABELS, SPREADS
from batcher.metrics.slo import METRICS, UNITS, Goodput

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTED = set(re.findall(r"`([^`\n]+)`", (DOCS / "reference/metrics.md").read_text()))
RECORDS = [summary.Summary, summary.Positions, summary.Constraints, summary.Throughput]
RECORDS += [summary.BudgetUse, summary.Computed, summary.KvUse, summary.Preemptions]
RECORDS += [summary.PrefixHits, summary.WorkerSummary, summary.WallTime, times.Distribution]
RECORDS += [counts.PositionAcceptance, counts.Speculation, counts.Speedup, Goodput, times.Latencies]


def test_every_number_is_defined():
    names = {name for record in RECORDS for name in record.__struct_fields__}
    names |= {*times.COLUMNS, *METRICS, *filter(None, UNITS)}
    names |= {*get_args(BlockedReason), *get_args(SpeculateReason)}
    assert names <= DOCUMENTED


DASHBOARD = json.loads((DOCS.parent / "samples/grafana/batchdecode.json").read_text())
NAMES = {*GAUGES, *(f"{name}_total" for name in COUNTS)}
NAMES |= {f"{name}_{of}" for name in SPREADS for of in ("bucket", "sum", "count")}
OWN_LABELS = {f"{name}_total": {count.label} for name, count in COUNTS.items() if count.label}
OWN_LABELS |= {f"{name}_bucket": {"le"} for name in SPREADS}
TARGETS = [
    pytest.param(target["expr"], id=f"{panel['title']}: {target['legendFormat']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]


def parts_of(expression):
    """Yield an expression and all that it is made of."""
    yield expression
    found = [getattr(expression, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for part in [*found, *getattr(expression, "args", ())]:
        if part is not None:
            yield from parts_of(part)


@pytest.mark.parametrize("expression", TARGETS)
def test_a_panel_asks_for_metrics_that_there_are(expression):
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    parts = list(parts_of(parsed))
    names = {part.name for part in parts if isinstance(part, promql_parser.VectorSelector)}
    assert names
    assert names <= NAMES
    allowed = {"job", *LABELS}.union(*(OWN_LABELS.get(name, set()) for name in names))
    for part in parts:
        if isinstance(part, promql_parser.VectorSelector):
            assert {matcher.name for matcher in part.matchers.matchers} == {"job", "model_name"}
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            assert set(part.modifier.labels) <= allowed


def test_every_panel_reads_the_data_source_that_is_chosen():
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    assert set(variables) == {"datasource", "job", "model_name"}
    panels = DASHBOARD["panels"]
    assert {panel["id"] for panel in panels} == set(range(1, len(panels) + 1))
    for panel in panels:
        assert panel["datasource"] == chosen
        assert all(target["datasource"] == chosen for target in panel["targets"])
