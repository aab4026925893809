import re

import pytest
from made_events import RUN, admit, arrive, metrics_of
from msgspec.structs import replace
from reference_drafts import DraftedJob, play_drafts
from reference_schedule import Job, jobs_of, play
from reference_units import beams, play_units, samples

from batcher.events import AdmitEvent, EndEvent, FinishEvent, StepsEvent
from batcher.metrics.counts import PositionAcceptance
from batcher.metrics.slo import parse_slo
from batcher.metrics.summary import (
    BudgetUse,
    Computed,
    KvUse,
    Preemptions,
    PrefixHits,
    RunMetrics,
    WorkerSummary,
    unit_of,
    with_wall_clock,
)
from cli.screen.summary import RunFiles, render_summary, summary_lines
from cli.screen.terminal import number, percent, whole_percent


def summary_of(jobs, batch=2, num_events=None):
    return metrics_of(play(jobs, batch).events[:num_events]).summary()


NO_FILES = RunFiles()


def lines_of(summary, files=NO_FILES, *, is_complete=True, **more):
    given = {"elapsed": 2.13, "encoding": "utf-8", "has_color": False} | more
    is_complete = is_complete and not summary.unfinished
    text = render_summary(summary, files, is_complete=is_complete, **given)
    assert text.endswith("\n")
    return text.splitlines()


BUSY_JOBS = [
    *jobs_of(*[40] * 20),
    Job("late", 500, 430.0),
    Job("bad", 3, 2000.0, reason="follow", outcome="error"),
]


def test_six_lines_tell_of_a_run_and_no_word_is_broken():
    files = RunFiles(results="results.jsonl", trace="run.trace.jsonl")
    assert lines_of(summary_of(BUSY_JOBS), files) == [
        "✓ 21 ok  1 failed   903 steps · 2 slots · 72% busy · 2.1 s",
        "  queue p50 160 p99 360   ttft p50 161 p99 361   e2e p50 240 p99 500  (steps)",
        "  idle: 27.9% = 0.2% tail drain, 27.7% empty queue",
        "  any schedule needs at least 652 steps; this one took 38.5% more",
        "  computed 1,391 positions, no padding",
        "  results.jsonl (22)   trace: batchdecode trace run.trace.jsonl",
    ]
    rest = {"is_complete": False, "num_unread": 1200}
    assert lines_of(summary_of([]), is_complete=False) == ["■ no requests"]
    assert lines_of(summary_of([]), **rest) == ["■ 1,200 not begun"]
    assert lines_of(summary_of(jobs_of(1)), **rest)[0].startswith("■ 1 ok  1,200 not begun   1 st")
    jobs = [*[Job(f"r{n}", 70, n * 34.0) for n in range(400)], Job("x", 3, 0.0, outcome="error")]
    summary = summary_of(jobs)
    each = WorkerSummary(requests=1, generated_tokens=9_999, steps=9_999, busy_share=0.75)
    summary = replace(summary, workers=[each] * 4, unfinished=1_234)
    for encoding in ("utf-8", "ascii"):
        whole = lines_of(summary, encoding=encoding, num_unread=12_345)
        for columns in (40, 60, 80, 200):
            lines = lines_of(summary, encoding=encoding, num_unread=12_345, columns=columns)
            assert max(map(len, lines)) <= columns
            assert " ".join(lines).split() == " ".join(whole).split()
            assert not any(re.search(r"[\d.]$", line) for line in lines if "p99" not in line)


def drafts_of(*lengths, is_timed=False):
    metrics = RunMetrics()
    jobs = [DraftedJob(f"r{number}", 9, length) for number, length in enumerate(lengths)]
    metrics.observe(play_drafts(jobs, 2, 3, is_timed=is_timed).events)
    return metrics.summary()


