"""What Prometheus is told: the numbers of the summary, at any time of any run."""

import re
from pathlib import Path
from typing import get_args

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from scheduling_settings import requests_of_all_kinds, scheduling_settings, sharing, step_times
from test_timed_numbers import served, times_of

from batcher import Engine, SimulatedModel
from batcher.events import BlockedReason, DropEvent, RunEvent
from batcher.metrics.prometheus import COUNTS, GAUGES, LATENCIES, SPREADS, RunCollector
from batcher.metrics.summary import RunMetrics
from batcher.speculation.settings import SpeculationSettings

DRAFTS = SpeculationSettings(draft="simulated:0.7")
NAMES = {field: name for name, (field, _) in LATENCIES.items()}


class NoEngine:
    """What is asked of an engine, where there are only events."""

    batch_size, num_steps, num_running, num_waiting, num_coming = 4, 0, 0, 0, 0
    block_use = None


def told_by(collector):
    """Return the samples of what Prometheus reads, by name and the label beside the usual two."""
    registry = CollectorRegistry()
    registry.register(collector)
    return samples_of(text_string_to_metric_families(generate_latest(registry).decode()))


def samples_of(families):
    told = {}
    for family in families:
        for name, labels, value, *_ in family.samples:
            own = {**labels}
            assert (own.pop("model_name"), own.pop("engine")) == ("simulated", "0")
            told[name, *own.values()] = value
    return told


def counts_of(summary, dropped):
    """Return the counters that a summary says there are."""
    counts = {
        ("vllm:prompt_tokens_total",): summary.prompt_tokens,
        ("vllm:generation_tokens_total",): summary.generated_tokens,
        ("batchdecode_steps_total",): summary.steps,
        ("vllm:num_preemptions_total",): summary.preemptions.count if summary.preemptions else 0,
    }
    for reason, count in summary.finish_reasons.items():
        told = "abort" if reason == "aborted" else reason
        counts["vllm:request_success_total", told] = count + dropped.count(reason)
    for reason in dropped:
        counts["batchdecode_dropped_samples_total", reason] = dropped.count(reason)
    if summary.prefix_cache is not None:
        counts["vllm:prefix_cache_queries_total",] = summary.prefix_cache.asked
        counts["vllm:prefix_cache_hits_total",] = summary.prefix_cache.found
    for reason in get_args(BlockedReason) if summary.blocked is not None else ():
        count = summary.blocked.get(reason, 0)
        counts["batchdecode_blocked_steps_total", reason] = count
    if (found := summary.speculation) is not None:
        name = "vllm:spec_decode_num"
        counts[f"{name}_drafts_total",] = found.steps
        counts[f"{name}_draft_tokens_total",] = found.drafted
        counts[f"{name}_accepted_tokens_total",] = found.accepted
        for position, one in enumerate(found.by_position):
            counts[f"{name}_accepted_tokens_per_pos_total", str(position)] = one.accepted
    return counts


def check_equal(told, summary, dropped=()):
    """Compare what is told with the summary, number by number."""
    counts = {key: value for key, value in told.items() if key[0].endswith("_total")}
    assert counts == counts_of(summary, dropped)
    if summary.latencies is None:  # a step lasts 1.0, so its steps are seconds
        found = {"ttft": summary.first_token, "queue": summary.wait}
    else:
        found = asdict(summary.latencies)
    for field, of in found.items():
        count, total = (told[f"{NAMES[field]}_{what}",] for what in ("count", "sum"))
        assert count == (0 if of is None else of.count)
        if summary.latencies is not None and of is not None:
            assert total == pytest.approx(of.mean * of.count, abs=1e-6 * of.count)


