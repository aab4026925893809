"""The numbers of a run or a server as Prometheus reads them, by vLLM's names where it has them.

Rule: counters are fields of the summary, and histograms those that its latencies are read from, so
nothing is counted twice, and they are equal.  Times are seconds of the engine's clock, on which a
step lasts 1.0 unless something says otherwise.  docs/observability.md has the table.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple

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


class Number(NamedTuple):
    """One metric: its help text, and how it is read.

    label: what tells several counts of one name apart.  bounds, scale: of a histogram; scale: how
    many of the units that are counted make one of those that are told.
    """

    words: str
    read: Callable[..., Any]
    label: str | None = None
    bounds: Sequence[float] = SECONDS
    scale: int = MICROSECONDS


def _at(path: str, default: int | None = None) -> Callable[..., Any]:
    """Return what reads a number of the summary; `default` where the summary has no such part."""
    part, _, name = path.rpartition(".")

    def read(summary: RunSummary, _: EndedTotals) -> Any:
        record = getattr(summary, part) if part else summary
        return default if record is None else getattr(record, name)

    return read


def _success(summary: RunSummary, ended: EndedTotals) -> dict[str, int]:
    """Return what has ended, samples that are no results included: a count never goes down."""
    names = {"stop": "stop", "length": "length", "abort": "aborted", "error": "error"}
    reasons, dropped = summary.finish_reasons, ended.dropped
    return {name: getattr(reasons, own) + dropped[own] for name, own in names.items()}


def _accepted_by_position(summary: RunSummary, _: EndedTotals) -> dict[str, int] | None:
    if summary.speculation is None:
        return None
    return {str(place): one.accepted for place, one in enumerate(summary.speculation.by_position)}


WAITING, NOT_ARRIVED = "vllm:num_requests_waiting", "batchdecode_requests_not_arrived"
GAUGES = {  # of an EngineState
    "vllm:num_requests_running": Number("Slots that are held.", attrgetter("num_running")),
    WAITING: Number("Outputs that have arrived and wait for a slot.", attrgetter("num_waiting")),
    NOT_ARRIVED: Number("Outputs that are known and have not arrived.", attrgetter("num_coming")),
    "vllm:kv_cache_usage_perc": Number(
        "Share of the KV blocks that sequences hold.", attrgetter("kv_share")
    ),
    "batchdecode_slots": Number("Slots that there are.", attrgetter("num_slots")),
}
COUNTS = {  # of a RunSummary and the EndedTotals; None where there is none
    "vllm:prompt_tokens": Number(
        "Tokens of the prompts of requests that have arrived.", _at("prompt_tokens")
    ),
    "vllm:generation_tokens": Number(
        "Tokens of outputs that have ended.",
        lambda s, ended: s.generated_tokens + ended.lost_tokens,
    ),
    "vllm:request_success": Number("Outputs that have ended.", _success, "finished_reason"),
    "batchdecode_dropped_samples": Number(
        "Samples of best_of among them that are no results.",
        lambda _, ended: ended.dropped,
        "finished_reason",
    ),
    "vllm:num_preemptions": Number(
        "Times a sequence lost its slot and had to wait again.", _at("preemptions.count", 0)
    ),
    "vllm:prefix_cache_queries": Number(
        "Tokens looked for in the prefix cache, at first admissions.", _at("prefix_cache.asked")
    ),
    "vllm:prefix_cache_hits": Number("How many of them were found.", _at("prefix_cache.found")),
    "vllm:spec_decode_num_drafts": Number(
        "Times that a step verified drafts of a row.", _at("speculation.steps")
    ),
    "vllm:spec_decode_num_draft_tokens": Number("Drafts.", _at("speculation.drafted")),
    "vllm:spec_decode_num_accepted_tokens": Number("Drafts accepted.", _at("speculation.accepted")),
    "vllm:spec_decode_num_accepted_tokens_per_pos": Number(
        "Drafts accepted, by their position from 0.", _accepted_by_position, "position"
    ),
    "batchdecode_steps": Number("Steps that were taken.", _at("steps")),
    "batchdecode_blocked_steps": Number(
        "Steps in which a slot was free and the first of the queue not admitted.",
        lambda s, _: None if s.blocked is None else asdict(s.blocked),
        "reason",
    ),
}
SPREADS = {  # of the TimedTotals and the EndedTotals
    name: Number(words, lambda timed, _, key=key: timed.times[key])
    for name, key, words in (
        ("vllm:time_to_first_token_seconds", "ttft", "From arrival to the first token."),
        (
            "vllm:inter_token_latency_seconds",
            "itl",
            "From a token to the next one of the same output.",
        ),
        (
            "vllm:request_time_per_output_token_seconds",
            "tpot",
            "Mean time of a token of an output after its first.",
        ),
        ("vllm:e2e_request_latency_seconds", "e2e", "From arrival to the last token."),
        ("vllm:request_queue_time_seconds", "queue", "From arrival to a slot."),
    )
} | {
    "vllm:request_prompt_tokens": Number(
        "Tokens of the prompts of requests that have ended.",
        lambda _, ended: ended.prompts,
        bounds=TOKENS,
        scale=1,
    ),
    "vllm:request_generation_tokens": Number(
        "Tokens of outputs that have ended.", lambda _, ended: ended.outputs, bounds=TOKENS, scale=1
    ),
}


class RunCollector:
    """Tells Prometheus, in any thread, how a run or a server stands, whose events it is handed.

    engine: what gauges are read from.  labels: the values of LABELS.  backlog: what is unread.
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
    for name, gauge in GAUGES.items():
        yield _gauge(name, gauge.words, gauge.read(state), labels)
    summary, ended = summarize(totals, run), totals.ended or EndedTotals()
    for name, count in COUNTS.items():
        counted = count.read(summary, ended)
        if counted is not None:
            own = [] if count.label is None else [count.label]
            counter = CounterMetricFamily(name, count.words, labels=(*LABELS, *own))
            for key, value in counted.items() if own else [("", counted)]:
                counter.add_metric([*labels, key] if own else labels, value)
            yield counter
    if totals.timed is not None:  # it is before any event
        for name, spread in SPREADS.items():
            histogram = HistogramMetricFamily(name, spread.words, labels=LABELS)
            buckets = buckets_of(spread.read(totals.timed, ended), spread.bounds, spread.scale)
            histogram.add_metric(labels, *buckets)
            yield histogram


def joined(engines: Iterable[Iterable[Metric]]) -> Iterator[Metric]:
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
