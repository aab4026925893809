"""Tasks spread over processes: the same answers in the same order for any number of processes.

Rule: processes are spawned, receive the shared value once, and die with their parent.
"""

import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Self, TypeVar, cast

from batcher.errors import BatchdecodeError, InvariantError
from batcher.garbage import look_seldom
from batcher.processes import become_helper, helpers_started

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Answer = TypeVar("Answer")
Found = TypeVar("Found")
Key = TypeVar("Key")

OnPart = Callable[[float], object]  # called with the share of a task that is done
Work = Callable[[Shared, Task, OnPart], Answer]

PART_INTERVAL = 0.5  # seconds between progress reports of a task


class WorkerProcesses(Generic[Shared, Task, Answer]):
    """Computes `work(shared, task, on_part)` for many tasks; a context manager.

    work: a module-level function with picklable values.  num_jobs: 1 is this process, more are
    others.
    """

    def __init__(self, work: Work[Shared, Task, Answer], shared: Shared, num_jobs: int) -> None:
        self._work, self._shared, self._num_jobs = work, shared, num_jobs
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._busy: dict[Connection, Any] = {}  # with the key of the task
        self._num_done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def answers(
        self, tasks: Sequence[Task], on_done: Callable[[float], object] = lambda _: None
    ) -> list[Answer]:
        """Return the answers in the order of the tasks; see `drive`."""

        def chain(task: Task) -> Generator[Task, Answer, Answer]:
            return (yield task)

        return self.drive([chain(task) for task in tasks], on_done)

    def drive(
        self,
        chains: Sequence[Generator[Task, Answer, Found]],
        on_done: Callable[[float], object] = lambda _: None,
    ) -> list[Found]:
        """Return the results of chains, which yield tasks and receive the answers.

        on_done: called with the number of answers so far, including the shares of running tasks.
        """
        found: dict[int, Found] = {}
        ahead: deque[tuple[int, Task]] = deque()
        shares: dict[int, float] = {}

        def resume(place: int, answer: Answer | None) -> None:
            try:
                chain = chains[place]
                ahead.append((place, next(chain) if answer is None else chain.send(answer)))
            except StopIteration as stop:
                found[place] = stop.value

        def note(place: int, share: float) -> None:
            shares[place] = share
            on_done(self._num_done + sum(shares.values()))

        def end(place: int, answer: Answer) -> None:
            self._num_done += 1
            shares.pop(place, None)
            on_done(self._num_done + sum(shares.values()))
            resume(place, answer)

        for place in range(len(chains)):
            resume(place, None)
        self.compute(lambda: ahead.popleft() if ahead else None, end, note, len(ahead))
        return [found[place] for place in range(len(chains))]

    def compute(
        self,
        choose: Callable[[], tuple[Key, Task] | None],
        take: Callable[[Key, Answer], object],
        on_part: Callable[[Key, float], object],
        most: int,
    ) -> None:
        """Compute the tasks that `choose` returns, each with a key; `take` receives each answer.

        choose: called when one of up to `most` processes is idle.  It returns None if there is no
        task at present, and raises StopIteration to stop without waiting for running tasks.
        on_part: called with the share of a task that is done.

        Raises:
            BatchdecodeError: a task raised it, or a process was killed.
            InvariantError: a task raised another exception.
        """
        if self._num_jobs == 1:
            with suppress(StopIteration):
                while (chosen := choose()) is not None:
                    key, task = chosen
                    take(key, self._work(self._shared, task, _seldom(partial(on_part, key))))
            return
        self._start(min(self._num_jobs, most) - len(self._processes))
        busy = self._busy
        while True:
            idle = [connection for connection in self._connections if connection not in busy]
            try:
                while idle and (chosen := choose()) is not None:
                    connection = idle.pop(0)
                    busy[connection], task = chosen
                    _send(connection, task)
            except StopIteration:
                return
            if not busy:
                return
            for connection in cast(list[Connection], wait(list(busy))):
                with _killed():
                    kind, content = connection.recv()
                if kind == "part":
                    on_part(busy[connection], content)
                elif kind == "answer":
                    take(busy.pop(connection), content)
                else:
                    raise (BatchdecodeError if kind == "error" else InvariantError)(content)

    def _start(self, number: int) -> None:
        context = get_context("spawn")
        with helpers_started():
            for _ in range(number):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs, self._work), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        for connection in self._connections[len(self._connections) - max(number, 0) :]:
            _send(connection, self._shared)  # they are starting up meanwhile


def serve(connection: Connection, work: Work[Shared, Task, Answer]) -> None:
    """Receive the shared value, then answer tasks: the loop of a process."""
    become_helper()
    with suppress(EOFError, OSError):
        shared = connection.recv()
        look_seldom()
        while True:
            task = connection.recv()
            on_part = _seldom(lambda share: connection.send(("part", share)))
            try:
                message: tuple[str, Any] = "answer", work(shared, task, on_part)
            except BatchdecodeError as error:
                message = "error", str(error)
            except Exception:  # noqa: BLE001 - raised again in the parent
                message = "bug", traceback.format_exc()
            connection.send(message)


def _seldom(on_part: OnPart) -> OnPart:
    """Return a function that calls `on_part` at most once in PART_INTERVAL, never with less."""
    last, most = time.monotonic(), 0.0

    def call(share: float) -> None:
        nonlocal last, most
        now, most = time.monotonic(), max(most, share)
        if now - last >= PART_INTERVAL:
            last = now
            on_part(most)

    return call


def _send(connection: Connection, what: object) -> None:
    with _killed():
        connection.send(what)


@contextmanager
def _killed() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        message = "a process was killed, perhaps for lack of memory: use fewer --jobs"
        raise BatchdecodeError(message) from None
