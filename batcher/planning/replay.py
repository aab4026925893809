"""Simulates the log of a real run, of one or several engines, and compares the latencies."""

import json
from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.events import RunEvent
from batcher.metrics.times import EndedRequest, StepFeed, TokenTimes, is_untimed
from batcher.planning.fleet import Fleet
from batcher.planning.routers import DEFAULT_REPORT_INTERVAL, ReplicaView, Router
from batcher.planning.simulated_sequence import GREEDY, Piece, SimulatedSequence
from batcher.planning.simulator import FleetResult, ReplicaSettings
from batcher.planning.workload import Turns, Workload
from batcher.settings import DEFAULT_BLOCK_SIZE
from batcher.timing.profiles import usable_blocks
from batcher.trace.files import is_trace, read_numbered_trace
from batcher.trace.logs import (
    BENCH_RESULT,
    SPANS,
    LoggedRequest,
    events_of_log,
    kind_of_log,
    read_log,
    read_request_log,
)
from batcher.trace.run import RequestFold, TraceChecks, check_worker, label_of

NUM_DIGITS = 9  # decimals of seconds


def workload_of_log(log: list[LoggedRequest]) -> Workload:
    """Return the requests of a log as jobs; the first arrives at 0 s, and none shares a prefix."""
    first = log[0].queued_ts
    jobs = [
        SimulatedSequence(
            id=request.request_id,
            input_index=input_index,
            arrival_time=round(request.queued_ts - first, NUM_DIGITS),
            num_prompt_tokens=request.input_toks,
            num_tokens=request.input_toks,
            max_tokens=request.output_toks,
            output=Piece(request.output_toks, GREEDY),
        )
        for input_index, request in enumerate(log)
    ]
    return Workload(jobs)


class RequestsOfRun(NamedTuple):
    """Requests by arrival; batch: slots, or (is_of_client) the requests a client had in flight."""

    requests: list[LoggedRequest]
    batch: int | None
    is_of_client: bool = False


def read_requests(lines: Iterable[tuple[int, bytes]], name: str) -> RequestsOfRun:
    """Return the requests of a log of any kind or of a trace, given as (line number, line).

    Those of a trace are its finished samples.

    Raises:
        BatchdecodeError: it is neither, has no times, is inconsistent, or no request finished.
    """
    numbered = iter(lines)
    head = [line for _, line in zip(range(1), numbered, strict=False)]
    lines = chain(head, numbered)
    if head and kind_of_log(head[0][1]) in {BENCH_RESULT, SPANS}:
        events = events_of_log(read_log(lines, name))
    elif head and is_trace(head[0][1]):
        events = read_numbered_trace(lines, name, TraceChecks().complaint)
    else:
        return RequestsOfRun(read_request_log(lines, name), None)
    run = next(events)
    if not isinstance(run, RunEvent) or is_untimed(run):
        raise BatchdecodeError(
            f"{name}: its steps have no times; record a run with --profile, or with a server"
        )
    fold, ended = RequestFold(), list[EndedRequest]()
    workers = defaultdict[int | None, tuple[StepFeed, TokenTimes]](
        lambda: (StepFeed(run), TokenTimes())
    )
    for event in events:
        if isinstance(event, RunEvent):
            continue
        check_worker(event, run)
        feed, times = workers[event.worker]
        for step in feed.take(event, fold.take(event)):
            ended += times.observe(step)[1]
    for feed, times in workers.values():
        ended += times.interrupt(feed.take_events())
    requests = [
        LoggedRequest(
            request_id=label_of(each.finish.id, each.finish.index, each.finish.role),
            input_toks=each.finish.prompt_tokens or each.arrive.prompt_tokens,
            output_toks=each.finish.tokens,
            queued_ts=each.arrive.time,
            first_token_ts=each.arrive.time + (each.ttft or 0.0),
            last_token_ts=each.end,
        )
        for each in ended
        if each.is_ok and each.finish.tokens > 0
    ]
    if not requests:
        raise BatchdecodeError(f"{name}: no request finished")
    for request in requests:
        if not request.input_toks:
            raise BatchdecodeError(
                f"{name}: the length of the prompt of {request.request_id!r} is unknown"
            )
    requests.sort(key=lambda request: request.queued_ts)
    batch = run.batch if run.workers == 1 else None
    return RequestsOfRun(requests, batch, is_of_client=run.layout == "remote")