@given(served())
@examples(80)
def test_buckets_count_what_a_look_at_every_token_tells(run):
    events, truth = run
    watched, plain = RunMetrics(is_watched=True), RunMetrics()
    collector = RunCollector(watched, NoEngine(), ("simulated", "0"))
    collector.observe(events)
    plain.observe(events)
    told = told_by(collector)
    assert collector.metrics.summary() == plain.summary()
    check_equal(told, plain.summary())
    ended = [j for j in truth.jobs if j.ended_as in {"length", "stop"} and j.token_times]
    exact = {
        "ttft": [j.token_times[0] - j.arrival for j in truth.jobs if j.token_times],
        "queue": [j.admitted[0] - j.arrival for j in truth.jobs if j.admitted],
        "e2e": [times_of(job)["e2e"] for job in ended],
        "tpot": [times_of(job)["tpot"] for job in ended if len(job.token_times) > 1],
    }
    for field, times in exact.items():
        for (name, *labels), count in told.items():
            if name == f"{NAMES[field]}_bucket":
                bound = float(labels[0]) + 5e-7  # times are whole microseconds
                assert sum(time <= bound for time in times) <= count
                assert count <= sum(time <= bound * 1.0005 for time in times)


@given(
    st.data(),
    st.lists(sharing(requests_of_all_kinds()), max_size=10),
    st.integers(3, 5),
    step_times(),
)
@examples(40)
def test_counts_only_grow_and_are_those_of_the_summary_in_the_end(data, wanted, batch, time):
    engine = Engine(
        SimulatedModel(),
        batch,
        settings=data.draw(scheduling_settings(batch, st.sampled_from([None, 60]), 4)),
        step_time=time,
        speculation=data.draw(st.sampled_from([None, DRAFTS])),
    )
    collector = RunCollector(RunMetrics(is_watched=True), engine, ("simulated", "0"))
    events, last = [engine.run_event()], {}
    collector.observe(events)
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        events += (outcome := engine.step()).events
        if outcome.events:
            collector.observe(outcome.events)
            told = samples_of(collector.collect())
            assert {key for key in last if key[0] not in GAUGES and told[key] < last[key]} == set()
            assert told["batchdecode_steps_total",] == engine.num_steps
            last = told
    events.append(engine.end_event())
    collector.observe(events[-1:])
    told, plain = told_by(collector), RunMetrics()
    plain.observe(events)
    summary = plain.summary()
    assert collector.metrics.summary() == summary
    check_equal(told, summary, [event.reason for event in events if type(event) is DropEvent])
    assert told["vllm:request_generation_tokens_sum",] == summary.generated_tokens
    assert told["vllm:request_prompt_tokens_sum",] == summary.prompt_tokens
    assert told["vllm:request_prompt_tokens_count",] == summary.requests == len(wanted)
    assert told["vllm:num_requests_running",] == told["vllm:num_requests_waiting",] == 0


def test_a_number_is_counted_with_the_bound_that_it_meets():
    collector = RunCollector(RunMetrics(is_watched=True), NoEngine(), ("simulated", "0"))
    collector.observe([RunEvent(batch=4, model="simulated", settings={})])
    for number in (1, 2, 2, 6, 10**9):
        collector.metrics.counted.outputs.add(number)
    told = told_by(collector)
    name = "vllm:request_generation_tokens"
    counts = {bound: told[f"{name}_bucket", bound] for bound in ("1.0", "2.0", "5.0", "+Inf")}
    assert counts == {"1.0": 1, "2.0": 3, "5.0": 3, "+Inf": 5}
    assert (told[f"{name}_count",], told[f"{name}_sum",]) == (5, 10**9 + 11)


def test_the_page_has_every_name_and_no_other():
    page = (Path(__file__).parents[2] / "docs/guide/observability.md").read_text()
    table = page.partition("| metric |")[2].partition("\n\n")[0]
    cells = "".join(line.split("|")[1] for line in table.splitlines()[1:])
    names = re.findall(r"`((?:vllm:|batchdecode_)\w+)`", cells)
    assert names == [*GAUGES, *(f"{name}_total" for name in COUNTS), *SPREADS]
