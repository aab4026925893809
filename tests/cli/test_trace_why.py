"""`trace why` and `trace diff` at the command line: sentences, JSON, exit statuses, mistakes."""

import json
import re

import pytest
from engine_runs import traced
from hypothesis import given
from msgspec.structs import replace
from process import batchdecode, lines_of, refused, start
from reference_paged import CROWDED, Limits, PagedJob, paged_workloads, play_paged

from batcher.engine.engine import Engine
from batcher.events import SequenceName
from batcher.explaining.story import answer_of, read_requests
from batcher.models.simulated import SimulatedModel
from batcher.request import Request
from batcher.settings import SchedulingSettings
from batcher.trace.files import encode_events
from cli.views.story_text import WHOLE, tell

ASKED = {"id": "a", "prompt": "x", "max_tokens": 1}
WHICH_RUN = (
    ": run batchdecode trace why 'r 12' FILE, where FILE is a requests file or a trace from "
    "`batchdecode run --trace FILE`"
)


@pytest.fixture
def traces(tmp_path):
    for name, limits in {"tight": Limits(), "roomy": Limits(blocks=30)}.items():
        (tmp_path / f"{name}.jsonl").write_bytes(encode_events(play_paged(CROWDED, limits).events))
    return tmp_path


def test_a_story_says_which_limit_is_a_default():
    done = batchdecode("trace", "why", "1", stdin=b'{"prompt":"x"}\n')
    assert done.stdout.startswith(b"1: 1 prompt token, at most 16 more by default\n")


@pytest.mark.parametrize(
    ("fields", "reason", "stop_reason"),
    [
        ({"stop": ["near", "chair n"]}, 'stop "chair n", 5 tokens', "chair n"),
        ({"stop_token": [48, 289]}, "stop token 289, 2 tokens", 289),
        ({"stop_sequence": [[480, 496]]}, "stop [480, 496], 5 tokens", [480, 496]),
        ({"max_tokens": 8}, "length (max_tokens 8), 8 tokens", None),
        ({"prompt": "Z", "max_tokens": 500}, "stop, 63 tokens", None),
    ],
)
def test_a_story_says_which_stop_matched(fields, reason, stop_reason):
    line = lines_of({"id": "a", "prompt": "The boat"} | fields)
    assert f": {reason}\n" in batchdecode("trace", "why", "a", stdin=line).stdout.decode()
    ended = json.loads(batchdecode("trace", "why", "a", "--json", stdin=line).stdout)["stories"][0]
    assert ended["ended"].get("stop_reason") == stop_reason


def test_the_story_of_a_request_that_waits_for_others_as_text_and_json(traces):
    done = batchdecode("trace", "why", "c", "tight.jsonl", cwd=traces)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.decode().splitlines() == [
        "c: 7 prompt tokens, at most 2 more",
        "  arrived at step 0 (0.0 s)",
        "  waited 7 steps for a slot: 2 of 2 were taken, by a and b; 2 others went",
        "    before it (steps 0-6)",
        "  waited 1 step behind b because a preemption paused admissions for that step",
        "    (step 7)",
        "  waited 1 step behind b for KV blocks: b needed 5 of 8, and a held the others",
        "    (step 8)",
        "  waited 4 steps for KV blocks: it needed 4 of 8, and b held the others; 1",
        "    other went before it (steps 9-12)",
        "  admitted to slot 0 at step 13 (6.750 s)",
        "  computed its prompt in 2 steps (steps 13-14); the first token came with step",
        "    14",
        "  generated for 1 step (step 15)",
        "  ended with step 15 (8.5 s): length (max_tokens 2), 2 tokens",
        "  in all 16 steps, 8.5 s: 13 steps waiting (6.750 s), 2 steps prefill (1.375",
        "    s), 1 step decode (0.375 s)",
    ]
    done = batchdecode("trace", "why", "c", "tight.jsonl", "--json", cwd=traces)
    (story,) = json.loads(done.stdout)["stories"]
    assert story["parts"][2] == {
        "start": 8,
        "end": 9,
        "phase": "wait",
        "cause": "kv",
        "behind": "b",
        "blocks": 5,
        "by": ["a"],
    }
    assert story["ended"] == {"step": 15, "time": 8.5, "reason": "length", "tokens": 2}


