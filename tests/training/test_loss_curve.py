"""The losses of a run as SVG."""

from xml.etree import ElementTree as ET

import pytest

from batcher.training.data import Evaluation, Losses, loss_curve

SVG = "{http://www.w3.org/2000/svg}"


def parsed(picture):
    return ET.fromstring(picture)  # noqa: S314 - it is our own


def lines_of(picture):
    """The points of each line of a picture."""
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in parsed(picture).iter(f"{SVG}polyline")
    ]


def test_a_falling_loss_is_a_line_that_goes_down():
    losses = Losses([4.0, 3.0, 2.0], {3: Evaluation(2.5)})
    training, held_out = lines_of(loss_curve(losses))
    assert [x for x, _ in training] == pytest.approx([256, 464, 672])
    assert [y for _, y in training] == pytest.approx([48, 180, 312])  # down, as y grows
    assert held_out == [(672, 246)]


def test_what_is_held_out_from_a_draft_is_judged_as_it_is_trained():
    losses = Losses([4.0, 2.0], {2: Evaluation(9.0, 3.0, 0.5, 0.5)})
    assert lines_of(loss_curve(losses))[1] == [(672, 180)]


def test_a_long_run_has_means_of_several_steps():
    losses = Losses([1.0, 3.0] * 600, {})
    training, held_out = lines_of(loss_curve(losses))
    assert len(training) == 600
    assert {y for _, y in training} == {48}
    assert held_out == []
