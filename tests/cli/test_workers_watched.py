"""What is told of a run of several workers: metrics, spans and a report."""

import json
import re
from itertools import count

import pytest
from examples import mostly_heavy
from page_reader import parts_of, spans_of
from process import batchdecode, lines_of, workload
from prometheus_client.parser import text_string_to_metric_families
from test_report import Cells, assert_is_nearly, leaves
from test_run_workers import options_of, run_inner
from test_spans import collector  # noqa: F401 - a fixture

from cli.options import SchedulingOptions
from cli.run.exporters import Exposition
from cli.run.run import Run

NOT_ARRIVED = "batchdecode_requests_not_arrived"
WAITING = "vllm:num_requests_waiting"


def told_in(text):
    """Return the samples of a text by name and the label beside the usual ones, then by engine."""
    told = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            assert labels.pop("model_name") == "simulated"
            engine = labels.pop("engine", None)
            told.setdefault((name, *labels.values()), {})[engine] = value
    return told


def check_equal(told, summary):
    """Compare what is told of each worker with the summary of all."""
    sums = {key: sum(engines.values()) for key, engines in told.items()}
    assert sums["vllm:prompt_tokens_total",] == summary["prompt_tokens"]
    assert sums["vllm:generation_tokens_total",] == summary["generated_tokens"]
    for reason in ("stop", "length", "error"):
        of = summary["finish_reasons"][reason]
        assert sums["vllm:request_success_total", reason] == of
    assert sums["vllm:num_preemptions_total",] == summary["preemptions"]["count"]
    assert sums["vllm:prefix_cache_hits_total",] == summary["prefix_cache"]["found"]
    for name, of in (("time_to_first_token", "ttft"), ("inter_token_latency", "itl")):
        times = summary["latencies"][of]
        assert sums[f"vllm:{name}_seconds_count",] == times["count"]
        total = sums[f"vllm:{name}_seconds_sum",]
        assert total == pytest.approx(times["mean"] * times["count"], rel=1e-6)
    for number, worker in enumerate(summary["workers"]):
        assert told["batchdecode_steps_total",][str(number)] == worker["steps"]
        tokens = told["vllm:generation_tokens_total",][str(number)]
        assert tokens == worker["generated_tokens"]


def observed(options, monkeypatch, **how):
    """Carry out a run; return what is told at the end, and when workers have said something."""
    collectors, all_told, num_taken = [], [], count()
    monkeypatch.setattr(Exposition, "tell", lambda _, told: collectors.append(told))
    note = Run._note

    def looking(self, events):
        note(self, events)
        if not next(num_taken) % 5:
            all_told.append(told_now())

    def told_now():
        return {
            (name, labels["engine"], *sorted(labels.items())): value
            for family in collectors[0].collect()
            for name, labels, value, *_ in family.samples
        }

    monkeypatch.setattr(Run, "_note", looking)
    _, workers = run_inner(options, **how)
    return [*all_told, told_now()], workers


@pytest.mark.parametrize("seed", mostly_heavy(range(3), 0))
def test_counts_only_grow_whoever_dies_and_nobody_is_left_in_the_end(tmp_path, monkeypatch, seed):
    several = [{"id": f"s{n}", "prompt": "x", "n": 3, "temperature": 1} for n in range(4)]
    (tmp_path / "requests.jsonl").write_bytes(lines_of(*workload(16), *several))
    options = options_of(tmp_path, metrics_file=str(tmp_path / "m.prom"))
    all_told, workers = observed(options, monkeypatch, kill_share=0.1, seed=seed)
    assert workers.num_kills
    last = {}
    for told in all_told:
        for key, value in last.items():
            assert told[key] >= value or "_total" not in key[0]
        left = [value for (name, *_), value in told.items() if name in (WAITING, NOT_ARRIVED)]
        held = [value for (name, *_), value in told.items() if name == "batchdecode_slots"]
        assert 0 <= sum(left) <= 20
        assert held == [4, 4, 4]
        last = told
    states = ("vllm:num_requests_running", WAITING, NOT_ARRIVED)
    assert {value for (name, *_), value in all_told[-1].items() if name in states} == {0}
    assert max(v for told in all_told for (name, *_), v in told.items() if name == states[0]) > 0