def test_an_unknown_id_gets_those_like_it_and_the_longest_needs_none(traces):
    said = refused("trace", "why", "d", "tight.jsonl", cwd=traces)
    assert said == "error: tight.jsonl has no request d; known: a, b and c\n"
    requests = lines_of({"id": "first", "prompt": "x"}, {"id": "second", "prompt": "x"})
    done = batchdecode("trace", "why", "fist", "-", cwd=traces, stdin=requests)
    assert done.stderr == "error: <stdin> has no request fist; known: first and second\n"
    many = lines_of(*({"id": f"request-{i}", "prompt": "x", "max_tokens": 1} for i in range(99)))
    (traces / "many requests").write_bytes(many)
    for near, hint in (
        ("reqest-17", "; did you mean request-17, request-7 or request-1?"),
        ("x", ""),
    ):
        done = batchdecode("trace", "why", near, "many requests", cwd=traces)
        assert done.stderr == (
            f"error: many requests has no request {near}{hint} "
            "(batchdecode trace 'many requests' --format spans lists all)\n"
        )
    why_c = batchdecode("trace", "why", "c", "tight.jsonl", cwd=traces)
    found = batchdecode("trace", "why", "--longest", "tight.jsonl", cwd=traces)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == b"longest of 3 outputs: c\n" + why_c.stdout
    waited = batchdecode("trace", "why", "--longest-wait", "tight.jsonl", cwd=traces)
    assert waited.stdout == b"longest wait of 3 outputs: c\n" + why_c.stdout
    trace = (traces / "tight.jsonl").read_bytes()
    as_json = batchdecode("trace", "why", "--longest", "--json", cwd=traces, stdin=trace)
    assert [story["id"] for story in json.loads(as_json.stdout)["stories"]] == ["c"]


def test_on_a_terminal_a_line_without_a_file_is_told_which_are_meant(traces, tty):
    for name, hint in {
        "r 12": WHICH_RUN,
        "tight.jsonl": "; put the ID of a request, or --longest, before the file tight.jsonl",
    }.items():
        process = start("trace", "why", name, cwd=traces, stdin=tty[1])
        said = process.communicate()[1].decode()
        assert said == f"error: trace why {name} needs an INPUT, - for stdin{hint}\n"


def test_the_id_goes_before_the_file_and_without_one_it_is_said(traces):
    done = batchdecode("trace", "why", "tight.jsonl", "c d", cwd=traces)
    assert done.returncode == 2
    assert done.stderr == (
        "error: cannot read c d: No such file or directory; "
        "did you mean: batchdecode trace why 'c d' tight.jsonl?\n"
    )
    neither = batchdecode("trace", "why", "x" * 300, "d", cwd=traces)
    assert neither.stderr == "error: cannot read d: No such file or directory\n"
    for line, said in {
        "": "trace why needs the ID of a request, or --longest",
        "--longest a tight.jsonl": "--longest cannot be used with an ID: drop a or --longest",
        "--longest --longest-wait": "--longest cannot be used with --longest-wait",
        "tight.jsonl": "<stdin> has no request tight.jsonl; "
        "put the ID of a request, or --longest, before the file tight.jsonl",
    }.items():
        done = batchdecode("trace", "why", *line.split(), cwd=traces, stdin=lines_of(ASKED))
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr == f"error: {said}\n"
    empty = batchdecode("trace", "why", "r 12", cwd=traces)
    assert empty.stderr == f"error: <stdin> has no request r 12{WHICH_RUN}\n"
    bad = lines_of({"id": "a", "promt": "x"})
    done = batchdecode("trace", "why", "--longest", "--keep-going", cwd=traces, stdin=bad)
    assert done.stderr.endswith("\nerror: <stdin> has no request\n")


def test_requests_are_run_and_what_went_wrong_is_told(tmp_path):
    two = {"id": "a", "prompt": "x", "max_tokens": 2, "ignore_eos": True, "n": 2, "temperature": 1}
    bad = {"id": "b", "prompt": "x", "max_tokens": "2"}
    (tmp_path / "r.jsonl").write_bytes(lines_of(two, bad))
    told = batchdecode("trace", "why", "a", "r.jsonl", "-b1", "--keep-going", cwd=tmp_path)
    lines = told.stdout.decode().splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "a: 1 prompt token, at most 2 more",
        "a#1: 1 prompt token, at most 2 more",
    ]
    assert (
        "  waited 2 steps for a slot: 1 of 1 was taken, by a; 1 other went before it\n"
        in told.stdout.decode()
    )
    told = batchdecode("trace", "why", "b", "r.jsonl", "--keep-going", cwd=tmp_path)
    assert told.stdout == b"b: not a valid request (invalid-type), so it never joined the queue\n"
    (tmp_path / "tired.py").write_text("def f(rows): raise RuntimeError('no \\x1b[31m')")
    (tmp_path / "r.jsonl").write_bytes(lines_of(ASKED))
    told = batchdecode("trace", "why", "a", "r.jsonl", "--model", "tired:f", cwd=tmp_path)
    assert told.stdout.decode().splitlines()[-3:-1] == [
        "  ended with step 0: error, 0 tokens",
        r"  model-error: step 0: tired:f raised RuntimeError: no \x1b[31m",
    ]


