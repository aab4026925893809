"""The numbers of a run or a server as Prometheus metrics, under vLLM's names where vLLM has them.

Counters are numbers of the summary, and histograms those of its latencies, so nothing is counted
twice.  Times are seconds of the engine's clock.  docs/guide/observability.md has the table.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple, get_args

from msgspec import Struct, field
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from batcher.events import BlockedReason, Event, RunEvent
from batcher.metrics.summary import EngineState, RunMetrics, RunTotals, Summary, state_of
from batcher.metrics.times import MICROSECONDS, Histogram
from batcher.request import NOTHING_UNREAD, Unread

LABELS = ("model_name", "engine")  # of every metric
SECONDS = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5]
SECONDS += [10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0]
TOKENS = [float(number * 10**power) for power in range(6) for number in (1, 2, 5)]


class Number(NamedTuple):
    """A metric: its help text, and how to read its value.

    label: the key of several values.  bounds: of a histogram; scale: its counted units per unit.
    """

    words: str
    read: Callable[..., Any]
    label: str | None = None
    bounds: Sequence[float] = SECONDS
    scale: int = MICROSECONDS


def _of(part: str, name: str) -> Callable[[Summary, RunTotals], Any]:
    def read(summary: Summary, _: RunTotals) -> Any:
        found = getattr(summary, part)
        return None if found is None else getattr(found, name)

    return read


def _success(summary: Summary, totals: RunTotals) -> dict[str, int]:
    """Return the ended outputs, dropped samples included: a counter never decreases."""
    names = {"stop": "stop", "length": "length", "abort": "aborted", "error": "error"}
    reasons, dropped = summary.finish_reasons, totals.dropped
    return {name: reasons[own] + dropped[own] for name, own in names.items()}


def _accepted_by_position(summary: Summary, _: RunTotals) -> dict[str, int] | None:
    if summary.speculation is None:
        return None
    return {str(place): one.accepted for place, one in enumerate(summary.speculation.by_position)}


def _blocked(summary: Summary, _: RunTotals) -> dict[str, int] | None:
    blocked = summary.blocked
    return None if blocked is None else {r: blocked.get(r, 0) for r in get_args(BlockedReason)}


WAITING, NOT_ARRIVED = "vllm:num_requests_waiting", "batchdecode_requests_not_arrived"
GAUGES = {  # of an EngineState
    "vllm:num_requests_running": Number("Occupied slots.", attrgetter("num_running")),
    WAITING: Number("Outputs that have arrived and wait for a slot.", attrgetter("num_waiting")),
    NOT_ARRIVED: Number("Known outputs that have not arrived.", attrgetter("num_coming")),
    "vllm:kv_cache_usage_perc": Number("Share of KV blocks in use.", attrgetter("kv_share")),
    "batchdecode_slots": Number("Slots.", attrgetter("num_slots")),
}
COUNTS = {  # of a Summary and the RunTotals; None: not reported
    "vllm:prompt_tokens": Number(
        "Prompt tokens of requests that have arrived.", lambda s, _: s.prompt_tokens
    ),
    "vllm:generation_tokens": Number(
        "Tokens of outputs that have ended.", lambda s, t: s.generated_tokens + t.lost_tokens
    ),
    "vllm:request_success": Number("Outputs that have ended.", _success, "finished_reason"),
    "batchdecode_dropped_samples": Number(
        "Dropped samples of best_of among them.", lambda _, t: t.dropped, "finished_reason"
    ),
    "vllm:num_preemptions": Number(
        "Preemptions.", lambda s, _: s.preemptions.count if s.preemptions else 0
    ),
    "vllm:prefix_cache_queries": Number(
        "Tokens looked for in the prefix cache, at first admissions.", _of("prefix_cache", "asked")
    ),
    "vllm:prefix_cache_hits": Number(
        "Tokens found in the prefix cache, at first admissions.", _of("prefix_cache", "found")
    ),
    "vllm:spec_decode_num_drafts": Number(
        "Times a step verified drafts of a row.", _of("speculation", "steps")
    ),
    "vllm:spec_decode_num_draft_tokens": Number("Drafts.", _of("speculation", "drafted")),
    "vllm:spec_decode_num_accepted_tokens": Number(
        "Accepted drafts.", _of("speculation", "accepted")
    ),
    "vllm:spec_decode_num_accepted_tokens_per_pos": Number(
        "Accepted drafts by their position, from 0.", _accepted_by_position, "position"
    ),
    "batchdecode_steps": Number("Steps.", lambda s, _: s.steps),
    "batchdecode_blocked_steps": Number(
        "Steps with a free slot that did not admit the first queued request.", _blocked, "reason"
    ),
}
LATENCIES = {
    "vllm:time_to_first_token_seconds": ("ttft", "From arrival to the first token."),
    "vllm:inter_token_latency_seconds": ("itl", "From a token to the next one of an output."),
    "vllm:request_time_per_output_token_seconds": ("tpot", "Mean time per token after the first."),
    "vllm:e2e_request_latency_seconds": ("e2e", "From arrival to the last token."),
    "vllm:request_queue_time_seconds": ("queue", "From arrival to a slot."),
}
SPREADS = {  # of the RunTotals
    name: Number(words, lambda totals, key=key: totals.times[key])
    for name, (key, words) in LATENCIES.items()
} | {
    "vllm:request_prompt_tokens": Number(
        "Prompt tokens of requests that have ended.", lambda t: t.prompts, None, TOKENS, 1
    ),
    "vllm:request_generation_tokens": Number(
        "Tokens of outputs that have ended.", lambda t: t.outputs, None, TOKENS, 1
    ),
}


class RunCollector(Struct, eq=False):
    """Counts the events of a run or a server, and reports its metrics in any thread.

    engine: for the gauges.  labels: values of LABELS.  backlog: returns the unread requests.
    """

    metrics: RunMetrics
    engine: Any
    labels: tuple[str, str]
    backlog: Callable[[], Unread] = lambda: NOTHING_UNREAD
    num_steps: int = 0  # at the newest events; all events of these steps are known
    lock: Any = field(default_factory=Lock)

    def observe(self, events: Iterable[Event]) -> None:
        with self.lock:
            self.metrics.observe(events)
            self.num_steps = self.engine.num_steps

    def collect(self) -> Iterator[Metric]:
        state = state_of(self.engine, self.backlog())
        with self.lock:
            totals, run = self.metrics.totals(self.num_steps).copy(), self.metrics.run
        yield from engine_metrics(state, totals, run, self.labels)


class WorkersCollector(Struct, eq=False):
    """Reports the metrics of a run of several workers in any thread, each worker as an engine.

    states: of the workers.  backlog: the requests of no worker.
    """

    metrics: RunMetrics
    model: str
    states: Sequence[EngineState]
    backlog: Callable[[], Unread]
    lock: Any = field(default_factory=Lock)

    def observe(self, events: Iterable[Event]) -> None:
        with self.lock:
            self.metrics.observe(events)

    def collect(self) -> Iterator[Metric]:
        with self.lock:
            states, run = list(self.states), self.metrics.run
            all_totals = [worker.totals().copy() for worker in self.metrics.workers]
        engines: list[Iterable[Metric]] = [
            engine_metrics(state, totals, run, (self.model, str(number)))
            for number, (state, totals) in enumerate(zip(states, all_totals, strict=True))
        ]
        backlog = zip((WAITING, NOT_ARRIVED), self.backlog(), strict=True)
        engines.append(_gauge(name, count, (self.model, "")) for name, count in backlog)
        yield from joined(engines)


def engine_metrics(
    state: EngineState, totals: RunTotals, run: RunEvent | None, labels: tuple[str, str]
) -> Iterator[Metric]:
    yield from (_gauge(name, gauge.read(state), labels) for name, gauge in GAUGES.items())
    summary = totals.report(run)
    for name, count in COUNTS.items():
        counted = count.read(summary, totals)
        if counted is not None:
            own = [] if count.label is None else [count.label]
            counter = CounterMetricFamily(name, count.words, labels=(*LABELS, *own))
            for key, value in counted.items() if own else [("", counted)]:
                counter.add_metric([*labels, key] if own else labels, value)
            yield counter
    for name, spread in SPREADS.items() if totals.times else ():  # no times before the run event
        histogram = HistogramMetricFamily(name, spread.words, labels=LABELS)
        buckets = buckets_of(spread.read(totals), spread.bounds, spread.scale)
        histogram.add_metric(labels, *buckets)
        yield histogram


def joined(engines: Iterable[Iterable[Metric]]) -> Iterator[Metric]:
    """Yield the metrics of several engines, the samples of one name together."""
    families: dict[str, Metric] = {}
    for metrics in engines:
        for family in metrics:
            known = families.setdefault(family.name, family)
            if known is not family:
                known.samples += family.samples
    yield from families.values()


def _gauge(name: str, value: float, labels: tuple[str, str]) -> Metric:
    family = GaugeMetricFamily(name, GAUGES[name].words, labels=LABELS)
    family.add_metric(labels, value)
    return family


def buckets_of(
    counted: Histogram, bounds: Sequence[float], scale: int
) -> tuple[list[tuple[str, float]], float]:
    """Return the count at or below each bound, the total count as +Inf, and the sum.

    A number above 4,096 units may exceed its bound by less than 0.05%.
    """
    values = sorted(counted.counts)
    totals = [0, *accumulate(counted.counts[value] for value in values)]
    buckets = []
    for bound in bounds:
        name: str = floatToGoString(bound)  # type: ignore[no-untyped-call]  # it has no types
        buckets.append((name, float(totals[bisect_right(values, round(bound * scale))])))
    return [*buckets, ("+Inf", float(totals[-1]))], counted.sum / scale
