"""What serving costs, with numbers that can be worked out by hand, and prices that are none."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from served import deployment_of, question_of

from batcher.errors import BatchdecodeError
from batcher.planning.measure import Price, measure, price_of, read_prices
from cli.views.plan_tables import cost_text, sources_text

ROOT = Path(__file__).parents[2]
SECOND_A_STEP = "t0: 1000.0, w: 0, f: 0, g: 0, d: 0, h: 0, e: 0"


def cost_of_run(tmp_path, price, replicas=1, more=""):
    """One request of 10 steps at 0 s and one at 90 s: 100 s, of which 20 are busy; 20 tokens."""
    profile = tmp_path / "p.yaml"
    profile.write_text(f"it: {{{SECOND_A_STEP}, hardware: ours{more}}}")
    question = replace(question_of((0, 1, 10), (90, 1, 10)), prices={"ours": price})
    deployment = replace(deployment_of(1, str(profile)), replicas=replicas)
    return measure(question, deployment).cost


@pytest.mark.parametrize(
    ("price", "replicas", "parallel", "joules"),
    [
        ({"busy_watts": 360, "idle_watts": 36}, 1, 1, 20 * 360 + 80 * 36),
        ({"busy_watts": 360, "idle_watts": 36}, 2, 4, 4 * (20 * 360 + 180 * 36)),
        ({"busy_watts": 360}, 1, 1, 100 * 360),
        ({}, 1, 1, None),
    ],
)
def test_all_gpus_are_paid_all_the_time_and_draw_by_what_they_do(
    tmp_path, price, replicas, parallel, joules
):
    price = Price(dollars_per_hour=3.6, **price)
    cost = cost_of_run(tmp_path, price, replicas, f", tensor_parallel: {parallel}")
    gpus = replicas * parallel
    assert (cost.gpus, cost.dollars_per_hour) == (gpus, pytest.approx(3.6 * gpus))
    assert cost.dollars_per_million_tokens == pytest.approx(gpus * 0.1 / 20 * 1e6)
    expected = None if joules is None else pytest.approx(joules / 3.6e6 / 20 * 1e6, abs=1e-6)
    assert cost.kwh_per_million_tokens == expected


def test_a_cost_says_where_its_prices_are_from(tmp_path):
    cost = cost_of_run(tmp_path, Price(dollars_per_hour=1, source="a bill of May"))
    assert cost.price_sources == ["a bill of May"]
    assert cost_of_run(tmp_path, Price(dollars_per_hour=1)).price_sources == ["not stated"]
    text = "source of the prices: a bill of May, not stated"
    assert sources_text([cost, cost_of_run(tmp_path, Price(dollars_per_hour=1))]) == text
    assert cost_text(cost)[-1] == "source of the prices: a bill of May"


def test_a_roofline_names_its_gpus_and_a_data_sheet_is_called_as_its_file():
    price = Price(dollars_per_hour=1)
    hardware, _ = price_of("roofline:llama-3.1-8b:h100-sxm:2x2", {"h100-sxm": price})
    assert hardware.num_gpus == 4
    sheet = f"roofline:llama-3.1-8b:{ROOT}/samples/timing/our-gpu.yaml"
    assert price_of(sheet, {"our-gpu": price})[1] is price


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {busy_watts: 3}", "a: dollars_per_hour missing"),
        ("a: {dollars_per_hour: -1}", "expected a number from 0 to 1e9"),
        ("a: {dollars_per_hour: 1, idle_watts: 3}", "idle_watts: expected at most busy_watts"),
        ("a: {dollars_per_hour: 1, watts: 3}", "unknown field watts"),
    ],
)
def test_prices_that_are_none(tmp_path, text, message):
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(BatchdecodeError, match=message):
        read_prices(str(tmp_path / "prices.yaml"))
