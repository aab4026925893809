"""Signals as a wish that the run sees after the step, and how a closed pipe ends it.

The first Ctrl-C, SIGTERM or SIGHUP lets the run finish its step and put all in order; a second one
ends it at once.  Calls of an LLM are a wait, which the first one breaks off.  Output that blocks,
such as a pipe whose reader stalls, gets FLUSH_SECONDS more.

Python runs the handler of a signal in the main thread, between two of its instructions, so never
while that is inside a library that does not come back; and what a handler raises in the code of a
model, that may catch.  A thread hears of each signal all the same: see StepWatch.
"""

import ctypes
import errno
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from threading import Thread, Timer, main_thread
from types import FrameType
from typing import NoReturn, Self

# Where stdout is: descriptor 1, but while user code runs that is stderr, and stdout is kept.
#
# So nothing comes between the results, by whatever way it is written: `print`, `os.write`, a
# library in C, a child process.

_descriptors = [1]  # the last one is stdout


def stdout_descriptor() -> int:
    return _descriptors[-1]


@contextmanager
def user_code_prints_to_stderr() -> Iterator[None]:
    """Make 1 what stderr is; child processes do not get the descriptor that is stdout meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    _descriptors.append(kept)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed and still hold
        _descriptors.pop()
        os.dup2(kept, 1)
        os.close(kept)


def end_stdout() -> None:
    """Let what is printed while the process ends go to stderr: all that was to be written is."""
    with suppress(OSError, ValueError):  # Python says so when it ends
        sys.stdout.flush()
        os.dup2(2, 1)


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEPPING_ASIDE = (signal.SIGTSTP, signal.SIGQUIT)
"""What these do is left to the system: Ctrl-Z stops the process, Ctrl-\\ ends it at once."""
GRACE = 1.0  # seconds
PATIENCE = 0.5  # seconds
LOOK_EVERY = 0.25  # seconds
FLUSH_SECONDS = 0.4
BLOCKED_SECONDS = 0.05  # after which blocked output looks for a signal


class Interrupted(KeyboardInterrupt):
    """A signal came while the run was waiting for something; others' code lets it pass as such."""


def stopping_signals() -> list[signal.Signals]:
    """Return those of STOPPING that are to be heard: under nohup SIGHUP is not."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOPPING if not (is_nohup and number is signal.SIGHUP)]


def step_aside_first(step_aside: Callable[[], object]) -> dict[signal.Signals, signal.Handlers]:
    """Have `step_aside` called before STEPPING_ASIDE do what they do; return what handled them."""

    def handle(number: int, _frame: FrameType | None) -> None:
        step_aside()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # this returns when the process goes on
        signal.signal(number, handle)

    before: dict[signal.Signals, signal.Handlers] = {}
    for number in STEPPING_ASIDE:
        if signal.getsignal(number) is signal.SIG_DFL:  # ignored where nobody could go on
            before[number] = signal.signal(number, handle)  # type: ignore[assignment]  # never a C handler
    return before


_entered: "StopSignals | None" = None


def stop_by_key() -> None:
    """Stop the command as Ctrl-C does, for a person who pressed a key."""
    if _entered is not None:
        _entered.is_by_key = True
    signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)


def write_some(descriptor: int, data: bytes, start: int) -> int:
    """Write some of `data[start:]` to a pipe or a terminal, best whole lines; return how much.

    Raises:
        Interrupted: it has taken nothing since a signal came.
        OSError: it takes no more.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    is_late = _entered is not None and _entered.is_flushed
    while not poll.poll(0 if is_late else 1000 * BLOCKED_SECONDS):
        if is_late:
            raise Interrupted
        is_late = _entered is not None and _entered.is_flushed
    # A pipe that can be written to has room for so much: the write does not block.
    end = data.rfind(b"\n", start, start + select.PIPE_BUF) + 1 or start + select.PIPE_BUF
    try:
        return os.write(descriptor, memoryview(data)[start:end])
    except BlockingIOError:  # another program has made it non-blocking, and filled it
        return 0


