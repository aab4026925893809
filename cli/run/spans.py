"""Send each finished request of a run as an OpenTelemetry trace, with OTLP over HTTP.

The run never waits: a thread makes and sends the spans, in at most a fifth of its time.  Spans that
it has no room or time for are dropped, and counted.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from threading import Event as Flag
from threading import Thread
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import StatusCode, set_span_in_context

from batcher import __version__
from batcher.events import Event, RunEvent
from batcher.explaining.story import EndedSequence, PhaseFollower

MAX_WAITING = 10_000  # finished sequences without spans
MAX_BATCH = 100  # sequences sent together
REST = 4  # seconds of sleep per second of work
CLOSE_SECONDS = 5.0  # for the rest at the end of the run
POLL_SECONDS = 0.2
NANOSECONDS = 10**9
OPERATION = "text_completion"


class SpanSender:
    """Sends the spans of a run that begins now.

    endpoint: URL of a collector, without /v1/traces; None for the one in the environment.
    exporter: None for OTLP.  num_workers: of the run; the clock of each is 0 now.
    num_spans, num_sent: of the finished sequences, and those that a collector accepted.
    """

    def __init__(
        self,
        endpoint: str | None,
        model: str,
        num_workers: int = 1,
        exporter: SpanExporter | None = None,
    ) -> None:
        url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
        self._failures = _LastFailure()
        self._exporter = exporter or OTLPSpanExporter(url)
        self._model, self._followers = model, [PhaseFollower() for _ in range(num_workers)]
        self._made, self._ids = _MadeSpans(), _Ids()
        name = os.environ.get("OTEL_SERVICE_NAME", "batchdecode")
        provider = TracerProvider(
            resource=Resource.create({"service.name": name}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._made)
        self._tracer = provider.get_tracer("batchdecode", __version__)
        self._epoch = time.time_ns()  # when the engine's clock was 0
        self._waiting: deque[EndedSequence] = deque()
        self.num_spans = self.num_sent = 0
        self._is_over = Flag()
        self._thread = Thread(target=self._send, name="spans", daemon=True)
        self._thread.start()

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, RunEvent):
                followers = self._followers
            else:
                followers = [self._followers[event.worker or 0]]
            for follower in followers:
                self._hand_over(follower.take(event))

    def close(self, num_steps: Iterable[int]) -> None:
        """Send the rest within CLOSE_SECONDS; num_steps: of each worker."""
        for follower, number in zip(self._followers, num_steps, strict=True):
            self._hand_over(follower.close(number))
        self._is_over.set()
        self._thread.join(CLOSE_SECONDS)
        self._exporter.shutdown()  # stops a transfer under way

    @property
    def num_dropped(self) -> int:
        return self.num_spans - self.num_sent

    def describe(self) -> str:
        text = f"{self.num_sent:,} spans sent"
        if self.num_dropped:
            why = f": {self._failures.last}" if self._failures.last else ""
            text += f", {self.num_dropped:,} dropped{why}"
        return text

    def _hand_over(self, all_ended: Iterable[EndedSequence]) -> None:
        for ended in all_ended:
            self.num_spans += 1 + len(ended.phases)
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(ended)

    def _send(self) -> None:
        while self._waiting or not self._is_over.wait(POLL_SECONDS) or self._waiting:
            begin = time.thread_time()
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
            if batch:
                self._send_batch(batch)
                self._is_over.wait(REST * (time.thread_time() - begin))

    def _send_batch(self, batch: list[EndedSequence]) -> None:
        for ended in batch:
            self._make_spans(ended)
        spans, self._made.spans = self._made.spans, []
        num_expected = sum(1 + len(ended.phases) for ended in batch)
        self.num_spans -= num_expected - len(spans)  # OTEL_TRACES_SAMPLER may drop some
        if self._exporter.export(spans) is SpanExportResult.SUCCESS:
            self.num_sent += len(spans)

    def _make_spans(self, ended: EndedSequence) -> None:
        """Make a span of a sequence and one of each of its phases."""
        arrive, finish = ended.arrive, ended.finish
        self._ids.request_id = arrive.id
        span = self._tracer.start_span(
            f"{OPERATION} {self._model}",
            Context(),
            attributes=attributes_of(ended, self._model),
            start_time=self._on_wall(arrive.time),
        )
        if finish.reason == "error":
            span.set_status(StatusCode.ERROR)
            span.set_attribute("error.type", "error")
        inside = set_span_in_context(span, Context())
        for name, start, end, slot in ended.phases:
            attributes = {} if slot is None else {"batchdecode.slot": slot}
            phase = self._tracer.start_span(
                name, inside, attributes=attributes, start_time=self._on_wall(start)
            )
            phase.end(self._on_wall(end))
        span.end(self._on_wall(ended.end))

    def _on_wall(self, seconds: float) -> int:
        return self._epoch + round(seconds * NANOSECONDS)


def attributes_of(ended: EndedSequence, model: str) -> dict[str, Any]:
    """Return the attributes of a sequence's span: GenAI conventions and vLLM's latencies."""
    arrive, finish, phases = ended.arrive, ended.finish, ended.phases
    num_prompt = arrive.prompt_tokens if finish.prompt_tokens is None else finish.prompt_tokens
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": OPERATION,
        "gen_ai.provider.name": "batchdecode",
        "gen_ai.request.model": model,
        "gen_ai.request.id": arrive.id,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": finish.tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.cached,
        "gen_ai.response.finish_reasons": [finish.reason],
        "gen_ai.latency.e2e": ended.end - arrive.time,
        "gen_ai.latency.time_in_queue": ended.seconds_in("queue"),
        "gen_ai.latency.time_in_model_prefill": ended.seconds_in("prefill"),
        "gen_ai.latency.time_in_model_decode": ended.seconds_in("decode"),
        "gen_ai.latency.time_in_model_inference": ended.seconds_in("prefill", "decode"),
        "batchdecode.index": arrive.index,
        "batchdecode.preemptions": sum(phase.name == "preempted" for phase in phases),
    }
    if not arrive.default_limit:
        attributes["gen_ai.request.max_tokens"] = arrive.max_tokens
    if ended.first_token is not None:
        attributes["gen_ai.latency.time_to_first_token"] = ended.first_token - arrive.time
    return attributes


class _MadeSpans(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class _Ids(RandomIdGenerator):
    """Gives all samples of a request one trace id, and another one in every run."""

    def __init__(self) -> None:
        self.request_id = ""
        self._run = os.urandom(16)

    def generate_trace_id(self) -> int:
        digest = blake2b(self.request_id.encode(errors="replace"), key=self._run, digest_size=16)
        return int.from_bytes(digest.digest()) or 1  # 0 is not a valid id


class _LastFailure(logging.Handler):
    """Keeps the messages of OpenTelemetry off the terminal; last: the newest."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage().partition("\n")[0]
