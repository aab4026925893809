"""What `trace diff` says of each request, and in all, is what the lines of the traces add up to."""

import json

import pytest
from engine_runs import traced
from process import batchdecode, lines_of, refused

from batcher.engine.engine import Engine
from batcher.events import RunEvent
from batcher.explaining.differences import compare
from batcher.models.simulated import SimulatedModel
from batcher.request import Request
from batcher.trace.files import encode_events
from cli.views.story_text import results_of

# Three share eight tokens, which are found; one gets all it asks for at once, without a slot.
REQUESTS = lines_of(
    {"id": "a", "prompt": [*range(1, 9), 9], "max_tokens": 12, "ignore_eos": True},
    {"id": "b", "prompt": [*range(1, 9), 20], "max_tokens": 12, "ignore_eos": True},
    {"id": "c", "prompt": [*range(1, 9), 21], "max_tokens": 5, "arrival_time": 3},
    {"id": "none", "prompt": "x", "max_tokens": 0, "arrival_time": 3.5},
    {"id": "two", "prompt": "abc", "max_tokens": 3, "n": 2, "temperature": 1, "arrival_time": 4.5},
)
TIGHT = ["-b2", "--kv-blocks=7", "--block-size=4"]
RUNS = {
    "tight": TIGHT,
    "roomy": ["-b2", "--kv-blocks=30", "--block-size=4"],
    "slow": [*TIGHT, "--profile=rtx4090_llama3.1-8b"],
    "wide": ["-b4", "--kv-blocks=9", "--block-size=4"],
}


def by_hand(trace):
    """Return what became of each sample, by its name, and the sums of the run."""
    events = [json.loads(line) for line in trace.read_bytes().splitlines()]
    ends = [end for event in events for end in event.get("ends", [])]
    arrivals = {(e["id"], e["index"]): e for e in events if e["event"] == "arrive"}
    samples = {}
    for name, arrival in arrivals.items():
        of_it = [e for e in events if (e.get("id"), e.get("index")) == name]
        admissions = [e for e in of_it if e["event"] == "admit"]
        preemptions = [e for e in of_it if e["event"] == "preempt"]
        (finish,) = [e for e in of_it if e["event"] == "finish"]
        end = finish["step"] + (finish["slot"] is not None)
        ways_out = [e["step"] for e in preemptions] + [end] * (finish["slot"] is not None)
        in_slots = sum(ways_out) - sum(e["step"] for e in admissions)
        samples[name] = {
            "admitted": min((e["step"] for e in admissions), default=None),
            "latency_steps": end - arrival["step"],
            "latency": round(ends[finish["step"]] - arrival["time"], 6) if admissions else None,
            "wait_steps": end - arrival["step"] - in_slots,
            "preemptions": len(preemptions),
            "recomputed": sum(e["tokens"] for e in preemptions),
            "cached": sum(e.get("cached", 0) for e in admissions),
            "outcome": finish["reason"],
            "tokens": finish["tokens"],
        }
        through = [e for e in of_it if e["event"] in {"admit", "prefill"} and not e.get("left")]
        if through:
            samples[name]["ttft"] = round(ends[through[0]["step"]] - arrival["time"], 6)
    return samples, totals(samples.values(), len(ends), ends[-1])


def totals(samples, steps, time):
    """Return the sums of a run; latency and wait are means of those that had a slot."""
    names = ("tokens", "preemptions", "recomputed", "cached")
    sums = {name: sum(sample[name] for sample in samples) for name in names}
    served = [sample for sample in samples if sample["latency"] is not None]
    for name in ("latency", "wait_steps"):
        sums[name] = round(sum(sample[name] for sample in served) / len(served), 6)
    return sums | {"steps": steps, "time": round(time, 6), "ended": len(samples)}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    (folder / "in").write_bytes(REQUESTS)
    for name, options in RUNS.items():
        told = ["--trace", name, "--summary-json", f"{name}.summary"]
        batchdecode("run", "in", "-q", "-o/dev/null", *told, *options, cwd=folder)
    return folder


@pytest.mark.parametrize("name_b", [name for name in RUNS if name != "tight"])
def test_what_became_of_each_request_is_summed_over_all_that_happened_to_it(traces, name_b):
    samples_a, totals_a = by_hand(traces / "tight")
    samples_b, totals_b = by_hand(traces / name_b)
    assert samples_a["b", 0]["cached"] == 8 + 16, "found when it came, and when it came again"
    done = batchdecode("trace", "diff", "tight", name_b, "--json", cwd=traces)
    found = json.loads(done.stdout)
    for run, in_all in (("tight", totals_a), (name_b, totals_b)):
        latencies = json.loads((traces / f"{run}.summary").read_text())["latencies"]
        in_all |= {name: latencies[name] for name in ("ttft", "tpot", "e2e")}
    assert (found["totals_a"], found["totals_b"]) == (totals_a, totals_b)
    assert {
        (change["id"], change["index"]): (change["a"], change["b"]) for change in found["changes"]
    } == {name: (a, samples_b[name]) for name, a in samples_a.items() if a != samples_b[name]}


def test_workers_are_refused_by_name(tmp_path):
    (tmp_path / "in").write_bytes(REQUESTS)
    started = RunEvent(batch=2, model="m", settings={}, workers=2)
    (tmp_path / "t2").write_bytes(encode_events([started]))
    said = refused("trace", "diff", "in", "t2", cwd=tmp_path)
    assert "cannot compare runs with several workers, and t2 has 2" in said


def test_what_changed_is_as_wide_as_the_terminal_and_says_what_has_no_room():
    name = "a-request-with-a-long-name-of-its-own"
    requests = [
        Request(prompt=[1], id=f"{name}-{n}", max_tokens=9000, ignore_eos=True) for n in range(4)
    ]
    comparison = compare(*(traced(Engine(SimulatedModel(), batch), requests) for batch in (1, 4)))
    for width, without in {
        None: [],
        80: ["preempted", "ended"],
        70: ["wait", "preempted", "ended"],
    }.items():
        lines = list(results_of(comparison, 9, width))
        widest = max(map(len, lines))
        assert widest > 80 if width is None else widest <= width
        head = lines[1].split()
        assert [title for title in ("wait", "preempted", "ended") if title not in head] == without
        assert any("no room for" in line for line in lines) is bool(without)
