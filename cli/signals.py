"""Signals: a run stops after its step, and a closed pipe ends it quietly.

The first Ctrl-C, SIGTERM or SIGHUP lets the run finish its step and close its files; a second one
ends it at once.  The first one interrupts waits, such as calls of an LLM.  Blocked output, such as
a pipe that nothing reads, gets FLUSH_SECONDS more.

Python runs signal handlers in the main thread between two of its instructions, so never inside a
library call that does not return.  A model may also catch what a handler raises.  A thread
therefore receives every signal as well: see StepWatch.
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

from .errors import WriteError

# While user code runs, descriptor 1 is stderr, and stdout is another descriptor: so `print`,
# `os.write`, C libraries and child processes cannot write between the results.

_descriptors = [1]  # the last one is stdout


def stdout_descriptor() -> int:
    return _descriptors[-1]


@contextmanager
def user_code_prints_to_stderr() -> Iterator[None]:
    """Make descriptor 1 stderr; child processes do not inherit the descriptor of stdout."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    _descriptors.append(kept)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # the buffers of C libraries
        _descriptors.pop()
        os.dup2(kept, 1)
        os.close(kept)


def end_stdout() -> None:
    """Flush stdout, and send what is printed while the process ends to stderr."""
    try:
        sys.stdout.flush()
    except (OSError, WriteError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # drop its buffer
    except ValueError:  # it is closed
        return
    with suppress(OSError):
        sys.stdout.flush()
        os.dup2(2, 1)


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEPPING_ASIDE = (signal.SIGTSTP, signal.SIGQUIT)
"""Ctrl-Z stops the process, Ctrl-\\ ends it at once, as the system defines."""
GRACE = 1.0  # seconds
PATIENCE = 0.5  # seconds
LOOK_EVERY = 0.25  # seconds
FLUSH_SECONDS = 0.4
BLOCKED_SECONDS = 0.05  # between looks for a signal while output is blocked


class Interrupted(KeyboardInterrupt):
    """A signal came while the run waited; not an Exception, so that libraries let it pass."""


def stopping_signals() -> list[signal.Signals]:
    """Return STOPPING, without SIGHUP under nohup."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOPPING if not (is_nohup and number is signal.SIGHUP)]


def step_aside_first(step_aside: Callable[[], object]) -> dict[signal.Signals, signal.Handlers]:
    """Call `step_aside` before the signals in STEPPING_ASIDE; return the previous handlers."""

    def handle(number: int, _frame: FrameType | None) -> None:
        step_aside()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # returns when the process continues
        signal.signal(number, handle)

    before: dict[signal.Signals, signal.Handlers] = {}
    for number in STEPPING_ASIDE:
        if signal.getsignal(number) is signal.SIG_DFL:  # else ignored: no shell could continue it
            before[number] = signal.signal(number, handle)  # type: ignore[assignment]  # never a C handler
    return before


_entered: "StopSignals | None" = None


def stop_by_key() -> None:
    """Stop the command like Ctrl-C, for the key `q`."""
    if _entered is not None:
        _entered.is_by_key = True
    signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)


def write_some(descriptor: int, data: bytes, start: int) -> int:
    """Write some of `data[start:]` to a pipe or terminal, whole lines if possible; return how much.

    Raises:
        Interrupted: a signal came, and the descriptor has stayed blocked since.
        OSError: it is closed.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    is_late = _entered is not None and _entered.is_flushed
    while not poll.poll(0 if is_late else 1000 * BLOCKED_SECONDS):
        if is_late:
            raise Interrupted
        is_late = _entered is not None and _entered.is_flushed
    # A writable pipe takes PIPE_BUF bytes without blocking.
    end = data.rfind(b"\n", start, start + select.PIPE_BUF) + 1 or start + select.PIPE_BUF
    try:
        return os.write(descriptor, memoryview(data)[start:end])
    except BlockingIOError:  # another program has made it non-blocking
        return 0


def open_to_write(path: str, flags: int) -> int:
    """Open `path` for writing and return its descriptor; wait for the reader of a FIFO.

    Raises:
        Interrupted: a signal came during the wait.
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
    """A context that handles SIGINT, SIGTERM and SIGHUP.

    received: the first one.  has_broken_off: it interrupted a wait.  is_by_key: it came from a key.
    before_wait: called before a wait, and again during the wait after the seconds that it returned,
    0 for never.  before_pause: called before SIGTSTP or SIGQUIT.
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
        # A write into a closed pipe has to raise an error here: there is a trace to close.
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
        """Whether a signal came, and blocked output has had its time since."""
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
        """Let a signal interrupt the block by an Interrupted: it may take forever."""
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
    """A context with a thread that watches the steps of a run, which may be stuck in a model.

    current_step: the step that is being computed, None between steps.  still_computing: called from
    time to time with a long step, until a signal comes.  say_waiting: called after the first signal
    if the step continues.  end: the same for further signals, and for SIGQUIT.
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
    """End this process quietly by SIGPIPE, status 141, as `| head` ends others."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)  # drop what is buffered for stdout
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(128 + signal.SIGPIPE)  # the parent has blocked the signal
