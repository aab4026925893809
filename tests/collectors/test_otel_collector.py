"""Spans by way of rotel, a collector of OpenTelemetry: what it passes on is what the run did.

It needs `pip install rotel`.  tests/cli/test_spans.py proves the phases.
"""

import gzip
import json
import re
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from runs import LIMITS, free_port, requests, start, wait_for

rotel = pytest.importorskip("rotel")


class Receiver(BaseHTTPRequestHandler):
    """Takes what the collector passes on."""

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Encoding"] == "gzip"
        message = ExportTraceServiceRequest()
        message.ParseFromString(gzip.decompress(content))
        self.server.groups.extend(message.resource_spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def receiver():
    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.groups = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def collector(receiver):
    port = free_port()
    process = subprocess.Popen(
        [
            *(Path(rotel.__file__).with_name("rotel-agent"), "start"),
            *("--otlp-http-endpoint", f"127.0.0.1:{port}"),
            *("--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}"),
            *("--exporter", "otlp", "--otlp-exporter-protocol", "http"),
            *("--otlp-exporter-endpoint", f"http://127.0.0.1:{receiver.server_port}"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: is_open(port))
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.wait(20)


def is_open(port):
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def value_of(value):
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [value_of(each) for each in found.values] if kind == "array_value" else found


def attributes_of(span):
    return {each.key: value_of(each.value) for each in span.attributes}


@pytest.mark.parametrize(
    ("is_named", "more"),
    [(True, {}), (False, {"OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"})],
    ids=["named", "env, in gzip"],
)
def test_a_collector_passes_on_what_the_trace_says(tmp_path, receiver, collector, is_named, more):
    address, _ = collector
    if not is_named:
        more = {**more, "OTEL_EXPORTER_OTLP_ENDPOINT": address}
    run = start(tmp_path, "--otel", address if is_named else "env", *LIMITS, **more)
    _, said = run.communicate(requests(30))
    assert run.returncode == 0, said
    results = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]

    def received():
        return [s for g in receiver.groups for scope in g.scope_spans for s in scope.spans]

    num_sent = int(said.decode().split(" spans sent")[0].split()[-1])
    spans = wait_for(lambda: len(received()) >= num_sent and received())
    assert len(spans) == num_sent
    services = {
        value_of(each.value)
        for group in receiver.groups
        for each in group.resource.attributes
        if each.key == "service.name"
    }
    assert services == {"batchdecode"}
    outer = {}
    for span in spans:
        if not span.parent_span_id:
            told = attributes_of(span)
            outer[told["gen_ai.request.id"], told["batchdecode.index"]] = told
    assert outer.keys() == {(each["id"], each["index"]) for each in results}
    assert sum(told["batchdecode.preemptions"] > 0 for told in outer.values()) > 2
    for result in results:
        told, steps = outer[result["id"], result["index"]], result["steps"]
        assert told["gen_ai.usage.output_tokens"] == result["usage"]["completion_tokens"]
        assert told["gen_ai.response.finish_reasons"] == [result["finish_reason"]]
        assert told["gen_ai.latency.e2e"] == steps["finished"] + 1 - steps["arrived"]


def test_a_collector_that_ends_in_the_middle_takes_no_run_with_it(tmp_path, receiver, collector):
    address, process = collector
    run = start(tmp_path, "--otel", address, "-q", *LIMITS)
    run.stdin.write(requests(30))
    run.stdin.flush()
    wait_for(lambda: receiver.groups)
    process.kill()
    process.wait()
    _, said = run.communicate(requests(60)[len(requests(30)) :])
    assert run.returncode == 0
    assert len((tmp_path / "results").read_text().splitlines()) == 80
    num_sent, num_dropped = map(int, re.match(rb"(\d+) spans sent, (\d+) dropped: ", said).groups())
    assert num_sent >= sum(
        len(scope.spans) for group in receiver.groups for scope in group.scope_spans
    )
    assert num_dropped > 0