# -- the limits of a real run --------------------------------------------------------------------
#
# A JSON file next to the log has them under vLLM's names, at any depth.  Values in
# `resolved_config`, which vLLM used, come before others, and those in `engine_kwargs`, which were
# requested, come last; null is ignored.

MAX_BLOCKS, MAX_COUNT = 2**24, 2**31 - 1  # as of the options
RESOLVED, ASKED = "resolved_config", "engine_kwargs"
MAX_SHOWN = 80  # characters of a value


class Limit(Struct, frozen=True):
    """A setting as SchedulingSettings has it, or a batch, and its place in the file."""

    value: Any
    place: str


# Setting, field of the file, and the largest number, or bool.  The first field present counts.
_FIELDS: tuple[tuple[str, str, int | type[bool]], ...] = (
    ("batch", "max_num_seqs", 2**20),
    ("max_batch_tokens", "max_num_scheduled_tokens", MAX_COUNT),
    ("max_batch_tokens", "max_num_batched_tokens", MAX_COUNT),
    ("long_prefill_threshold", "long_prefill_token_threshold", MAX_COUNT),
    ("block_size", "block_size", 2**20),
    ("kv_blocks", "num_gpu_blocks", MAX_BLOCKS),
    ("kv_tokens", "num_kv_tokens", MAX_COUNT),
    ("prefix_cache", "enable_prefix_caching", bool),
    ("capacity", "scheduler_reserve_full_isl", bool),
)
NAMES = tuple(name for _, name, _ in _FIELDS)

# Fields that would change the schedule but are not simulated -> whether a value would.
_NOT_SIMULATED: dict[str, Callable[[Any], bool]] = {
    "policy": lambda value: value != "fcfs",
    "enable_chunked_prefill": lambda value: value is False,
    "pipeline_parallel_size": lambda value: value != 1,
    "data_parallel_size": lambda value: value != 1,
    "speculative_config": bool,
}


class RunMeta(Struct, frozen=True):
    """limits: by setting.  not_simulated: fields whose values are not simulated."""

    limits: dict[str, Limit]
    not_simulated: list[str]


