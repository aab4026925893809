"""A transformer whose columns are held by several processes, the ranks: all compute every step.

Rule: this process computes nothing.  What it is asked goes to all ranks in the same order; what
comes of it, the first of them hands over.  Ranks take no notice of signals: they end with this
process, however it ends, and all of them if one does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any, NoReturn, cast
from weakref import finalize

import numpy as np

from batcher.errors import BatchdecodeError, InvariantError, LostModelError
from batcher.processes import helpers_started, threads_shared
from batcher.transformer.cache_groups import cache_groups
from batcher.transformer.cache_size import cache_size
from batcher.transformer.config import TransformerConfig
from batcher.transformer.kv_store import KVStore
from batcher.transformer.layers import FloatArray
from batcher.transformer.rank import MakeRank, serve
from batcher.transformer.rank_group import GroupPart, PeerGoneError, RankGroup, group_parts
from batcher.transformer.recurrent_states import RecurrentStates
from batcher.transformer.span import Span
from batcher.transformer.transformer import Watch

_GRACE = 5.0  # seconds, in which the end of a process is known


class RankProcesses:
    """A Decoder that other processes compute, each a part of every product.

    config: its sizes.  make: called in each of `world_size` processes.  watch: called with how many
    tensors the first of them has read.

    Raises:
        BatchdecodeError: a rank has raised it while it was made.
        LostModelError: one has ended, then or later.
    """

    def __init__(
        self, config: TransformerConfig, make: MakeRank, world_size: int, watch: Watch
    ) -> None:
        self.config = config
        self.cache_groups, self.cache_size = cache_groups(config), cache_size(config)
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        self._lost: str | None = None
        self._num_kept = 0
        self._dropped: list[int] = []  # what nobody has any more
        first, own = group_parts(get_context("spawn"), 2)
        self._group = RankGroup(own)
        ending = (self._processes, self._connections, self._group)
        self._end = Finalize(self, _end, ending, exitpriority=10)
        with self._unless_lost():
            self._start(make, world_size, first)
            self._await_ranks(watch)

    def _start(self, make: MakeRank, world_size: int, first: GroupPart) -> None:
        context = get_context("spawn")
        with helpers_started(), threads_shared(world_size):
            for part in group_parts(context, world_size):
                ours, theirs = context.Pipe()
                outer = first if part.rank == 0 else None
                process = context.Process(target=serve, args=(theirs, part, outer, make))
                process.start()
                self._processes.append(process)
                self._connections.append(ours)
                for end in (theirs, *part.peers, *(outer.peers if outer else ())):
                    end.close()

    def _await_ranks(self, watch: Watch) -> None:
        """Wait until all ranks are made."""
        loading = list(self._connections)
        while loading:
            for connection in cast(list[Connection], wait(loading)):
                match connection.recv():
                    case "read", number, total:
                        if connection is self._connections[0]:
                            watch(number, total)
                    case "made":
                        loading.remove(connection)
                    case message:
                        self._raise(message)

    def new_store(self) -> KVStore:
        """Return room for the keys and values of tokens, which is in the ranks."""
        store = RemoteStore(self._tell, self._numbered("store"))
        finalize(store, self._dropped.append, store.number)
        return store

    def new_states(self) -> RecurrentStates | None:
        """Return room for the states of recurrent layers, which is in the ranks."""
        if self.config.delta_net is None:
            return None
        states = RemoteStates(self._tell, self._numbered("states"))
        finalize(states, self._dropped.append, states.number)
        return states

    def _numbered(self, kind: str) -> int:
        self._num_kept += 1
        self._tell("new", kind, self._num_kept)
        return self._num_kept

    def forward(
        self,
        spans: Sequence[Span],
        store: KVStore,
        states: RecurrentStates | None = None,
    ) -> FloatArray:
        """Return the hidden states [tokens, hidden_size] of all tokens of `spans`, in order.

        Their keys and values are written into their cells, and states into those of snapshots.
        """
        while self._dropped:
            self._tell("drop", self._dropped.pop())
        both: tuple[Any, Any] = (store, states)
        numbers = [None if kept is None else kept.number for kept in both]
        with self._unless_lost():
            self._send(("forward", spans, *numbers))
            return self._taken(sum(len(span.token_ids) for span in spans), self.config.hidden_size)

    def logits(self, hidden: FloatArray) -> FloatArray:
        """Return the logits [rows, vocab_size] after tokens with these hidden states."""
        with self._unless_lost():
            self._send(("logits", hidden))
            return self._taken(len(hidden), self.config.vocab_size)

    def _tell(self, *message: Any) -> None:
        with self._unless_lost():
            self._send(message)

    def _send(self, message: Any) -> None:
        """Send the same to all ranks."""
        pickled = ForkingPickler.dumps(message)
        for connection in self._connections:
            connection.send_bytes(pickled)

    def _taken(self, num_rows: int, num_columns: int) -> FloatArray:
        """Return what the first rank hands over."""
        nothing = np.empty((0, num_columns), np.float32)
        return self._group.all_gather(nothing, (0, num_rows, num_rows))

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Talk to ranks inside; what breaks that off ends them: nobody knows what they did."""
        if self._lost is not None:
            raise LostModelError(self._lost)
        try:
            yield
        except (EOFError, OSError, PeerGoneError):
            self._lost = "one of the ranks has ended"
            try:
                self._find_out()
            except LostModelError as error:
                self._lost = str(error)
                raise
            finally:
                self._end()
        except BaseException:
            self._lost = "its ranks were broken off"
            self._end()
            raise

    def _find_out(self) -> NoReturn:
        """Raise what a rank has raised; or else say which has ended, and how."""
        for connection in self._connections:
            with suppress(EOFError, OSError):
                while connection.poll():
                    self._raise(connection.recv())
        ended = wait([process.sentinel for process in self._processes], _GRACE)
        for rank, process in enumerate(self._processes):
            if process.sentinel in ended:  # its files are closed, and a moment later it is over
                process.join(_GRACE)
            if process.exitcode is not None and process.exitcode < 0:
                raise LostModelError(
                    f"rank {rank} of {len(self._processes)} was killed by signal "
                    f"{-process.exitcode}, perhaps for want of memory"
                )
        raise LostModelError("a rank has ended")

    def _raise(self, message: tuple[str, str, str]) -> NoReturn:
        match message:
            case "error", text:
                raise BatchdecodeError(text)
            case "raised", text, trace:
                raise LostModelError(f"a rank raised {text}") from InvariantError(trace)
            case _:
                raise InvariantError(f"a rank said {message}")


class RemoteKept:
    """What is kept in each rank: what is done to it is done there.

    number: what it is called there.
    """

    def __init__(self, tell: Callable[..., None], number: int) -> None:
        self.number, self._tell = number, tell
        self._num_cells = 0

    def make_room(self, num_cells: int) -> None:
        """Have at least so many cells."""
        if num_cells > self._num_cells:
            self._num_cells = num_cells
            self._tell("call", self.number, "make_room", num_cells)

    def copy(self, *which: int) -> None:
        """Let one part hold what another does."""
        self._tell("call", self.number, "copy", *which)


class RemoteStore(RemoteKept, KVStore):
    """A KVStore in each rank."""

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Let cells hold what others do."""
        self._tell("call", self.number, "move", moves)


class RemoteStates(RemoteKept, RecurrentStates):
    """RecurrentStates in each rank."""


def _end(processes: list[SpawnProcess], connections: list[Connection], group: RankGroup) -> None:
    """End all ranks."""
    group.close()
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