@given(paged_workloads())
def test_there_are_words_for_all_and_the_longest_takes_the_most_seconds(workload):
    run = play_paged(*workload)
    for number in (len(run.events), len(run.events) // 2):
        for story in answer_of(read_requests(run.events[:number])).stories:
            title, *lines = tell(story)
            assert title.startswith(f"{story.id}: ")
            assert lines[0].startswith("  arrived at step ")
            assert lines[-1].startswith(f"  in all {story.steps.sum:,} step")
    kept = read_requests(play_paged(*workload).events)
    if not kept.all:
        assert kept.longest is None
        return
    seconds = [story.seconds.sum for story in answer_of(kept).stories]
    assert kept.all.index(kept.longest) == seconds.index(max(seconds))
    waits = [story.seconds.wait for story in answer_of(kept).stories]
    assert waits[kept.all.index(kept.longest_wait)] == pytest.approx(max(waits))


def test_a_difference_says_where_why_and_how_much_up_to_where_a_trace_breaks_off(traces):
    done = batchdecode("trace", "diff", "tight.jsonl", "roomy.jsonl", "--top", "2", cwd=traces)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.decode().splitlines()
    assert lines[3] == "the schedules diverge at step 7 (3.750 s in A, 3.750 s in B):"
    assert lines[12].split()[:8] == ["c", "8.500", "6.500", "-2.000", "13", "9", "0", "0"]
    assert "  preemptions                    1      0      -1" in lines
    lines = (traces / "tight.jsonl").read_bytes().splitlines(keepends=True)
    (traces / "cut.jsonl").write_bytes(b"".join(lines[:-3]))
    done = batchdecode("trace", "diff", "cut.jsonl", "tight.jsonl", cwd=traces)
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.decode().splitlines()
    assert told[2] == "A breaks off at step 14: only what came before step 14 is compared"
    assert told[3] == "schedules: equal up to there, the same decisions in the same steps"
    assert not any("has not arrived" in line for line in told)


def test_a_trace_that_contradicts_itself_is_refused(traces):
    trace = (traces / "tight.jsonl").read_bytes()
    broken = trace.replace(b'"slot":1,"reason":"kv"', b'"slot":0,"reason":"kv"')
    (traces / "broken.jsonl").write_bytes(broken)
    for arguments in (["why", "a", "broken.jsonl"], ["diff", "broken.jsonl", "tight.jsonl"]):
        said = refused("trace", *arguments, cwd=traces)
        assert "contradict each other: 'b' is preempted in slot 0" in said


def test_where_each_step_takes_a_second_only_times_that_are_no_number_of_steps_are_told():
    late = [
        {"id": "a", "prompt": "x", "max_tokens": 3, "ignore_eos": True, "arrival_time": at}
        for at in (0, 9.5)
    ]
    late[1]["id"] = "b"
    first, second = (told_of(late, name) for name in "ab")
    assert first[1:3] == ["  arrived at step 0", "  admitted to slot 0 at step 0"]
    assert second[1:3] == [
        "  arrived at step 3 (time 9.5)",
        "  admitted to slot 0 at step 3 (time 9.5)",
    ]
    assert second[-2:] == [
        "  ended with step 5 (time 12.5): length (max_tokens 3), 3 tokens",
        "  in all 3 steps: 1 step prefill, 2 steps decode",
    ]


def told_of(requests, name, **settings):
    """The story of the request `name` of a run of one slot."""
    engine = Engine(SimulatedModel(), 1, settings=SchedulingSettings(**settings))
    events = traced(engine, [Request(**request) for request in requests])
    (story,) = answer_of(read_requests(events, name)).stories
    return tell(story)


@pytest.mark.parametrize(
    ("source", "whose"),
    [
        (None, ""),
        (SequenceName("a", 0), ", from a"),
        (SequenceName("b", 0), ", its own"),
        (SequenceName("b", 1), ", from b#1"),
        (SequenceName("b", 0, "negative"), ", from b~"),
    ],
)
def test_what_was_found_in_the_cache_is_told_with_whose_it_was(source, whose):
    run = play_paged([PagedJob("a", 3, 2), PagedJob("b", 3, 2, 1.0, cached=2)], Limits())
    events = [
        replace(event, cached_from=source) if getattr(event, "cached", 0) else event
        for event in run.events
    ]
    (story,) = answer_of(read_requests(events, "b")).stories
    (line,) = [line for line in tell(story) if "in the cache" in line]
    assert line.endswith(f"; 2 of 3 prompt tokens were in the cache{whose}")


def test_many_rounds_are_one_line_that_adds_up_and_all_tells_each():
    settings = SchedulingSettings(policy="sjf", kv_blocks=12, block_size=4)
    engine = Engine(SimulatedModel(), 8, settings=settings)
    requests = [
        Request(prompt=[n + 1] * 4, id=f"r{n}", max_tokens=40 - n, ignore_eos=True)
        for n in range(30)
    ]
    stories = answer_of(read_requests(traced(engine, requests))).stories
    story = max(stories, key=lambda story: len(story.spans))
    assert len(story.spans) > 4
    told = tell(story)
    (line,) = [line for line in told if "preempted again" in line]
    assert f"preempted again {len(story.spans) - 2} times: " in line
    summed = re.findall(r"(\d+) steps? (?:waiting|prefill|decode|standing still)", line)
    assert sum(map(int, summed)) == story.spans[-2].end - story.spans[0].end
    assert sum("resumed" in line for line in told) == 2
    whole = tell(story, WHOLE)
    assert sum("resumed in" in line for line in whole) == len(story.spans) - 1
    waits = [part for part in story.parts if part.phase == "wait"]
    assert sum(line.startswith("  waited") for line in whole) == len(waits)
