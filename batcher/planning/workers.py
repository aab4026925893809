"""Work spread over processes: the same answers in the same order, however many there are.

Rule: processes are spawned, hold what all tasks share once, and die with the one that started them.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
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

OnPart = Callable[[float], object]
"""Called with how much of a task is done, a share of 1."""

Work = Callable[[Shared, Task, OnPart], Answer]

PART_INTERVAL = 0.5  # seconds between what a task tells of itself

_Message = tuple[str, Any]  # "answer", "part", or "error" or "bug" with a text


class WorkerProcesses(Generic[Shared, Task, Answer]):
    """Computes `work(shared, task, on_part)` for many tasks; a context manager.

    work: a function of a module; all its values can be pickled.  num_jobs: 1 is this process, more
    are others.
    """

    def __init__(self, work: Work[Shared, Task, Answer], shared: Shared, num_jobs: int) -> None:
        self._work, self._shared, self._num_jobs = work, shared, num_jobs
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

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
        self, tasks: Sequence[Task], on_part: Callable[[int, float], object] = lambda _, __: None
    ) -> Iterator[tuple[int, Answer]]:
        """Yield the place of each task with its answer, as they are done.

        on_part: called now and then with the place of a task and its share that is done.

        Raises:
            BatchdecodeError: a task has raised it, or a process was killed.
            InvariantError: a task has raised something else.
        """
        if self._num_jobs == 1:
            for place, task in enumerate(tasks):
                yield place, self._work(self._shared, task, _seldom(partial(on_part, place)))
            return
        places = iter(range(len(tasks)))
        context = get_context("spawn")
        num_before = len(self._connections)
        with helpers_started():
            for _ in range(min(self._num_jobs, len(tasks)) - len(self._processes)):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs, self._work), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        for connection in self._connections[num_before:]:  # they are starting up meanwhile
            _send(connection, self._shared)
        busy: dict[Connection, int] = {}
        for connection, place in zip(self._connections, places, strict=False):
            _send(connection, tasks[place])
            busy[connection] = place
        while busy:
            for connection in cast(list[Connection], wait(list(busy))):
                with _killed():
                    told, content = connection.recv()
                if told == "error":
                    raise BatchdecodeError(content)
                if told == "bug":
                    raise InvariantError(content)
                if told == "part":
                    on_part(busy[connection], content)
                    continue
                done = busy.pop(connection)
                place = next(places, -1)
                if place >= 0:
                    _send(connection, tasks[place])
                    busy[connection] = place
                yield done, content

    def all_answers(
        self, tasks: Sequence[Task], on_done: Callable[[float], object] = lambda _: None
    ) -> list[Answer]:
        """Return the answers in the order of the tasks; on_done: called with how many are done."""
        found: dict[int, Answer] = {}
        done: dict[int, float] = {}

        def note_part(place: int, share: float) -> None:
            done[place] = share
            on_done(sum(done.values()))

        for place, answer in self.answers(tasks, note_part):
            found[place] = answer
            note_part(place, 1.0)
        return [found[place] for place in range(len(tasks))]


def serve(connection: Connection, work: Work[Shared, Task, Answer]) -> None:
    """Take what is shared, and answer the tasks that come: the loop of a process."""
    become_helper()
    with suppress(EOFError, OSError):
        shared = connection.recv()
        look_seldom()
        while True:
            task = connection.recv()
            on_part = _seldom(lambda share: connection.send(("part", share)))
            message: _Message
            try:
                message = "answer", work(shared, task, on_part)
            except BatchdecodeError as error:
                message = "error", str(error)
            except Exception:  # noqa: BLE001 - it is raised again where the others are
                message = "bug", traceback.format_exc()
            connection.send(message)


def _seldom(on_part: OnPart) -> OnPart:
    """Return what calls `on_part` at most once in PART_INTERVAL; the share never falls."""
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
        message = "a process was killed, perhaps for want of memory: give fewer --jobs"
        raise BatchdecodeError(message) from None
