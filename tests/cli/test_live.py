"""When and how the live view is drawn, seen on the screen of a terminal emulator."""

import re
import subprocess
import time
from threading import Thread

import pytest
from command_terminal import CommandTerminal
from emulated_run import Clock, Gauges, Run, Screen, inline, long_requests
from process import lines_of, workload

from cli.screen.live_state import ProgressLines
from cli.screen.view import RunPlan, View


def test_results_stand_above_the_picture_and_wait_for_the_next_frame(monkeypatch):
    run = inline(long_requests(8), screen=Screen(40, 20))
    expected = []
    for n in range(30):
        expected.append(f'{{"id":"{n}","text":"' + "word " * (n % 11) + '"}')
        run.step(expected[-1].encode() + b"\n")
    everything = run.screen.all_lines()
    start = next(n for n, line in enumerate(everything) if "done" in line)
    folded = [line[i : i + 40].rstrip() for line in expected for i in range(0, len(line), 40)]
    assert [line for line in everything[:start] if line] == folded
    assert sum("done" in line for line in everything) == 1
    run.view.close()
    everything = run.screen.all_lines()
    assert [line for line in everything if line][: len(folded)] == folded
    assert not any("done" in line for line in everything)
    monkeypatch.setattr("cli.screen.live.MAX_PENDING_BYTES", 1000)
    run = inline(long_requests(8))
    run.step()
    frames = len(run.screen.written)
    run.clock.now = 1.01
    run.view.write_results(b"one\n")
    run.view.after_step(1)
    assert len(run.screen.written) == frames
    run.view.refresh()
    assert "one" in run.screen.lines()
    run.view.write_results(b"two\n")
    run.view.refresh()
    assert "two" in run.screen.lines()
    run.view.write_results(b"x" * 1000 + b"\n")
    assert "x" * 80 in run.screen.all_lines()


def test_a_run_that_waits_for_requests_shows_no_slot_that_nobody_holds():
    run = Run([("short", 3, 3), ("long", 9, 9)], batch_size=2).steps(3)
    counts, slot = shown(run)
    assert "step 2  1/2 done  1 running" in counts
    assert {"short", "3/3", "length"} < set(slot)
    run.clock.now += 1
    run.view.refresh()
    counts, slot = shown(run)
    assert "step 2  1/2 done  1 running" in counts
    assert slot[:3] == ["0", "-", "idle"]
    run.clock.now += 1
    counts, slot = shown(run.steps(1))
    assert "step 3  1/2 done  1 running" in counts
    assert slot[:3] == ["0", "-", "idle"]


def shown(run):
    lines = run.screen.text().splitlines()
    return lines[0], next(line.split() for line in lines if line.startswith("0 "))


def test_a_run_that_is_over_at_once_shows_its_end_alone():
    run = Run([("a", 3, 3), ("b", 1, 4)], batch_size=2)
    run.clock.now = run.seconds_per_step = 0.01
    while not run.is_over:
        run.step()
    assert not run.screen.written
    run.view.close()
    assert [line.strip() for line in run.screen.lines()[:8]] == [
        "3 steps · 2 slots · 67% busy · 2 requests",
        "┃ admitted",
        "step 0               2",
        "┬───────────────┬───────  busy",
        "slot 0 ┃a━━━━━━━━━━━━━━━━━━━━━━  100%",
        "slot 1 ┃b━━━━━━                   33%",
        "queue                           max 0",
        "",
    ]


def test_a_run_of_more_sequences_than_are_kept_shows_all_in_little_and_its_last_steps(monkeypatch):
    monkeypatch.setattr("cli.screen.live_state.MAX_ENDS", 10)
    requests = [(f"r{n}", 3 + n % 2, 9) for n in range(36)]
    run = Run(requests, batch_size=4, screen=Screen(100, 40))
    while not run.is_over:
        run.step()
    run.view.close()
    lines = [line.strip() for line in run.screen.lines()]
    assert lines[0].startswith("requests.jsonl  steps 0-")
    assert sum(line.startswith("slot ") for line in lines) == 2 * 4
    caption = next(n for n, line in enumerate(lines) if "the last" in line)
    assert re.match(rf"steps \d+:{run.step_index}, the last", lines[caption])
    close_up = "".join(lines[caption:])
    assert all(f"r{n}" in close_up for n in range(29, 36))