def open_to_write(path: str, flags: int) -> int:
    """Return a descriptor of `path`, opened for writing; a FIFO needs a reader, and is waited for.

    Raises:
        Interrupted: a signal came while there was none.
        OSError: it cannot be opened.
    """
    while Path(path).is_fifo():
        try:
            descriptor = os.open(path, flags | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
        else:
            os.set_blocking(descriptor, True)
            return descriptor
        time.sleep(BLOCKED_SECONDS)
        if _entered is not None and _entered.received is not None:
            raise Interrupted
    return os.open(path, flags, 0o666)


class StopSignals:
    """Takes SIGINT, SIGTERM and SIGHUP while it is entered; `received` is the first that came.

    has_broken_off: whether that came while the run waited for something.
    is_by_key: whether it stands for a key; see stop_by_key.

    before_wait: called before the run waits for something, and again, while it waits, after the
    seconds that it returned; 0 for never.
    before_pause: called before SIGTSTP stops the process, or SIGQUIT ends it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self.has_broken_off = self.is_by_key = False
        self.before_wait: Callable[[], float] | None = None
        self.before_pause: Callable[[], None] | None = None
        self._is_waiting = False
        self._before: dict[signal.Signals, signal.Handlers] = {}

    def __enter__(self) -> Self:
        global _entered  # noqa: PLW0603 - as signal handlers, of the process
        _entered = self
        for number in stopping_signals():
            self._before[number] = signal.signal(number, self._take)  # type: ignore[assignment]  # never a C handler
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._show_again)  # type: ignore[assignment]  # as above
        self._before |= step_aside_first(lambda: self.before_pause and self.before_pause())
        # A write into a closed pipe must come back as an error here: there is a trace to close.
        self._before[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # type: ignore[assignment]  # as above
        return self

    def __exit__(self, *_: object) -> None:
        global _entered  # noqa: PLW0603 - as above
        _entered = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def note(self, number: signal.Signals) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()

    @property
    def is_flushed(self) -> bool:
        """Whether a signal came, and output that blocks has been waited for since."""
        waited = time.monotonic() - self._received_at
        return self.received is not None and waited > FLUSH_SECONDS

    @property
    def name(self) -> str:
        if self.is_by_key:
            return "you"
        return self.received.name if self.received else "a KeyboardInterrupt that the model raised"

    @property
    def exit_status(self) -> int:
        return 128 + (self.received or signal.SIGINT)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let a signal break off what is done inside, by an Interrupted: that may take for ever."""
        delay = 0.0 if self.before_wait is None else self.before_wait()
        self._is_waiting = True
        try:
            if self.received is not None:
                raise Interrupted
            if delay:
                signal.setitimer(signal.ITIMER_REAL, delay)
            yield
        finally:
            if delay:
                signal.setitimer(signal.ITIMER_REAL, 0)
            self._is_waiting = False

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.note(signal.Signals(number))
        if self._is_waiting:
            self.has_broken_off = True
            raise Interrupted

    def _show_again(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_waiting and self.before_wait is not None:
            signal.setitimer(signal.ITIMER_REAL, self.before_wait())


class StepWatch:
    """A thread that looks, while this is entered, whether the step has come to an end by itself.

    From time to time, until a signal has come, and after each one; it speaks and acts for a run
    whose main thread is stuck in a model.
    current_step: the number of the step that is being computed, None between two of them.
    still_computing: called from time to time with a step that goes on.
    say_waiting: called after the first signal, if the step goes on; end: after any other one, and
    after SIGQUIT.
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
            if received not in (*STOPPING, signal.SIGQUIT):
                continue
            step = self._current_step()
            time.sleep(PATIENCE)
            is_stuck = step is not None and self._current_step() == step
            if is_stuck and (first is not None or received is signal.SIGQUIT):
                self._end(first or received)
            elif is_stuck:
                self._say_waiting(received)
            first = first or received
        os.close(reader)

    def _next_signal(self, reader: int, first: signal.Signals | None) -> bytes:
        poll, before = select.poll(), None
        poll.register(reader, select.POLLIN)
        while first is None and not poll.poll(LOOK_EVERY * 1000):
            step = self._current_step()
            if step is not None and step == before:
                self._still_computing(step)
            before = step
        return os.read(reader, 1)


def exit_soon(status: int) -> None:
    leave = Timer(GRACE, os._exit, (status,))
    leave.daemon = True
    leave.start()


def die_of_closed_pipe() -> NoReturn:
    """End this process as `head` ends the others: by SIGPIPE, status 141, without a word."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)  # what is still buffered for stdout goes nowhere
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(128 + signal.SIGPIPE)  # whoever started us has blocked the signal