def test_lines_of_drafts_fit_whatever_their_numbers():
    summary = drafts_of(9)
    shares = [PositionAcceptance(10**9, 10**9, 1.0)] * 64
    changes = {"gain": 123_456, "cost": 123_456, "failure": 12_345}
    found = replace(summary.speculation, by_position=shares, changes=changes, drafted=10**15)
    found = replace(found, rule="leviathan")
    lines = lines_of(replace(summary, speculation=found))
    assert max(map(len, lines)) <= 80
    assert any(f"by position {'100% ' * 8}..." in line for line in lines)


@pytest.mark.parametrize(
    ("headline", "jobs", "num_events"),
    [
        ("✓ no requests", [], None),
        ("✓ 2 ok   1 step · 8 slots · 25% busy · 2.1 s", jobs_of(1, 1), None),
        (
            "✗ 2 failed   1 step · 8 slots · 25% busy · 2.1 s",
            [Job("a", 1, outcome="error"), Job("b", 1, outcome="error")],
            None,
        ),
        (
            "✓ 1 ok  1 aborted   3 steps · 8 slots · 21% busy · 2.1 s",
            [Job("a", 2, outcome="aborted"), Job("b", 3)],
            None,
        ),
        ("■ 1 ok  1 unfinished   2 steps · 8 slots · 25% busy · 2.1 s", jobs_of(9, 2), 6),
    ],
)
def test_the_headline_says_how_it_ended(headline, jobs, num_events):
    assert lines_of(summary_of(jobs, 8, num_events))[0] == headline


@pytest.mark.parametrize(
    ("line", "jobs"),
    [
        ("  idle: 50.0% tail drain", jobs_of(16)),
        ("  idle: 25.0% waiting for arrivals", [Job("a", 4), Job("b", 2, 2.0)]),
        ("  idle: 25.0% empty queue", [Job("a", 4), Job("b", 2, 2.0, reason="follow")]),
        ("  idle: <0.1% tail drain", jobs_of(1001, 1000)),
    ],
)
def test_idle_slot_steps_have_a_cause(line, jobs):
    assert lines_of(summary_of(jobs))[2] == line


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "no-such-encoding"])
def test_an_encoding_without_the_marks_gets_plain_ones(encoding):
    lines = lines_of(summary_of(BUSY_JOBS), encoding=encoding)
    assert lines[0] == "* 21 ok  1 failed   903 steps, 2 slots, 72% busy, 2.1 s"
    assert all(line.isascii() for line in lines)


@pytest.mark.parametrize(
    ("line", "units", "options"),
    [
        ("constraints: 1 compiled, 999 reused", samples("a", 1), {"grammars": (1, 999)}),
        ("2 tokens forced in 2 jumps", samples("a", 8), {"seed": 4}),
        ("beams: 6 forks", beams("b", 2, 6), {"seed": 1}),
    ],
)
def test_constraints_and_beams_have_a_line_where_there_were_any(line, units, options):
    metrics = metrics_of(play_units(units, 4, options.get("seed")).events)
    metrics.note_constraints(*options.get("grammars", (0, 0)))
    assert f"  {line}" in lines_of(metrics.summary())


def timed_summary(slo="ttft=0.5,tpot=50ms", **changes):
    """The numbers of two requests: three tokens in 0.3 s, and one in 2 s."""
    events = [
        *(replace(RUN, step_time={"name": "test"}), arrive("a"), arrive("b"), admit("a", 0)),
        FinishEvent(2, 0.25, "a", 0, 0, "length", None, 3),
        AdmitEvent(3, 0.3, "b", 0, 0, "refill"),
        FinishEvent(3, 0.3, "b", 0, 0, "length", None, 1),
        StepsEvent(0, [0.2, 0.25, 0.3, 2.0], [0, 1, 1, 0], [5, 0, 0, 5], *[[1, 1, 1, 1]] * 4),
        EndEvent(4, 2.0, 4, 2),
    ]
    return replace(metrics_of(events, None if slo is None else parse_slo(slo)).summary(), **changes)


