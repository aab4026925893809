"""`compare --plot` and `plan --plot`: what is plotted, and where it goes."""

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process import batchdecode, lines_of

from batcher import Request
from batcher.metrics.slo import parse_slo
from batcher.models.simulated import SimulatedModel
from batcher.planning.compare import compare
from batcher.planning.deployments import Deployment, grid_of
from batcher.planning.measure import Question
from batcher.planning.plan import find_plan
from batcher.planning.workload import workload_of
from batcher.scheduling.queue import POLICIES
from cli.run.files import OutputError
from cli.views.plots import (
    Chart,
    Point,
    charts_of_cells,
    charts_of_plan,
    check_plot,
    encode_picture,
)

REQUESTS = [Request(prompt=[1, 2, 3], max_tokens=10, ignore_eos=True)] * 8


def question_of(slo=None):
    workload = workload_of(REQUESTS, SimulatedModel())
    return Question(workload, None if slo is None else parse_slo(slo))


def charts_of(values, slo=None):
    question = question_of(slo)
    cells = compare(question, grid_of(values, Deployment()), growth=0.1)
    return charts_of_cells(question, cells)


def chart_of(*places, limit=None):
    points = [
        Point(latency, speed, f"p{n}", is_good=True) for n, (latency, speed) in enumerate(places)
    ]
    return Chart("points: batch", "TTFT p99 (s)", {"": points}, limit)


def test_charts_have_a_point_for_each_cell_and_a_line_for_each_setting():
    ttft, e2e = charts_of({"batch": [1, 2, 4]}, "ttft=30,e2e=15")
    assert ttft.latency_title == "TTFT p99 (s)"
    assert ttft.title == "points: batch"
    assert (ttft.limit, e2e.limit) == (30, 15)
    # 8 requests of 10 tokens at 0, a second a step, in 8, 4 and 2 rounds
    assert [(p.latency, p.tokens_per_s, p.label) for p in ttft.lines[""]] == [
        (71, 1, "1"),
        (31, 2, "2"),
        (11, 4, "4"),
    ]
    assert [(p.latency, p.is_good) for p in e2e.lines[""]] == [
        (80, False),
        (40, False),
        (20, False),
    ]
    ttft, tpot = charts_of({"batch": [1, 2], "policy": [*POLICIES][:2], "kv_blocks": [8, 16]})
    assert (ttft.latency_title, tpot.latency_title) == ("TTFT p99 (s)", "TPOT p99 (s)")
    assert ttft.title == "points: batch; lines: policy, blocks"
    assert len(ttft.lines) == 4
    assert all(len(points) == 2 for points in ttft.lines.values())


def test_a_plan_plots_what_it_tried_and_marks_what_it_found():
    question = Question(question_of().workload, parse_slo("e2e=20"), 0.9)
    plan = find_plan(question, Deployment(), "batch")
    (chart,) = charts_of_plan(plan)
    assert chart.latency_title == "E2E p90 (s)"
    assert chart.limit == 20
    labels = {point.label: point.is_good for point in chart.points}
    assert labels == {"1": False, "2": False, "3": False, "4 plan, 5, 6": True, "8": True}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_the_frontier_is_what_nothing_beats(places):
    chart = chart_of(*places)
    best = {
        (latency, speed)
        for latency, speed in places
        if not any(
            other != (latency, speed) and other[0] <= latency and other[1] >= speed
            for other in places
        )
    }
    frontier = [(point.latency, point.tokens_per_s) for point in chart.frontier]
    assert frontier == sorted(best)


@pytest.mark.heavy
def test_a_comparison_has_the_same_picture_each_time_which_replaces_its_like_alone(tmp_path):
    path = tmp_path / "p.svg"
    requests = lines_of(*[{"prompt": [1, 2, 3], "max_tokens": 10, "ignore_eos": True}] * 8)
    (tmp_path / "in").write_bytes(requests)
    command = ["compare", "in", "--batch", "1,2,4", "--slo", "ttft=30", "-q"]
    path.write_text("old")
    done = batchdecode(*command, "--plot", "p.svg", "--force", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == batchdecode(*command, cwd=tmp_path).stdout
    picture = path.read_bytes()
    assert picture == encode_picture(charts_of({"batch": [1, 2, 4]}, "ttft=30"), "svg")
    root = ET.fromstring(picture)  # noqa: S314 - it is ours
    texts = [
        "".join(text.itertext()).strip() for text in root.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"1", "2", "TTFT p99 (s)", "output tokens/s", "SLO 30 s", "Pareto frontier"} <= {*texts}
    assert b"sans-serif" in picture
    assert b"dc:date" not in picture
    check_plot(str(path), force=False)
    path.write_text("<svg>mine</svg>")
    with pytest.raises(OutputError, match="the file has content of another kind: use --force"):
        check_plot(str(path), force=False)
    check_plot(str(path), force=True)
