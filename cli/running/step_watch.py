"""A thread that speaks and acts for a run whose main thread is stuck in a model.

Python runs the handler of a signal in the main thread, between two of its instructions, so never
while that is inside a library that does not come back; and what a handler raises in the code of a
model, that may catch.  The thread hears of each signal all the same.
"""

import os
import select
import signal
import time
from collections.abc import Callable
from threading import Thread
from typing import Self

from .signals import STOPPING

PATIENCE = 0.5  # seconds
LOOK_EVERY = 0.25  # seconds


class StepWatch:
    """Looks, while it is entered, whether the step has come to an end by itself.

    From time to time, until a signal has come, and after each one.
    current_step: the number of the step that is being computed, None between two of them.
    still_computing: called from time to time with a step that goes on.
    say_waiting: called after the first signal, if the step goes on; end: after any other one.
    """

    def __init__(
        self,
        current_step: Callable[[], int | None],
        still_computing: Callable[[int], None],
        say_waiting: Callable[[signal.Signals], None],
        end: Callable[[signal.Signals], None],
    ) -> None:
        self._current_step, self._still_computing = current_step, still_computing
        self._say_waiting, self._end = say_waiting, end
        self._writer = self._before = -1

    def __enter__(self) -> Self:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        Thread(target=self._watch, args=(reader,), name="step-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._writer)

    def _watch(self, reader: int) -> None:
        first: signal.Signals | None = None
        while number := self._next_signal(reader, first):
            received = signal.Signals(number[0])
            if received not in STOPPING:
                continue
            step = self._current_step()
            time.sleep(PATIENCE)
            is_stuck = step is not None and self._current_step() == step
            if first is not None and is_stuck:
                self._end(first)
            elif is_stuck:
                self._say_waiting(received)
            first = first or received
        os.close(reader)

    def _next_signal(self, reader: int, first: signal.Signals | None) -> bytes:
        """Return the next signal, b"" at the end; before the first, tell of a step that goes on."""
        poll, before = select.poll(), None
        poll.register(reader, select.POLLIN)
        while first is None and not poll.poll(LOOK_EVERY * 1000):
            step = self._current_step()
            if step is not None and step == before:
                self._still_computing(step)
            before = step
        return os.read(reader, 1)
