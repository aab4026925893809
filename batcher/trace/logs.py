"""Turn the log of another engine into the events of a run, for every view of a trace.

Three kinds of log are supported: lines with the times of each request, as for `batchdecode replay`;
the results of `vllm bench serve --save-detailed`; and request spans in OTLP JSON, as an
OpenTelemetry collector writes them to a file.

A log has neither steps nor slots.  A step lasts from one event (a request starts, or gets tokens)
to the next, as in the trace of a server, and a request holds the lowest slot free at its start.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError
from batcher.events import (
    MAX_WORKERS,
    AdmitEvent,
    AdmitReason,
    ArriveEvent,
    EndEvent,
    Event,
    FinishEvent,
    ReceiveEvent,
    RunEvent,
    StepsEvent,
)
from batcher.request import MAX_INT, MAX_LENGTH, Seconds
from batcher.result import ErrorInfo
from batcher.trace.run import event_of_worker

MICROSECOND, NANOSECONDS = 1e-6, 10**9
REQUEST_LOG, BENCH_RESULT, SPANS = "input_toks", "input_lens", "resourceSpans"  # a key of each kind
PROMPT_TOKENS = "gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens"
NO_STARTS = "when each request began to run (here when it arrived)"
NO_TOKEN_TIMES = "when tokens came between the first and the last (here with the last)"  # noqa: S105

Length = Annotated[int, Meta(ge=0, le=MAX_INT)]
Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Time = Annotated[float, Meta(ge=0, le=1e10)]  # a larger float cannot represent microseconds


class ServedRequest(Struct, eq=False, gc=False, kw_only=True):
    """A request of a log; times are seconds on one clock.

    admitted: when it started to run.  tokens: times and numbers of tokens.  error: why it failed.
    replica: the engine that served it, if there are several.
    """

    id: str
    arrival: float
    admitted: float
    num_prompt_tokens: int
    tokens: list[tuple[float, int]]
    error: str | None = None
    replica: int | str | None = None


class ServedLog(Struct):
    """The requests of a log; missing: the facts that it does not have."""

    requests: list[ServedRequest] = []
    model: str = "unknown"
    missing: set[str] = set()


# -- a log of requests, a line for each ------------------------------------------------------------

FIELDS = (
    "request_id, input_toks, output_toks, queued_ts, first_token_ts, last_token_ts, "
    "maybe scheduled_ts and replica"
)

_WORDS = {  # JSON's words for Python's
    "`int`": "a whole number",
    "`float`": "a number",
    "`str`": "a text",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "an object",
    " - at `$.": " at `",
}


class LoggedRequest(Struct, frozen=True, gc=False, kw_only=True):
    """A line of the log; times are seconds from any origin, and other fields are ignored.

    queued_ts: its arrival.  scheduled_ts: the start of its first step.  replica: its engine, if
    there are several.
    """

    request_id: str
    input_toks: Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
    output_toks: Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
    queued_ts: Seconds
    first_token_ts: Seconds
    last_token_ts: Seconds
    scheduled_ts: Seconds | None = None
    replica: int | str | None = None


def read_request_log(
    lines: Iterable[tuple[int, bytes]], name: str, kind: type[LoggedRequest] = LoggedRequest
) -> list[LoggedRequest]:
    """Return the requests of a log by arrival.

    lines: (line number, line).  name: the file's name for errors.  kind: the type of a line.

    Raises:
        BatchdecodeError: a line is not such a request, its times contradict each other, or the log
            is empty.
    """
    decoder = msgspec.json.Decoder(kind)
    requests, lines_of = list[LoggedRequest](), dict[str, int]()
    for number, text in lines:
        try:
            request = decoder.decode(text)
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            fault = f"{_in_words(error)}; fields: {FIELDS}"
            raise BatchdecodeError(f"{name}:{number}: {fault}") from None
        first_line = lines_of.setdefault(request.request_id, number)
        if first_line != number:
            message = f"request_id {request.request_id!r} is already in line {first_line}"
            raise BatchdecodeError(f"{name}:{number}: {message}")
        before, last = "", 0.0
        for field in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"):
            time = getattr(request, field)
            if time is not None and time < last:
                raise BatchdecodeError(f"{name}:{number}: {field} {time} is before {before} {last}")
            before, last = (before, last) if time is None else (field, time)
        if requests and (request.replica is None) is not (requests[0].replica is None):
            message = "replica: name it for all requests, or for none"
            raise BatchdecodeError(f"{name}:{number}: {message}")
        requests.append(request)
    if not requests:
        raise BatchdecodeError(f"{name} contains no requests; fields of a line: {FIELDS}")
    return sorted(requests, key=lambda request: request.queued_ts)


def _in_words(error: Exception) -> str:
    fault = str(error)
    for theirs, ours in _WORDS.items():
        fault = fault.replace(theirs, ours)
    return fault if fault.startswith("JSON") else f"{fault[:1].lower()}{fault[1:]}"


class _ShownRequest(LoggedRequest, frozen=True, gc=False, kw_only=True):
    """A line for views: lengths may be 0, and times must represent microseconds."""

    input_toks: Length
    output_toks: Length
    last_token_ts: Time


# -- the kinds of log ------------------------------------------------------------------------------


def kind_of_log(first_line: bytes) -> str | None:
    """Return the key that identifies the kind of a log, or None if it is not a log."""
    if not first_line.startswith(b"{"):
        return None
    kinds = (BENCH_RESULT, SPANS, REQUEST_LOG)
    return next((kind for kind in kinds if f'"{kind}"'.encode() in first_line), None)


def read_log(lines: Iterable[tuple[int, bytes]], name: str) -> ServedLog:
    """Return the requests of a log; lines: (line number, line), name: for errors.

    Raises:
        BatchdecodeError: it is not such a log, lacks required fields, or is empty.
    """
    numbered = iter(lines)
    first = next(numbered, (1, b""))
    kind, log = kind_of_log(first[1]), ServedLog()
    if kind is None:
        raise BatchdecodeError(f"{name}: not a log of requests")
    lines = ((number, line) for number, line in chain([first], numbered) if not line.isspace())
    if kind == REQUEST_LOG:
        for row in read_request_log(lines, name, _ShownRequest):
            log.missing.add(NO_TOKEN_TIMES)
            if row.scheduled_ts is None:
                log.missing.add(NO_STARTS)
            log.requests.append(
                ServedRequest(
                    id=row.request_id,
                    arrival=row.queued_ts,
                    admitted=row.queued_ts if row.scheduled_ts is None else row.scheduled_ts,
                    num_prompt_tokens=row.input_toks,
                    tokens=_first_and_last(row.output_toks, row.first_token_ts, row.last_token_ts),
                    replica=row.replica,
                )
            )
        return log
    read = _read_bench if kind == BENCH_RESULT else _read_spans
    for number, line in lines:
        try:
            read(line, log)
        except (ValueError, LookupError, RecursionError) as error:
            raise BatchdecodeError(f"{name}:{number}: {_in_words(error)}") from None
    if not log.requests:
        raise BatchdecodeError(f"{name} contains no requests")
    of_id, num_of_id = Counter(request.id for request in log.requests).most_common(1)[0]
    if num_of_id > 1:
        raise BatchdecodeError(f"{name}: {num_of_id:,} requests have the id {of_id!r}")
    return log


class _Bench(Struct, frozen=True):
    input_lens: list[Length]
    output_lens: list[Length]
    ttfts: list[Time]
    itls: list[list[Time]]
    start_times: list[Time]
    errors: list[str] = []
    model_id: str = "unknown"


def _read_bench(line: bytes, log: ServedLog) -> None:
    bench = msgspec.json.decode(line, type=_Bench)
    log.model = bench.model_id
    log.missing.add(NO_STARTS)
    errors = bench.errors or [""] * len(bench.input_lens)
    columns = bench.start_times, bench.input_lens, bench.output_lens, bench.ttfts, bench.itls
    if len({len(errors), *(len(column) for column in columns)}) > 1:
        raise ValueError("its lists have different lengths")
    for arrival, num_prompt, num_tokens, ttft, gaps, error in zip(*columns, errors, strict=True):
        times, num_chunks = accumulate(gaps, initial=arrival + ttft), 1 + len(gaps)
        bounds = [-(-num_tokens * place // num_chunks) for place in range(1 + num_chunks)]
        log.requests.append(
            ServedRequest(
                id=str(len(log.requests)),
                arrival=arrival,
                admitted=arrival,
                num_prompt_tokens=num_prompt,
                tokens=[
                    (time, stop - start)
                    for time, (start, stop) in zip(times, pairwise(bounds), strict=True)
                ],
                error=error or None,
            )
        )


class _Attribute(Struct, frozen=True):
    key: str = ""
    value: dict[str, Any] | None = None


class _Status(Struct, frozen=True):
    code: int | str | None = None


class _Span(Struct, frozen=True, rename="camel"):
    start_time_unix_nano: int | str | None = None
    end_time_unix_nano: int | str | None = None
    attributes: list[_Attribute] | None = None
    status: _Status | None = None


class _Scope(Struct, frozen=True):
    spans: list[_Span] | None = None


class _Resource(Struct, frozen=True, rename="camel"):
    scope_spans: list[_Scope] | None = None


class _Export(Struct, frozen=True, rename="camel"):
    resource_spans: list[_Resource] | None = None


def _read_spans(line: bytes, log: ServedLog) -> None:
    resources = msgspec.json.decode(line, type=_Export).resource_spans or ()
    scopes = (scope for resource in resources for scope in resource.scope_spans or ())
    for span in (span for scope in scopes for span in scope.spans or ()):
        found: dict[str, Any] = {}
        for attribute in span.attributes or ():
            value = next(iter((attribute.value or {}).values()), None)
            if value is not None:
                found[attribute.key] = value
        lengths = [
            _number(found, name, Length)
            for names in (PROMPT_TOKENS, OUTPUT_TOKENS)
            for name in [name for name in names if name in found][:1]
        ]
        if len(lengths) != 2:  # noqa: PLR2004 - not the span of a request
            continue
        times = {"startTimeUnixNano": span.start_time_unix_nano}
        times |= {"endTimeUnixNano": span.end_time_unix_nano}
        begin, end = (_number(times, name, Nanoseconds) / NANOSECONDS for name in times)
        queue, ttft = (
            _number(found, name, Time) if name in found else None
            for name in ("gen_ai.latency.time_in_queue", "gen_ai.latency.time_to_first_token")
        )
        index = _number({"batchdecode.index": 0} | found, "batchdecode.index", Length)
        request_id = str(found.get("gen_ai.request.id", len(log.requests)))
        models = "gen_ai.response.model", "gen_ai.request.model"
        log.model = next((str(found[name]) for name in models if name in found), log.model)
        log.missing.update({NO_TOKEN_TIMES} if queue is not None else {NO_TOKEN_TIMES, NO_STARTS})
        has_failed = span.status is not None and span.status.code in {2, "STATUS_CODE_ERROR"}
        log.requests.append(
            ServedRequest(
                id=f"{request_id}#{index}" if index else request_id,
                arrival=begin,
                admitted=begin + (queue or 0),
                num_prompt_tokens=lengths[0],
                tokens=_first_and_last(lengths[1], end if ttft is None else begin + ttft, end),
                error=str(found.get("error.type", "error")) if has_failed else None,
            )
        )


def _number(values: dict[str, Any], name: str, kind: Any) -> Any:
    """Return a number of `values`, which may be a string, or raise ValueError."""
    try:
        return msgspec.convert(values[name], kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {_in_words(error)}") from None


def _first_and_last(num_tokens: int, first: float, last: float) -> list[tuple[float, int]]:
    return [(first, min(num_tokens, 1)), (max(first, last), max(num_tokens - 1, 0))]


# -- events ----------------------------------------------------------------------------------------


def events_of_log(log: ServedLog) -> Iterator[Event]:
    """Yield the trace of a run that served the requests of a log, from the first arrival.

    A request that did not fail ends with the reason "stop", as no log has the reason.
    """
    begin = min(request.arrival for request in log.requests)
    served: defaultdict[int | str | None, list[ServedRequest]] = defaultdict(list)
    for request in sorted(log.requests, key=lambda request: request.arrival):
        request.arrival -= begin
        request.admitted = max(request.admitted - begin, request.arrival)
        soonest = request.admitted + MICROSECOND  # a step has a duration
        request.tokens = [(max(time - begin, soonest), num) for time, num in request.tokens]
        served[request.replica].append(request)
    if len(served) > MAX_WORKERS:
        raise BatchdecodeError(f"a log has {len(served):,} replicas; {MAX_WORKERS:,} can be shown")
    batch = max(map(_most_at_once, served.values()))
    yield RunEvent(
        batch=batch,
        model=log.model,
        settings={},
        step_time={"name": "wall"}
        | ({"tokens": "unknown"} if NO_TOKEN_TIMES in log.missing else {}),
        layout="remote",
        workers=len(served),
    )
    for number, requests in enumerate(served.values()):
        for event in _events(requests):
            yield event if len(served) == 1 else event_of_worker(event, number, batch)


def _most_at_once(requests: list[ServedRequest]) -> int:
    ran = [request for request in requests if request.error is None]
    changes = [(row.admitted, 1) for row in ran] + [(row.tokens[-1][0], -1) for row in ran]
    return max(accumulate(change for _, change in sorted(changes)), default=1)


def _events(requests: list[ServedRequest]) -> Iterator[Event]:
    """Yield the events of one engine; requests: by arrival."""
    free = list(range(_most_at_once(requests)))  # a heap
    last_used, none = [-2] * len(free), [0]
    running: dict[ServedRequest, int] = {}  # with their slots
    ran = [request for request in requests if request.error is None]
    to_arrive, to_admit = deque(requests), deque(sorted(ran, key=lambda row: row.admitted))
    came: defaultdict[float, list[tuple[ServedRequest, int]]] = defaultdict(list)
    for row in ran:
        for time, num in row.tokens:
            came[time].append((row, num))
    step, start, num_all = 0, 0.0, 0
    for time in sorted({*came, *(row.admitted for row in requests)}):
        if running:  # a step has ended
            received = Counter[ServedRequest]()
            for row, num in came[time]:
                received[row] += num
            for row in sorted(received, key=running.__getitem__):
                where = step, start, row.id, 0, running[row]
                yield ReceiveEvent(*where, received[row])
            columns = [time], [received.total()], none, [len(running)], none, none, none
            yield StepsEvent(step, *columns)
            for row in sorted(received, key=running.__getitem__):
                if time == row.tokens[-1][0]:
                    slot, num = running.pop(row), sum(num for _, num in row.tokens)
                    yield FinishEvent(step, start, row.id, 0, slot, "stop", None, num)
                    heappush(free, slot)
                    last_used[slot] = step
            step, num_all = step + 1, num_all + received.total()
        start = time
        while to_arrive and to_arrive[0].arrival <= time:
            row = to_arrive.popleft()
            lengths = row.num_prompt_tokens, sum(num for _, num in row.tokens)
            yield ArriveEvent(step, row.arrival, row.id, 0, "input", *lengths)
            if row.error is not None:
                error = ErrorInfo("model-error", row.error)
                held = row.id, 0, None
                yield FinishEvent(step, time, *held, "error", None, 0, error=error)
        while to_admit and to_admit[0].admitted <= time:
            row = to_admit.popleft()
            running[row] = slot = heappop(free)
            where, left = (step, time, row.id, 0, slot), max(row.num_prompt_tokens, 1)
            reason: AdmitReason = "refill" if last_used[slot] == step - 1 else "empty"
            yield AdmitEvent(*where, reason, left=left)
    yield EndEvent(step, start, num_all, len(requests))
