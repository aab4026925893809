"""The numbers of a run or a server as Prometheus reads them, by vLLM's names where it has them.

Rule: counters are fields of the summary, and histograms those that its latencies are read from, so
nothing is counted twice, and they are equal.  Times are seconds of the engine's clock, on which a
step lasts 1.0 unless something says otherwise.  docs/observability.md has the table.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from threading import Lock
from typing import NamedTuple

from msgspec.structs import asdict
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from batcher.events import Event, RunEvent
from batcher.metrics.summary import (
    EndedTotals,
    EngineState,
    RunMetrics,
    RunSummary,
    RunTotals,
    TimedTotals,
    WatchedEngine,
    state_of,
    summarize,
)
from batcher.metrics.times import MICROSECONDS, Histogram
from batcher.request import NOTHING_UNREAD, Unread

LABELS = ("model_name", "engine")  # of every metric
SECONDS = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5]
SECONDS += [10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0]
TOKENS = [float(number * 10**power) for power in range(6) for number in (1, 2, 5)]


class Gauge(NamedTuple):
    """A number of the moment."""

    words: str
    read: Callable[[EngineState], float]


class Count(NamedTuple):
    """A number that only grows, or several that `label` tells apart; None where there is none."""

    words: str
    read: Callable[[RunSummary, EndedTotals], int | Mapping[str, int] | None]
    label: str | None = None


class Spread(NamedTuple):
    """How a number is distributed.

    scale: how many of the units that are counted make one of those that are told.
    """

    words: str
    read: Callable[[TimedTotals, EndedTotals], Histogram]
    bounds: Sequence[float] = SECONDS
    scale: int = MICROSECONDS


def _success(summary: RunSummary, ended: EndedTotals) -> dict[str, int]:
    """Return what has ended, samples that are no results included: a count never goes down."""
    reasons, dropped = summary.finish_reasons, ended.dropped
    return {
        "stop": reasons.stop + dropped["stop"],
        "length": reasons.length + dropped["length"],
        "abort": reasons.aborted + dropped["aborted"],
        "error": reasons.error + dropped["error"],
    }


def _drafts(name: str) -> Callable[[RunSummary, EndedTotals], int | None]:
    return lambda s, _: None if s.speculation is None else getattr(s.speculation, name)


def _accepted_by_position(summary: RunSummary, _: EndedTotals) -> dict[str, int] | None:
    if summary.speculation is None:
        return None
    return {str(place): one.accepted for place, one in enumerate(summary.speculation.by_position)}


WAITING, NOT_ARRIVED = "vllm:num_requests_waiting", "batchdecode_requests_not_arrived"
GAUGES = {
    "vllm:num_requests_running": Gauge("Slots that are held.", lambda e: e.num_running),
    WAITING: Gauge("Outputs that have arrived and wait for a slot.", lambda e: e.num_waiting),
    NOT_ARRIVED: Gauge("Outputs that are known and have not arrived.", lambda e: e.num_coming),
    "vllm:kv_cache_usage_perc": Gauge(
        "Share of the KV blocks that sequences hold.", lambda e: e.kv_share
    ),
    "batchdecode_slots": Gauge("Slots that there are.", lambda e: e.num_slots),
}
COUNTS = {
    "vllm:prompt_tokens": Count(
        "Tokens of the prompts of requests that have arrived.", lambda s, _: s.prompt_tokens
    ),
    "vllm:generation_tokens": Count(
        "Tokens of outputs that have ended.",
        lambda s, ended: s.generated_tokens + ended.lost_tokens,
    ),
    "vllm:request_success": Count("Outputs that have ended.", _success, "finished_reason"),
    "batchdecode_dropped_samples": Count(
        "Samples of best_of among them that are no results.",
        lambda _, ended: ended.dropped,
        "finished_reason",
    ),
    "vllm:num_preemptions": Count(
        "Times a sequence lost its slot and had to wait again.",
        lambda s, _: 0 if s.preemptions is None else s.preemptions.count,
    ),
    "vllm:prefix_cache_queries": Count(
        "Tokens looked for in the prefix cache, at first admissions.",
        lambda s, _: None if s.prefix_cache is None else s.prefix_cache.asked,
    ),
    "vllm:prefix_cache_hits": Count(
        "How many of them were found.",
        lambda s, _: None if s.prefix_cache is None else s.prefix_cache.found,
    ),
    "vllm:spec_decode_num_drafts": Count(
        "Times that a step verified drafts of a row.", _drafts("steps")
    ),
    "vllm:spec_decode_num_draft_tokens": Count("Drafts.", _drafts("drafted")),
    "vllm:spec_decode_num_accepted_tokens": Count("Drafts accepted.", _drafts("accepted")),
    "vllm:spec_decode_num_accepted_tokens_per_pos": Count(
        "Drafts accepted, by their position from 0.", _accepted_by_position, "position"
    ),
    "batchdecode_steps": Count("Steps that were taken.", lambda s, _: s.steps),
    "batchdecode_blocked_steps": Count(
        "Steps in which a slot was free and the first of the queue not admitted.",
        lambda s, _: None if s.blocked is None else asdict(s.blocked),
        "reason",
    ),
}
SPREADS = {
    "vllm:time_to_first_token_seconds": Spread(
        "From arrival to the first token.", lambda t, _: t.times["ttft"].counts
    ),
    "vllm:inter_token_latency_seconds": Spread(
        "From a token to the next one of the same output.", lambda t, _: t.times["itl"].counts
    ),
    "vllm:request_time_per_output_token_seconds": Spread(
        "Mean time of a token of an output after its first.", lambda t, _: t.times["tpot"].counts
    ),
    "vllm:e2e_request_latency_seconds": Spread(
        "From arrival to the last token.", lambda t, _: t.times["e2e"].counts
    ),
    "vllm:request_queue_time_seconds": Spread(
        "From arrival to a slot.", lambda t, _: t.times["queue"].counts
    ),
    "vllm:request_prompt_tokens": Spread(
        "Tokens of the prompts of requests that have ended.",
        lambda _, ended: ended.prompts,
        TOKENS,
        1,
    ),
    "vllm:request_generation_tokens": Spread(
        "Tokens of outputs that have ended.", lambda _, ended: ended.outputs, TOKENS, 1
    ),
}


class RunCollector:
    """Tells Prometheus how a run stands, or a server; whoever has its events hands them over.

    Any thread may ask.  engine: what gauges are read from.  labels: the values of LABELS.
    backlog: returns what the engine is still to be told of.
    """

    def __init__(
        self,
        metrics: RunMetrics,
        engine: WatchedEngine,
        labels: tuple[str, str],
        backlog: Callable[[], Unread] = lambda: NOTHING_UNREAD,
    ) -> None:
        self.metrics = metrics
        self._engine, self._labels, self._backlog = engine, labels, backlog
        self._num_steps = 0  # that were taken when events came last; of these all are known
        self._lock = Lock()

    def observe(self, events: Iterable[Event]) -> None:
        with self._lock:
            self.metrics.observe(events)
            self._num_steps = self._engine.num_steps

    def collect(self) -> Iterator[Metric]:
        state = state_of(self._engine, self._backlog())
        with self._lock:
            totals, run = self.metrics.totals(self._num_steps).copy(), self.metrics.run
        yield from engine_metrics(state, totals, run, self._labels)


class WorkersCollector:
    """Tells Prometheus how a run of several workers stands, each of them as an engine of its own.

    Any thread may ask.  lock: held by whoever changes what there is to tell.
    states: how each of them stands.  backlog: returns what is with no engine.
    """

    def __init__(
        self,
        metrics: RunMetrics,
        model: str,
        states: Sequence[EngineState],
        backlog: Callable[[], Unread],
    ) -> None:
        self.lock = Lock()
        self._metrics, self._model = metrics, model
        self._states, self._backlog = states, backlog

    def collect(self) -> Iterator[Metric]:
        """Yield all there is to tell; the label `engine` of what no engine has is empty."""
        with self.lock:
            states, run = list(self._states), self._metrics.run
            all_totals = [worker.totals().copy() for worker in self._metrics.workers]
        engines: list[Iterable[Metric]] = [
            engine_metrics(state, totals, run, (self._model, str(number)))
            for number, (state, totals) in enumerate(zip(states, all_totals, strict=True))
        ]
        nobody = (self._model, "")
        engines += [
            [_gauge(name, GAUGES[name].words, count, nobody)]
            for name, count in zip((WAITING, NOT_ARRIVED), self._backlog(), strict=True)
        ]
        yield from joined(engines)


def engine_metrics(
    state: EngineState, totals: RunTotals, run: RunEvent | None, labels: tuple[str, str]
) -> Iterator[Metric]:
    """Yield what there is to tell of an engine that stands so and has done that."""
    for name, (words, read) in GAUGES.items():
        yield _gauge(name, words, read(state), labels)
    summary, ended = summarize(totals, run), totals.ended or EndedTotals()
    for name, (words, count, label) in COUNTS.items():
        counted = count(summary, ended)
        if isinstance(counted, int):
            counter = CounterMetricFamily(name, words, labels=LABELS)
            counter.add_metric(labels, counted)
            yield counter
        elif counted is not None and label is not None:
            counter = CounterMetricFamily(name, words, labels=(*LABELS, label))
            for key, value in counted.items():
                counter.add_metric((*labels, key), value)
            yield counter
    if totals.timed is not None:  # it is before any event
        for name, (words, spread, bounds, scale) in SPREADS.items():
            histogram = HistogramMetricFamily(name, words, labels=LABELS)
            histogram.add_metric(labels, *buckets_of(spread(totals.timed, ended), bounds, scale))
            yield histogram


def joined(engines: Iterable[Iterable[Metric]]) -> Iterator[Metric]:
    """Yield what is told of several engines, all of one name together."""
    families: dict[str, Metric] = {}
    for told in engines:
        for family in told:
            known = families.setdefault(family.name, family)
            if known is not family:
                known.samples += family.samples
    yield from families.values()


def _gauge(name: str, words: str, value: float, labels: tuple[str, str]) -> Metric:
    family = GaugeMetricFamily(name, words, labels=LABELS)
    family.add_metric(labels, value)
    return family


def buckets_of(
    counted: Histogram, bounds: Sequence[float], scale: int
) -> tuple[list[tuple[str, float]], float]:
    """Return for each bound how many do not exceed it, for no bound how many there are; their sum.

    A number above 4,096 units may be counted with a bound that it exceeds by less than 0.05 %.
    """
    values = sorted(counted.counts)
    totals = [0, *accumulate(counted.counts[value] for value in values)]
    buckets = []
    for bound in bounds:
        name: str = floatToGoString(bound)  # type: ignore[no-untyped-call]  # it has no types
        buckets.append((name, float(totals[bisect_right(values, round(bound * scale))])))
    return [*buckets, ("+Inf", float(totals[-1]))], counted.sum / scale