def read_run_meta(content: bytes, name: str) -> RunMeta:
    """Return the limits in the file `name`, or raise a BatchdecodeError for wrong values."""
    try:
        meta = json.loads(content.removeprefix(BOM_UTF8).decode())
    except json.JSONDecodeError as error:
        place = f"{name}:{error.lineno}:{error.colno}"
        raise BatchdecodeError(f"{place}: not JSON: {error.msg.lower()}") from None
    except RecursionError:
        raise BatchdecodeError(f"{name}: nested too deeply") from None
    except ValueError as error:
        raise BatchdecodeError(f"{name}: {error}") from None
    if not isinstance(meta, dict):
        raise BatchdecodeError(f"{name}: expected a JSON object with {', '.join(NAMES)}")
    fields = sorted(
        _fields_in(meta, ()),
        key=lambda field: 0 if RESOLVED in field[0] else 2 if ASKED in field[0] else 1,
    )
    limits: dict[str, Limit] = {}
    for setting, field, kind in _FIELDS:
        for path, value in fields:
            if path[-1] != field or setting in limits:
                continue
            least = 0 if setting == "long_prefill_threshold" else 1
            expected = "true or false"
            is_good = type(value) is bool
            if not isinstance(kind, type):
                expected = f"a whole number from 1 to {kind:,}"
                is_good = type(value) is int and least <= value <= kind
            place = ".".join(path)
            if not is_good:
                shown = json.dumps(value)
                shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
                raise BatchdecodeError(f"{name}: {place}: expected {expected}, not {shown}")
            known = value
            if setting == "capacity":
                known = "watermark" if value else "on-demand"
            elif setting == "long_prefill_threshold":
                known = value or None
            limits[setting] = Limit(known, place)
    # Blocks are those that sequences can use; if only tokens are known they are converted.
    tokens = limits.pop("kv_tokens", None)
    if tokens is not None and "kv_blocks" not in limits:
        size = limits["block_size"].value if "block_size" in limits else DEFAULT_BLOCK_SIZE
        limits["kv_blocks"] = Limit(min(tokens.value // size, MAX_BLOCKS), tokens.place)
    if "kv_blocks" in limits:
        blocks = limits["kv_blocks"]
        place = f"{blocks.place}, less the null block,"
        limits["kv_blocks"] = Limit(max(usable_blocks(blocks.value), 1), place)
    settled = {path[-1]: (path, value) for path, value in reversed(fields)}
    not_simulated = [
        f"{'.'.join(settled[field][0])} {json.dumps(settled[field][1])}"
        for field, is_other in _NOT_SIMULATED.items()
        if field in settled and is_other(settled[field][1])
    ]
    return RunMeta(limits, not_simulated)


def _fields_in(
    meta: dict[str, Any], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in meta.items():
        path = (*above, name)
        if name in NAMES or name in _NOT_SIMULATED:
            if value is not None:
                yield path, value
        elif isinstance(value, dict):
            yield from _fields_in(value, path)


PERCENTS = (50, 99)


class Comparison(Struct, frozen=True):
    """A number of the real run and of its simulation, in seconds; error: relative, or None."""

    name: str
    real: float
    simulated: float
    error: float | None


class Replay(Struct, frozen=True):
    """The numbers of a replay, and the result of the simulation."""

    comparisons: list[Comparison]
    result: FleetResult


class AsLogged(Router):
    """Routes each request to the replica that the log names."""

    def __init__(self, log: Sequence[LoggedRequest]) -> None:
        places: dict[int | str | None, int] = {}
        self._places = [places.setdefault(one.replica, len(places)) for one in log]
        self.num_replicas = len(places)

    def choose(self, request: SimulatedSequence, now: float) -> ReplicaView:  # noqa: ARG002
        return self.replicas[self._places[request.input_index]]


def replay(
    log: list[LoggedRequest],
    engine: ReplicaSettings,
    num_replicas: int = 1,
    router: Router | None = None,
    report_interval: float = DEFAULT_REPORT_INTERVAL,
) -> Replay:
    """Return the comparison of a log with a simulation of its requests.

    engine: of each replica.  router: None for AsLogged.

    Raises:
        BatchdecodeError: the settings contradict, the router fails or refuses a request, or a
            request can never run.
    """
    turns = Turns(workload_of_log(log))
    router = AsLogged(log) if router is None else router
    result = Fleet(turns, [engine] * num_replicas, router, report_interval).run()
    if result.refused:
        num_refused = result.refused.total()
        raise BatchdecodeError(f"the router refuses {num_refused:,} requests that were served")
    failed = [sequence.id for sequence in turns.sequences if sequence.has_failed]
    if failed:
        raise BatchdecodeError(
            f"{len(failed):,} requests that were served, the first {failed[0]!r}, can never run "
            f"with --kv-blocks {engine.scheduling.kv_blocks}"
        )
    logged = attrgetter(
        "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "output_toks"
    )
    ran = attrgetter("arrival_time", "admitted", "first_token", "end", "num_output_tokens")
    real, simulated = _numbers(map(logged, log)), _numbers(map(ran, turns.sequences))
    comparisons = [
        Comparison(name, value, simulated[name], simulated[name] / value - 1 if value else None)
        for name, value in real.items()
    ]
    return Replay(comparisons, result)


def _numbers(rows: Iterable[tuple[float | None, ...]]) -> dict[str, float]:
    """Return mean and percentiles, by nearest rank, of all latencies, and the makespan.

    rows: arrival, admission (None if unknown), first and last token, number of tokens.
    """
    arrival, admitted, first, last, num_tokens = np.ascontiguousarray(np.array([*rows], float).T)
    several = num_tokens > 1
    latencies = {
        "queue": admitted[:0] if np.isnan(admitted).any() else admitted - arrival,
        "ttft": first - arrival,
        "tpot": (last - first)[several] / (num_tokens[several] - 1),
        "e2e": last - arrival,
    }
    numbers: dict[str, float] = {}
    for name, seconds in latencies.items():
        if not len(seconds):
            continue
        numbers[f"{name} mean"] = float(seconds.mean())
        for percent in PERCENTS:
            value = np.percentile(seconds, percent, method="inverted_cdf")
            numbers[f"{name} p{percent}"] = float(value)
    numbers["makespan"] = float(last.max() - arrival.min())
    return numbers