def test_a_frame_is_one_write_and_a_slow_terminal_gets_little_of_the_time():
    class SlowScreen(Screen):
        def write_bytes(self, data):
            super().write_bytes(data)
            self.clock.now += 0.05

    screen = SlowScreen()
    run = Run(long_requests(1), screen=screen)
    vars(screen)["clock"] = run.clock
    for step in range(20_000):
        run.view.after_step(step)
        run.clock.now += 0.001
    assert 0.02 < len(screen.written) * 0.05 / run.clock.now < 0.04
    run = Run(long_requests(8)).steps(3)
    assert len(run.screen.written) == 3
    for frame in run.screen.written:
        assert frame.startswith(b"\x1b[?2026h")
        assert frame.endswith(b"\x1b[?2026l")


@pytest.mark.parametrize("start", [Run, inline])
def test_the_cursor_is_visible_after_every_write_and_below_the_gantt_at_the_end(start):
    run = start([("a", 3, 3)], batch_size=2)
    while not run.is_over:
        run.step()
        assert not run.screen.emulator.cursor.hidden
        assert (run.screen.emulator.cursor.x, run.screen.emulator.cursor.y) == (0, 0)
        assert "/1 done" in run.screen.lines()[1]
    run.view.close()
    run.screen.write("summary")
    assert not run.screen.emulator.cursor.hidden
    assert run.screen.lines()[6:9] == [" queue                           max 0", "", "summary"]


def test_aside_or_in_the_background_nothing_is_drawn():
    run = Run(long_requests(2), batch_size=2).steps(1)
    run.view.step_aside()
    run.view.step_aside()
    assert not run.screen.is_alternate
    run.screen.write("[1]+ Stopped\n")
    run.steps(1)
    assert run.screen.is_alternate
    assert "step 1" in run.screen.lines()[1]
    run.view.close()
    assert run.screen.lines()[0] == "[1]+ Stopped"
    run = Run(long_requests(8))
    vars(run.screen)["is_foreground"] = False
    run.steps(3)
    assert not run.screen.written
    vars(run.screen)["is_foreground"] = True
    assert "step 3" in run.steps(1).screen.text()


class GoneScreen(Screen):
    def write_bytes(self, data):
        raise OSError("the terminal is gone")


def test_a_terminal_that_is_gone_ends_no_run_but_results_for_it_are_an_error():
    run = Run(long_requests(8), screen=GoneScreen())
    run.view.write_message("warning\n")
    run.steps(3).view.close()
    assert run.view._next_frame == float("inf")
    View(GoneScreen()).write_message("warning\n")
    run = inline(long_requests(8), screen=GoneScreen())
    run.view.write_results(b"result\n")
    with pytest.raises(OSError, match="is gone"):
        run.view.close()


def compute(run, step):
    run.gauges.current_step = step
    run.view.still_computing(step)
    run.gauges.current_step = None


def test_before_the_first_step_there_is_a_picture_of_empty_slots():
    run = Run(long_requests(9), batch_size=2, queued=9)
    compute(run, 0)
    run.clock.now += 34
    compute(run, 0)
    counts, *_, first, second, _, queue, _ = run.screen.text().splitlines()
    told = ["requests.jsonl", "step 0 has taken 0:34", "0/9 done", "0 running", "9 queued", "0:35"]
    assert [part.strip() for part in counts.split("  ") if part.strip()] == told
    assert first.split()[:2] == ["0", "-"]
    assert second.split()[:2] == ["1", "-"]
    assert queue.split() == ["queue", "9", "results"]
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
