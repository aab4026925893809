"""Runs that must give the same bytes from release to release, with the truth beside them.

`python tests/test_golden.py` writes the files anew; look at what has changed before you keep it.
"""

import subprocess
from pathlib import Path

import msgspec
import pytest
from command_server import command_line
from made_events import metrics_of, read_trace
from reference import ENGLISH, as_text, decode_alone

from batcher.events import DropEvent
from batcher.requests.lines import ParsedLine, RequestParser
from batcher.requests.results import decode_result_line
from batcher.requests.validation import ModelCapabilities
from batcher.trace.timeline import Timeline

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
CASES = {  # name -> arguments of run
    "example": ["tests/golden/example.requests.jsonl", "--batch", "2"],
    "sample": ["samples/requests.jsonl", "--batch", "8"],
    "in-order": [
        *("samples/requests.jsonl", "--batch", "3", "--keep-order"),
        *("--config", "tests/golden/seed-5.yaml"),
    ],
    "openai": ["samples/openai_batch.jsonl", "--batch", "2"],
    "bad": ["samples/bad.jsonl", "--keep-going"],
    "sampling": ["samples/decoding/sampling.jsonl", "--batch", "5"],
    "beams": ["samples/decoding/beams.jsonl", "--batch", "5"],
    "states": ["samples/decoding/states.jsonl", "--batch", "1"],
    "paged": [
        *("samples/requests.jsonl", "--batch", "6", "--policy", "sjf"),
        *("--kv-blocks", "56", "--block-size", "4", "--max-batch-tokens", "12"),
    ],
    "healing": ["samples/decoding/healing.jsonl", "--batch", "2"],
}


def decode_case(name, trace):
    command = [*command_line(), "run", *CASES[name], "--quiet", "--trace", str(trace)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    assert done.returncode == (1 if name == "bad" else 0)
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_a_run_gives_the_bytes_it_gave(name, tmp_path):
    trace = tmp_path / "trace.jsonl"
    results = decode_case(name, trace)
    assert results == (GOLDEN / f"{name}.results.jsonl").read_bytes()
    assert trace.read_bytes() == (GOLDEN / f"{name}.trace.jsonl").read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_the_trace_accounts_for_the_results(name):
    lines = (GOLDEN / f"{name}.results.jsonl").read_bytes().splitlines()
    results = [result for line in lines for result in decode_result_line(line)]
    events = list(
        read_trace((GOLDEN / f"{name}.trace.jsonl").read_bytes().splitlines(keepends=True))
    )
    timeline = Timeline.from_events(events)
    timeline.check_integrity()
    stays = {}
    for span in sorted(timeline.spans, key=lambda span: span.start):
        if span.outcome != "unused":
            stays.setdefault((span.id, span.index), []).append(span)
    spans = {
        (*row, of_it[-1].slot, of_it[0].start, of_it[-1].end - 1) for row, of_it in stays.items()
    }
    held = [result for result in results if result.slot is not None]
    kept = {(r.id, r.index, r.slot, r.steps.admitted, r.steps.finished) for r in held}
    dropped = {(event.id, event.index) for event in events if isinstance(event, DropEvent)}
    assert {span for span in spans if span[:2] not in dropped} == kept
    summary = metrics_of(events).summary()
    assert (summary.outputs, summary.steps) == (len(results), timeline.num_steps)


@pytest.mark.parametrize("name", ["example", "sample", "openai", "paged"])
def test_the_results_are_those_of_decoding_alone(name):
    source = (ROOT / CASES[name][0]).read_bytes().splitlines()
    parser = RequestParser(ModelCapabilities(vocab_size=512))
    parsed = [parser.parse(line, number) for number, line in enumerate(source, 1)]
    requests = {line.request.id: line.request for line in parsed if isinstance(line, ParsedLine)}
    for line in (GOLDEN / f"{name}.results.jsonl").read_bytes().splitlines():
        [result] = decode_result_line(line)
        expected = decode_alone(requests[result.id], ENGLISH)
        got = (result.tokens, result.text, result.finish_reason, result.stop_reason)
        assert got == expected


def test_the_example_holds_its_slots_as_the_documentation_says():
    events = read_trace((GOLDEN / "example.trace.jsonl").read_bytes().splitlines(keepends=True))
    steps = [row.slots for row in Timeline.from_events(events).select_steps()]
    assert steps == [["a", "b"], ["a", "c"], ["a", "c"], *[["d", None]] * 4]


def test_a_golden_line_is_plain_json():
    line = (GOLDEN / "sample.results.jsonl").read_bytes().splitlines()[0]
    fields = msgspec.json.decode(line)
    assert fields["text"] == as_text(fields["tokens"], ENGLISH)


if __name__ == "__main__":
    for case in CASES:
        found = decode_case(case, GOLDEN / f"{case}.trace.jsonl")
        (GOLDEN / f"{case}.results.jsonl").write_bytes(found)
