"""What a run tells Prometheus: at a port while it runs, and in a file."""

import json
import re
import signal
import socket
import subprocess
from urllib.request import Request, urlopen

import pytest
from process import batchdecode, lines_of, start, workload

from cli.run.exporters import Exposition

REQUESTS = lines_of(*workload(12))
ACCEPTED = (  # by Prometheus
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
LIMITS = ("--kv-blocks", "30", "--block-size", "1", "-b", "4")


def numbers(text):
    """Return the samples of a text by name and their own label."""
    found = re.findall(r"^(\S+?)\{(.*)\} (\S+)$", text, re.MULTILINE)
    labels = [
        re.sub(r'engine="0",|,?model_name="[^"]*"|"', "", label).strip(",") for _, label, _ in found
    ]
    return {
        f"{name}{{{label}}}" if label else name: float(value)
        for (name, _, value), label in zip(found, labels, strict=True)
    }


def check_files(folder):
    """Compare what the file tells with the summary."""
    told = numbers((folder / "m.prom").read_text())
    summary = json.loads((folder / "s").read_text())
    assert told["vllm:prompt_tokens_total"] == summary["prompt_tokens"]
    assert told["vllm:generation_tokens_total"] == summary["generated_tokens"]
    assert told["batchdecode_steps_total"] == summary["steps"]
    assert (
        told["vllm:request_success_total{finished_reason=length}"]
        == (summary["finish_reasons"]["length"])
    )
    assert told["vllm:num_preemptions_total"] == summary["preemptions"]["count"]
    assert told["vllm:prefix_cache_hits_total"] == summary["prefix_cache"]["found"]
    assert told["batchdecode_blocked_steps_total{reason=kv}"] == summary["blocked"]["kv"]
    for name, of in (("time_to_first_token", "ttft"), ("inter_token_latency", "itl")):
        times = summary["latencies"][of]
        assert told[f"vllm:{name}_seconds_count"] == times["count"]
        total = told[f"vllm:{name}_seconds_sum"]
        assert total == pytest.approx(times["mean"] * times["count"], rel=1e-6)


def test_another_address_is_told_and_a_taken_port_an_error():
    with (
        Exposition(("127.0.0.1", 0), None) as exposition,
        urlopen(f"{exposition.url}?name[]=x") as answer,  # noqa: S310 - our own
    ):
        assert answer.status == 200
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = batchdecode("run", "--model", "no:model", "--metrics-port", port, stdin=REQUESTS)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: --metrics-port: cannot listen on 127.0.0.1, port {port}: Address already in use\n"
    )


def test_a_run_may_be_asked_while_it_goes_on_and_a_stopped_one_has_told_all(tmp_path):
    more = ("--metrics-port", "0", "--metrics-file", "m.prom", "--summary-json", "s")
    command = ["run", "-o", "r", "--step-delay", "0.03", "--live=never", *LIMITS, *more]
    process = start(*command, cwd=tmp_path, stdin=subprocess.PIPE)
    process.stdin.write(REQUESTS)
    process.stdin.close()
    url = process.stderr.readline().decode().removeprefix("metrics at ").strip()
    asked, told = Request(url, headers={"Accept": ACCEPTED}), {}  # noqa: S310 - as below
    while told.get("batchdecode_steps_total", 0) < 5:
        with urlopen(asked) as answer:  # noqa: S310 - of our own run
            told = numbers(answer.read().decode())
    assert told["vllm:num_requests_running"] > 0
    assert told["batchdecode_slots"] == 4
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    process.stdin = None
    process.communicate()
    check_files(tmp_path)
