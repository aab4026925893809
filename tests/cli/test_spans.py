"""Requests as traces of OpenTelemetry: the phases of their stories, which hold up no run."""

import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from engine_runs import traced
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from process import batchdecode, lines_of, workload

from batcher import Engine, Request, SimulatedModel
from batcher.explaining.story import PhaseFollower
from batcher.settings import SchedulingSettings
from cli.run import spans as spans_module
from cli.run.spans import SpanSender

REQUESTS = lines_of(*workload(12))


def run_events(count=6):
    """Return the events of a run with preemptions, and how many steps it took."""
    settings = SchedulingSettings(kv_blocks=30, block_size=1, prefix_cache=True)
    engine = Engine(SimulatedModel(), 4, settings=settings)
    for number in range(count):
        prompt = [number + 1] * 5
        several = {"n": 2, "temperature": 1.0} if number % 2 else {}
        engine.add(Request(prompt=prompt, max_tokens=9 + number, ignore_eos=True, **several))
    return traced(engine), engine.num_steps


def test_the_spans_are_the_phases_on_the_wall():
    events, num_steps = run_events()
    exporter, follower = InMemorySpanExporter(), PhaseFollower()
    sender = SpanSender(None, "m", exporter=exporter)
    sender.take(events)
    sender.close([num_steps])
    spans = exporter.get_finished_spans()
    roots = [span for span in spans if span.parent is None]
    expected = [one for event in events for one in follower.take(event)]
    assert {phase.name for one in expected for phase in one.phases} == {
        *("queue", "prefill", "decode", "preempted")
    }
    assert sender.describe() == f"{len(spans)} spans sent"
    assert len(roots) == len(expected)
    epoch = min(span.start_time for span in roots)  # the first arrives at 0
    by_parent, traces = defaultdict(list), defaultdict(set)
    for span in spans:
        by_parent[span.parent and span.parent.span_id].append(span)
    for root, one in zip(roots, expected, strict=True):
        told = dict(root.attributes)
        traces[one.arrive.id].add(root.context.trace_id)
        assert root.name == "text_completion m"
        assert (root.start_time, root.end_time) == (
            epoch + round(one.arrive.time * 10**9),
            epoch + round(one.end * 10**9),
        )
        assert told["gen_ai.usage.output_tokens"] == one.finish.tokens
        assert told["gen_ai.response.finish_reasons"] == ("length",)
        assert told["gen_ai.latency.time_to_first_token"] == one.first_token - one.arrive.time
        assert [
            (span.name, span.start_time, span.end_time, span.attributes.get("batchdecode.slot"))
            for span in by_parent[root.context.span_id]
        ] == [
            (name, epoch + round(start * 10**9), epoch + round(end * 10**9), slot)
            for name, start, end, slot in one.phases
        ]
        assert all(
            span.context.trace_id == root.context.trace_id
            for span in by_parent[root.context.span_id]
        )
    assert [len(ids) for ids in traces.values()] == [1] * 6  # whatever the number of samples
    assert len(set.union(*traces.values())) == 6


class Stuck(SpanExporter):
    """Takes nothing before it is shut down."""

    def __init__(self):
        self._is_over = threading.Event()

    def export(self, _):
        self._is_over.wait(20)
        return SpanExportResult.FAILURE

    def shutdown(self):
        self._is_over.set()


def test_a_collector_that_takes_nothing_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(spans_module, "MAX_WAITING", 3)
    monkeypatch.setattr(spans_module, "CLOSE_SECONDS", 0.1)
    events, num_steps = run_events(20)
    exporter = Stuck()
    sender = SpanSender(None, "m", exporter=exporter)
    sender.take(events)
    assert len(sender._waiting) <= 3
    sender.close([num_steps])
    assert (sender.num_sent, sender.num_dropped) == (0, sender.num_spans)
    assert sender.num_spans > 60
    sender._thread.join(10)


class Collector(BaseHTTPRequestHandler):
    """A receiver of OTLP over HTTP, as little of one as there can be."""

    def do_POST(self):
        message = ExportTraceServiceRequest()
        message.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.messages.append((self.path, message))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.messages = []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "env"])
def test_a_collector_is_sent_all_spans_and_the_results_are_the_same(tmp_path, collector, is_named):
    address = f"http://127.0.0.1:{collector.server_port}"
    environment = {} if is_named else {"OTEL_EXPORTER_OTLP_ENDPOINT": address}
    done = batchdecode(
        *("run", "-o", "r", "--otel", address if is_named else "env"),
        stdin=REQUESTS,
        cwd=tmp_path,
        OTEL_SERVICE_NAME="own",
        **environment,
    )
    plain = batchdecode("run", "-q", stdin=REQUESTS)
    assert done.returncode == 0
    assert (tmp_path / "r").read_bytes() == plain.stdout
    assert {path for path, _ in collector.messages} == {"/v1/traces"}
    groups = [group for _, message in collector.messages for group in message.resource_spans]
    attributes = [one for group in groups for one in group.resource.attributes]
    services = {one.value.string_value for one in attributes if one.key == "service.name"}
    spans = [span for group in groups for scope in group.scope_spans for span in scope.spans]
    assert services == {"own"}
    assert len([span for span in spans if not span.parent_span_id]) == 12
    assert f"\n{len(spans)} spans sent\n" in done.stderr


def test_without_a_collector_a_run_ends_as_without_one_and_tells(tmp_path):
    begin = time.monotonic()
    (tmp_path / "setup.py").write_text("from cli.run import spans\nspans.CLOSE_SECONDS = 0.1\n")
    done = batchdecode(
        *("run", "-q", "--otel", "http://127.0.0.1:9"),
        stdin=REQUESTS,
        cwd=tmp_path,
        COMMAND_SETUP="setup.py",
    )
    assert done.returncode == 0
    assert done.stdout == batchdecode("run", "-q", stdin=REQUESTS).stdout
    assert done.stderr.startswith("0 spans sent, 39 dropped: ")
    assert "Connection refused" in done.stderr
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - begin < 30
