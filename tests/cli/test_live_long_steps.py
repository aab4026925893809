"""What a person sees while a step takes long, above all in the first one."""

import subprocess
import time
from threading import Thread

import pytest
from command_terminal import CommandTerminal
from emulated_run import Clock, Gauges, Run, Screen, inline, long_requests
from process import lines_of, workload

from cli.screen.live_state import ProgressLines
from cli.screen.view import RunPlan


def compute(run, step):
    run.gauges.current_step = step
    run.view.still_computing(step)
    run.gauges.current_step = None


def test_before_the_first_step_there_is_a_picture_of_empty_slots():
    run = Run(long_requests(9), batch_size=2, queued=9)
    compute(run, 0)
    run.clock.now += 34
    compute(run, 0)
    counts, *_, first, second = run.screen.text().splitlines()
    told = ["requests.jsonl", "step 0 has taken 0:34", "0/9 done", "0 running", "9 queued", "0:35"]
    assert [part.strip() for part in counts.split("  ") if part.strip()] == told
    assert first.split()[:2] == ["0", "-"]
    assert second.split()[:2] == ["1", "-"]
    assert "%" not in run.screen.text()
    run.clock.now += 1
    assert "step 0  0/9 done  2 running" in run.steps(1).screen.text()


@pytest.mark.parametrize("begin", [Run, inline])
def test_a_later_step_that_takes_long_says_so_and_for_how_long(begin):
    run = begin(long_requests(9)).steps(12)
    for _ in range(3):
        compute(run, 12)
        run.clock.now += 1
    compute(run, 12)
    assert "step 12 has taken 0:03" in run.screen.text()
    run.view.still_computing(11)
    run.clock.now += 1
    run.steps(1)
    assert "step 12  0/9 done" in run.screen.text()
    assert "has taken" not in run.screen.text()


def test_a_long_step_is_a_plain_line_every_five_seconds():
    clock, screen = Clock(), Screen()
    plan = RunPlan("requests.jsonl", "fcfs", 2, 9, is_timed=False)
    view = ProgressLines(plan, Gauges(), screen, clock)
    for _ in range(48):
        view.still_computing(7)
        clock.now += 0.25
    assert screen.text().splitlines() == [
        "requests.jsonl, step 7 has taken 0:05, 0 of 9 done",
        "requests.jsonl, step 7 has taken 0:10, 0 of 9 done",
    ]


@pytest.mark.parametrize("num_requests", [20, pytest.param(600, marks=pytest.mark.heavy)])
def test_the_view_may_be_drawn_by_another_thread_while_steps_are_made(num_requests):
    run = Run([(str(n), 3, 3) for n in range(num_requests)], batch_size=4, every_step=True)
    run.seconds_per_step, errors = 1.1, []

    def draw():
        while not run.is_over:
            try:
                run.view.still_computing(run.step_index)
            except Exception as error:  # noqa: BLE001 - whatever it is
                errors.append(error)

    thread = Thread(target=draw)
    thread.start()
    while not run.is_over:
        run.gauges.current_step = run.step_index
        time.sleep(0)
        run.gauges.current_step = None
        run.step()
    thread.join()
    run.view._look(run.clock.now)
    assert not errors
    assert run.view._run.num_done == num_requests


def test_a_model_that_loads_in_its_first_call_leaves_no_empty_terminal_and_may_print(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "in").write_bytes(lines_of(*workload(4, max_tokens=9)))
    command = ["run", "in", "-o", "out", "-b", "2", "--live", "always"]
    command += ["--model", "slow:next_tokens"]
    with CommandTerminal(*command, folder=tmp_path, stdin=subprocess.DEVNULL) as terminal:
        terminal.see("step 0 has taken")
        (tmp_path / "loaded").touch()
        assert terminal.ended() == 0
        text = "\n".join(terminal.screen.all_lines())
    assert text.count("warming up") == 1
    assert "by a library" in text
    assert "4 ok" in text


SLOW = """
import os, pathlib, time

print("warming up")
os.write(1, b"by a library\\n")


def next_tokens(rows):
    end = time.monotonic() + 20
    while not pathlib.Path("loaded").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return [5] * len(rows)
"""