def test_the_file_ends_with_the_numbers_of_the_summary(tmp_path):
    (tmp_path / "requests.jsonl").write_bytes(lines_of(*workload(60)))
    options = options_of(
        tmp_path,
        metrics_file=str(tmp_path / "m.prom"),
        summary_json=str(tmp_path / "s.json"),
        scheduling=SchedulingOptions(kv_blocks=30, block_size=1),
    )
    run_inner(options, kill_share=0.05, seed=1)
    summary = json.loads((tmp_path / "s.json").read_bytes())
    assert summary["outputs"] == 60
    check_equal(told_in((tmp_path / "m.prom").read_text()), summary)


def test_processes_tell_a_port_and_a_file(tmp_path):
    (tmp_path / "in").write_bytes(lines_of(*workload(30)))
    files = ("-o", "out", "--metrics-port", "0", "--metrics-file", "m.prom", "--summary-json", "s")
    limits = ("--kv-blocks", "30", "--block-size", "1", "-b", "4")
    done = batchdecode("run", "in", "--workers", 2, *files, *limits, cwd=tmp_path)
    assert done.returncode == 0
    assert re.search(r"^metrics at http://127\.0\.0\.1:\d+/metrics$", done.stderr, re.MULTILINE)
    assert "metrics: m.prom" in done.stderr
    told = told_in((tmp_path / "m.prom").read_text())
    check_equal(told, json.loads((tmp_path / "s").read_bytes()))
    assert told[NOT_ARRIVED,] == {"0": 0, "1": 0, "": 0}


@pytest.mark.parametrize("kill_share", mostly_heavy([0, 0.1], 0.1))
def test_each_request_is_a_trace_whoever_dies(tmp_path, collector, kill_share):  # noqa: F811
    (tmp_path / "requests.jsonl").write_bytes(lines_of(*workload(40)))
    options = options_of(tmp_path, otel=f"http://127.0.0.1:{collector.server_port}")
    run_inner(options, kill_share=kill_share, seed=2)
    results = map(json.loads, (tmp_path / "results.jsonl").read_bytes().splitlines())
    expected = {r["id"]: (r["slot"], len(r["tokens"])) for r in results if r["slot"] is not None}
    roots, slots = {}, {}
    for _, message in collector.messages:
        for span in message.resource_spans[0].scope_spans[0].spans:
            told = {a.key: a.value for a in span.attributes}
            if span.parent_span_id:
                slot = {told["batchdecode.slot"].int_value} if "batchdecode.slot" in told else ()
                slots.setdefault(span.trace_id, set()).update(slot)
            else:
                assert told["gen_ai.request.id"].string_value not in roots
                tokens = told["gen_ai.usage.output_tokens"].int_value
                roots[told["gen_ai.request.id"].string_value] = span.trace_id, tokens
    found = {name: (*slots[trace], tokens) for name, (trace, tokens) in roots.items()}
    assert found == expected


def test_a_report_has_the_numbers_and_all_slots(tmp_path):
    (tmp_path / "requests.jsonl").write_bytes(lines_of(*workload(40)))
    report, numbers, trace = (tmp_path / name for name in ("r.html", "s.json", "t.jsonl"))
    options = options_of(
        tmp_path, report=str(report), summary_json=str(numbers), trace=str(trace), quiet=False
    )
    run_inner(options)
    page, cells = report.read_bytes(), Cells(report.read_bytes()).texts
    summary = json.loads(numbers.read_bytes())
    for path, value in leaves(summary):
        if path in cells:
            assert_is_nearly(value, cells[path])
        else:  # zeros are left out, and distributions of zeros
            assert value in (0, None, [], {}) or path.endswith(".count"), path
    done = batchdecode("trace", trace, "--format", "html", "-o", tmp_path / "t.html")
    assert done.returncode == 0
    _, shown = parts_of(page)
    _, of_trace = parts_of((tmp_path / "t.html").read_bytes())
    assert b"tail drain" in page
    assert b"ttft, " not in page
    assert len(shown) == 3
    assert list(map(spans_of, shown)) == list(map(spans_of, of_trace))


@pytest.mark.parametrize(("live", "shown"), [("always", "w2 slot 11"), ("plain", "✓ 40 ok")])
def test_a_view_shows_all_slots_whoever_dies(tmp_path, capfd, live, shown):
    (tmp_path / "requests.jsonl").write_bytes(lines_of(*workload(40)))
    options = options_of(tmp_path, quiet=False, live=live)
    assert run_inner(options, kill_share=0.3, max_kills=2, seed=2)[0] == 0
    said = capfd.readouterr().err
    assert shown in said
    assert "replaced after dying" in said
