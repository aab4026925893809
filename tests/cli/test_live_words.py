"""What the words of the live view say of one, and what its characters say without Unicode."""

import re

import pytest
from emulated_run import Run, Screen, long_requests

from batcher.scheduling.blocks import BlockUse
from cli.screen.live_state import clock


def test_one_of_a_thing_is_told_as_one():
    run = Run(long_requests(9), batch_size=1)
    run.gauges.next_up, run.gauges.block_use = "req-1", BlockUse(1, 0, 0)
    text = run.steps(1).screen.text()
    assert "next req-1: the slot is taken" in text
    assert "  1 token\n" in text
    assert "of 1 block" in text
    assert "last 1 step " in text
    assert not re.search(r"\b1 (steps|slots|tokens|blocks)\b", text)


def test_a_gantt_of_hardly_more_steps_than_cells_has_a_step_a_cell():
    run = Run([("a", 499, 500)], batch_size=1, screen=Screen(240, 24))
    run.seconds_per_step = 0.01  # few pictures
    run.steps(226)
    run.seconds_per_step = 1.0
    run.steps(2)
    assert "1 step a cell" in run.screen.text()


def test_without_unicode_full_is_a_hash_and_any_other_character_a_question_mark():
    requests = [("👩‍👩‍👧", 99, 99), ("日本-17", 99, 99)]
    run = Run(requests, batch_size=2, screen=Screen(encoding="ascii")).steps(3)
    text = run.screen.text()
    assert "busy ### 100%" in text
    assert "??-17 " in text
    assert re.search(r"^0[ >]\?[?\\]*", text, re.MULTILINE)


def test_without_unicode_the_picture_is_ascii():
    requests = [("é", 2, 4), ("b", 9, 9)]
    run = Run(requests, batch_size=1, screen=Screen(encoding="latin-1"), every_step=True).steps(4)
    assert b"".join(run.screen.written).isascii()
    assert re.search(r"0[> ]b +#=\.+ +2/9  decode   \|=\|-", run.screen.text())
    run.view.close()
    assert b"".join(run.screen.written).isascii()


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.9, "0:03"), (754, "12:34"), (3723, "1:02:03"), (0, "0:00")]
)
def test_time_reads_as_on_a_clock(seconds, text):
    assert clock(seconds) == text