@pytest.mark.parametrize(
    ("num_tokens", "unfinished", "has_rates"),
    [(4, 0, True), (4, 1, True), (0, 0, True), (0, 1, False)],
)
def test_unfinished_outputs_alone_have_no_rate(num_tokens, unfinished, has_rates):
    summary = timed_summary(generated_tokens=num_tokens, unfinished=unfinished)
    text = "\n".join(lines_of(with_wall_clock(summary, 2.0)))
    assert f"wall clock 2 s{', ' if has_rates else ''}" in text
    assert (f"{num_tokens // 2} output tokens/s" in text) == has_rates
    assert ("throughput" in text) == has_rates


def test_seconds_take_the_place_of_steps_where_steps_are_not_alike_or_promised():
    assert lines_of(timed_summary()) == [
        "✓ 2 ok   4 steps · 2 slots · 50% busy · 2.1 s",
        "  idle: 50.0% = 12.5% tail drain, 37.5% too few free",
        "  queue p50 0 p99 300 ms   ttft p50 0.2 p99 2 s   tpot 50 ms",
        "  itl p50 50 p99 50 ms   e2e p50 0.3 p99 2 s",
        "  throughput 1 outputs/s, 2 output tokens/s",
        "  goodput 50.0% of outputs (0.5/s) within ttft 0.5 s, tpot 50 ms",
        "  missed: 1 ttft",
        "  computed 12 positions, no padding   right padding would add 40.0% to prefills",
    ]
    assert lines_of(timed_summary(None), is_timed=False)[2:5] == [
        "  queue p50 0 p99 0.3 steps   ttft p50 0.2 p99 2 steps   tpot 0.05 steps",
        "  itl p50 0.05 p99 0.05 steps   e2e p50 0.3 p99 2 steps",
        "  throughput 1 outputs/step, 2 output tokens/step",
    ]
    units = [unit_of(timed_summary(slo), is_timed=False) for slo in (None, "ttft=1")]
    assert units == ["steps", "seconds"]


FULL = {
    "kv": KvUse(
        block_size=16, total=99, mean_blocks=92.1, max_blocks=99, mean_share=0.9304, max_share=1.0
    ),
    "preemptions": Preemptions(count=12, recomputed_tokens=4096),
    "prefix_cache": PrefixHits(asked=100, found=61, share=0.61, asked_again=0, found_again=0),
    "budget": BudgetUse(max_batch_tokens=2048, mean_share=0.451, full_steps=1234),
    "blocked": {"kv": 30, "tokens": 12, "preemption": 0, "batch": 0},
    "computed": Computed(
        prefill_tokens=100, decode_tokens=9, right_padding=0, left_padding=0, prefill_share=0.0
    ),
}


def test_what_was_limited_has_lines_of_its_own():
    assert summary_lines(timed_summary(None, **FULL))[-4:] == [
        "  kv 93% used, 100% at most   12 preemptions recomputed 4,096 tokens",
        "  prefix hits 61%",
        "  token budget 45% used, full in 1,234 steps   steps blocked: KV 30, budget 12",
        "  computed 12 positions, no padding",
    ]


def test_numbers_have_three_digits_that_count():
    values = [0, 0.000012, 0.0421, 0.4999, 3.1, 9.999, 12.34, 123.4, 1234.5]
    texts = ["0", "0.000012", "0.0421", "0.5", "3.1", "10", "12.3", "123", "1,234"]
    assert [number(value) for value in values] == texts


def test_a_share_is_100_per_cent_only_if_it_is_all():
    assert percent(9999, 10000) == "99.9%"
    assert percent(1, 10**6) == "<0.1%"
    assert percent(0, 0) == "0%"
    assert whole_percent(0.999999) == "99%"
    assert whole_percent(1) == "100%"
    assert whole_percent(0.29) == "29%"
    assert whole_percent(0.001) == "<1%"
