"""What the words of the live view say of one, and what its characters say without Unicode."""

import re

from emulated_run import Run, Screen, long_requests

from batcher.scheduling.blocks import BlockUse


def test_one_of_a_thing_is_told_as_one():
    run = Run(long_requests(9), batch_size=1)
    run.gauges.next_up, run.gauges.block_use = "req-1", BlockUse(1, 0, 0)
    text = run.steps(1).screen.text()
    assert "next req-1: the slot is taken" in text
    assert "  1 token\n" in text
    assert "of 1 block" in text
    assert "last 1 step " in text
    assert not re.search(r"\b1 (steps|slots|tokens|blocks)\b", text)


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
