"""Workers inside the process of a test, of which any may die whenever the test says so."""

import random
from collections import deque

import pytest

from cli.run.worker import Died, Worker, decode_instruction, decode_report, encode

KILLED = Died("was killed by signal 9", "killed", 9)


class InnerWorkers:
    """A Transport that takes worker after worker a bit further, in an order that a seed decides.

    kill_share: of the turns, in which the worker dies, with a part of what it would have said.
    max_kills: after so many none is killed.  report_seconds: see REPORT_SECONDS.
    poison: a worker dies when it takes such a line.  death: how workers die.
    """

    def __init__(
        self,
        options,
        seed=0,
        kill_share=0.0,
        max_kills=10**9,
        poison=(),
        report_seconds=0,
        death=KILLED,
    ):
        self.options, self.random = options, random.Random(seed)
        self.kill_share, self.max_kills, self.poison = kill_share, max_kills, poison
        self.report_seconds, self.death = report_seconds, death
        self.num_kills, self.num_started = 0, 0
        self.workers, self.instructions, self.restarts = {}, {}, {}
        self.patch = pytest.MonkeyPatch()

    def __enter__(self):
        # By default there are many turns.
        self.patch.setattr("cli.run.worker.REPORT_SECONDS", self.report_seconds)
        return self

    def __exit__(self, *_):
        self.patch.undo()

    def start(self, number, restart=None):
        self.num_started += 1
        self.restarts[number] = restart
        self.workers[number], self.instructions[number] = None, deque()

    def send(self, number, instruction):
        self.instructions[number].append(decode_instruction(encode(instruction)))

    def receive(self):
        while busy := [number for number in sorted(self.workers) if not self.is_idle(number)]:
            number = self.random.choice(busy)
            reports = self.turn(number)
            if reports:
                return [(number, report) for report in reports]
        raise AssertionError("the driver waits for workers that wait for it")

    def is_idle(self, number):
        worker = self.workers[number]
        return worker is not None and worker.is_idle and not self.instructions[number]

    def turn(self, number):
        """Let a worker do something; return what it reports."""
        worker = self.workers[number]
        if worker is None:
            worker = self.workers[number] = Worker(self.options, number, self.restarts[number])
        given = list(self.instructions[number])
        self.instructions[number].clear()
        if any(self.is_deadly(each.decode) for each in given):
            return [self.die(number)]
        report = worker.exchange(given)
        reports = [] if report is None else [decode_report(encode(report))]
        if self.num_kills < self.max_kills and self.random.random() < self.kill_share:
            reports = [*reports[: self.random.randint(0, 1)], self.die(number)]
        return reports

    def is_deadly(self, lines):
        return any(line.text in self.poison and not line.failure for line in lines)

    def die(self, number):
        self.num_kills += 1
        del self.workers[number], self.instructions[number]
        return self.death

    def wake(self):
        raise AssertionError("there is no pipe")
