import pytest
from made_events import RUN, admit, arrive
from msgspec.structs import replace

from batcher.events import AdmitEvent, EndEvent, FinishEvent, StepsEvent
from batcher.metrics.counts import BlockedSteps, BudgetUse, Computed, KvUse, Preemptions, PrefixHits
from batcher.metrics.slo import parse_slo
from batcher.metrics.summary import RunMetrics, unit_of
from cli.screen.summary import RunFiles, render_summary, timed_lines
from cli.screen.terminal import number, percent, whole_percent


def summary_of(slo="ttft=0.5,tpot=50ms", **changes):
    """The numbers of two requests: three tokens in 0.3 s, and one in 2 s."""
    events = [
        *(replace(RUN, step_time={"name": "test"}), arrive("a"), arrive("b"), admit("a", 0)),
        FinishEvent(2, 0.25, "a", 0, 0, "length", None, 3),
        AdmitEvent(3, 0.3, "b", 0, 0, "refill"),
        FinishEvent(3, 0.3, "b", 0, 0, "length", None, 1),
        StepsEvent(0, [0.2, 0.25, 0.3, 2.0], [0, 1, 1, 0], [5, 0, 0, 5], *[[1, 1, 1, 1]] * 4),
        EndEvent(4, 2.0, 4, 2),
    ]
    metrics = RunMetrics(None if slo is None else parse_slo(slo))
    metrics.observe(events)
    return replace(metrics.summary(), **changes)


def test_seconds_take_the_place_of_steps_where_steps_are_not_alike():
    text = render_summary(
        summary_of(), RunFiles(), is_complete=True, elapsed=1.0, encoding="utf-8", has_color=False
    )
    assert text.splitlines() == [
        "✓ 2 ok   4 steps · 2 slots · 50% busy · 1.0 s",
        "  idle: 50.0% = 12.5% tail drain, 37.5% too few free",
        "  queue p50 0 p99 300 ms   ttft p50 0.2 p99 2 s   tpot 50 ms",
        "  itl p50 50 p99 50 ms   e2e p50 0.3 p99 2 s",
        "  throughput 1 outputs/s, 2 output tokens/s",
        "  goodput 50.0% of outputs (0.5/s) within ttft 0.5 s, tpot 50 ms",
        "  missed: 1 ttft",
        "  computed 12 positions, no padding   right padding would add 40.0% to prefills",
    ]


def test_where_each_step_takes_a_second_and_nobody_gave_a_time_steps_are_told():
    text = render_summary(
        summary_of(None),
        RunFiles(),
        is_complete=True,
        elapsed=1.0,
        encoding="utf-8",
        has_color=False,
        is_timed=False,
    )
    assert text.splitlines()[2:5] == [
        "  queue p50 0 p99 0.3 steps   ttft p50 0.2 p99 2 steps   tpot 0.05 steps",
        "  itl p50 0.05 p99 0.05 steps   e2e p50 0.3 p99 2 steps",
        "  throughput 1 outputs/step, 2 output tokens/step",
    ]
    assert [unit_of(summary_of(slo), is_timed=False) for slo in (None, "ttft=1")] == [
        "steps",
        "seconds",
    ]


FULL = {
    "kv": KvUse(
        block_size=16, total=99, mean_blocks=92.1, max_blocks=99, mean_share=0.9304, max_share=1.0
    ),
    "preemptions": Preemptions(count=12, recomputed_tokens=4096),
    "prefix_cache": PrefixHits(asked=100, found=61, share=0.61, asked_again=0, found_again=0),
    "budget": BudgetUse(max_batch_tokens=2048, mean_share=0.451, full_steps=1234),
    "blocked": BlockedSteps(kv=30, tokens=12, preemption=0, batch=0),
    "computed": Computed(
        prefill_tokens=100, decode_tokens=9, right_padding=0, left_padding=0, prefill_share=0.0
    ),
}


def test_what_was_limited_has_lines_of_its_own():
    assert timed_lines(summary_of(None, **FULL))[-4:] == [
        "  kv 93% used, 100% at most   12 preemptions recomputed 4,096 tokens",
        "  prefix hits 61%",
        "  token budget 45% used, full in 1,234 steps   steps blocked: KV 30, budget 12",
        "  computed 12 positions, no padding",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.000012, "0.000012"),
        (0.0421, "0.0421"),
        (0.4999, "0.5"),
        (3.1, "3.1"),
        (9.999, "10"),
        (12.34, "12.3"),
        (123.4, "123"),
        (1234.5, "1,234"),
    ],
)
def test_numbers_have_three_digits_that_count(value, text):
    assert number(value) == text


def test_a_share_is_100_per_cent_only_if_it_is_all():
    assert percent(9999, 10000) == "99.9%"
    assert percent(1, 10**6) == "<0.1%"
    assert percent(0, 0) == "0%"
    assert whole_percent(0.999999) == "99%"
    assert whole_percent(1) == "100%"
    assert whole_percent(0.29) == "29%"
    assert whole_percent(0.001) == "<1%"
