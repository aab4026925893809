"""Spans by way of rotel, a collector of OpenTelemetry: what it passes on is what the run did.

It needs `pip install rotel`.  The phases are derived anew, from slot spans and results.
"""

import gzip
import json
import re
import socket
import subprocess
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from runs import COMMAND, ENVIRONMENT, LIMITS, free_port, requests, start, wait_for

rotel = pytest.importorskip("rotel")
SECOND = 10**9  # nanoseconds


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


def slot_spans_of(folder):
    """Return (start, end, slot) of each stay of an output in a slot, in order, by the trace."""
    command = [*COMMAND, "trace", "trace", "--format", "spans"]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, check=True)
    found = defaultdict(list)
    for span in map(json.loads, done.stdout.splitlines()):
        found[span["id"], span["index"]].append((span["start"], span["end"], span["slot"]))
    return {output: sorted(spans) for output, spans in found.items()}


def phases_of(result, in_slots):
    """Return what the phases of an output are to be: (name, start, end, slot), by steps."""
    steps = result["steps"]
    first_of_all = in_slots[0][0]
    assert first_of_all == steps["admitted"]
    if first_of_all > steps["arrived"]:
        yield "queue", steps["arrived"], first_of_all, None
    for (begin, end, slot), (after, _, _) in pairwise([*in_slots, (None, None, None)]):
        # what had been computed before a preemption is computed in one step, as a prompt is
        yield "prefill", begin, begin + 1, slot
        if end > begin + 1:
            yield "decode", begin + 1, end, slot
        if after is not None and after > end:
            yield "preempted", end, after, None


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
    in_slots = slot_spans_of(tmp_path)
    results = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert sum(len(spans) > 1 for spans in in_slots.values()) > 2  # were preempted

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
    inner = defaultdict(list)
    for span in spans:
        inner[span.parent_span_id].append(span)
    outer = {}
    for span in inner.pop(b""):
        told = attributes_of(span)
        outer[told["gen_ai.request.id"], told["batchdecode.index"]] = (span, told)
    epoch = min(span.start_time_unix_nano for span, _ in outer.values())
    assert outer.keys() == {(each["id"], each["index"]) for each in results}
    for result in results:
        span, told = outer[result["id"], result["index"]]
        usage, steps = result["usage"], result["steps"]
        assert span.name == "text_completion simulated"
        assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert told["gen_ai.response.finish_reasons"] == [result["finish_reason"]]
        assert told["gen_ai.latency.time_to_first_token"] == (
            steps["first_token"] + 1 - steps["arrived"]
        )
        assert told["gen_ai.latency.e2e"] == steps["finished"] + 1 - steps["arrived"]
        stays = in_slots[result["id"], result["index"]]
        assert told["batchdecode.preemptions"] == len(stays) - 1
        expected = [*phases_of(result, stays)]
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (
            epoch + steps["arrived"] * SECOND,
            epoch + (steps["finished"] + 1) * SECOND,
        )
        phases = sorted(inner[span.span_id], key=lambda phase: phase.start_time_unix_nano)
        assert {phase.trace_id for phase in phases} == {span.trace_id}
        assert [
            (
                phase.name,
                (phase.start_time_unix_nano - epoch) / SECOND,
                (phase.end_time_unix_nano - epoch) / SECOND,
                attributes_of(phase).get("batchdecode.slot"),
            )
            for phase in phases
        ] == expected


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
