"""A transformer whose columns are split among processes, the ranks, which compute every step.

A column, an output feature, is a whole sum: outputs are gathered, never added, and equal those of
one process (Shoeybi et al., "Megatron-LM"). This process computes nothing. Requests go to all ranks
in the same order, and the first rank returns the result. Ranks ignore signals, and end with this
process or with any other rank.
"""

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any, NoReturn, cast
from weakref import finalize

import numpy as np

from batcher.errors import BatchdecodeError, InvariantError, LostModelError, describe
from batcher.processes import become_helper, helpers_started, threads_shared
from batcher.transformer.config import TransformerConfig
from batcher.transformer.layers import FloatArray
from batcher.transformer.step import KVStore, Span, cache_groups, cache_size
from batcher.transformer.transformer import Transformer
from batcher.transformer.weights import Watch

# Processes that each compute a part and exchange the parts.
#
# Parts go through shared memory; a byte through a socket signals that a part is there. Nothing
# polls, and the sockets of an ended process are closed, so that nothing waits for it.

CAPACITY = 2**20  # numbers exchanged at once
_HALVES = 2

Boundaries = Sequence[int]
"""Where the part of each rank begins, and where the last one ends: [world_size + 1]."""


class PeerGoneError(Exception):
    """Another process of the group has ended."""


class RankGroup:
    """A member of a group of processes; it can be sent to a process that starts.

    The memory has two halves, used in turn: the data in one may be read until all are done with the
    next.

    rank: its number among `world_size`. memory: shared by all. peers: a socket to each other.
    """

    def __init__(self, rank: int, world_size: int, memory: Any, peers: list[Connection]) -> None:
        self.rank, self.world_size, self.peers, self._memory = rank, world_size, peers, memory
        self._halves = np.frombuffer(memory, np.float32).reshape(_HALVES, -1)
        self._turn = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return RankGroup, (self.rank, self.world_size, self._memory, self.peers)

    def boundaries(self, num_items: int, grid: int = 1) -> Boundaries:
        """Return the boundaries of about even parts, at multiples of `grid`."""
        size, shares = self.world_size, -(-num_items // grid)
        starts = [grid * -(-shares * rank // size) for rank in range(size)]
        return [*(min(start, num_items) for start in starts), num_items]

    def own_part(self, boundaries: Boundaries) -> slice:
        return slice(boundaries[self.rank], boundaries[self.rank + 1])

    def all_gather(self, part: FloatArray, boundaries: Boundaries) -> FloatArray:
        """Return the rows [rows, width] of all ranks, concatenated.

        part: [own rows, width].

        Raises:
            PeerGoneError: another rank has ended.
        """
        whole, given = np.empty((boundaries[-1], part.shape[1]), np.float32), part.reshape(-1)
        own, last = (boundaries[rank] * part.shape[1] for rank in (self.rank, self.rank + 1))
        capacity = self._halves.shape[1]
        for start in range(0, whole.size, capacity):
            piece = whole.reshape(-1)[start : start + capacity]
            shared = self._halves[self._turn][: piece.size]
            self._turn = 1 - self._turn
            first, end = max(own, start), min(last, start + piece.size)
            if first < end:
                shared[first - start : end - start] = given[first - own : end - own]
            try:  # continue when all others are here
                for peer in self.peers:
                    os.write(peer.fileno(), b"\0")
                for peer in self.peers:
                    if not os.read(peer.fileno(), 1):
                        raise PeerGoneError
            except OSError:
                raise PeerGoneError from None
            piece[...] = shared
        return whole

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def rank_groups(
    context: SpawnContext, world_size: int, capacity: int = CAPACITY
) -> list[RankGroup]:
    """Return the members of a new group; `capacity`: numbers exchanged at once."""
    memory = context.RawArray("f", _HALVES * capacity)
    peers: list[list[Connection]] = [[] for _ in range(world_size)]
    for one, other in combinations(range(world_size), 2):
        for rank, end in zip((one, other), context.Pipe(), strict=True):
            peers[rank].append(end)
    return [RankGroup(rank, world_size, memory, peers[rank]) for rank in range(world_size)]


# A rank: it executes requests in order, and ends with the process that sends them.

MakeRank = Callable[[RankGroup, Watch], Transformer]
"""Return the transformer of a rank; a function of a module that can be pickled."""


def serve(connection: Connection, group: RankGroup, make: MakeRank) -> None:
    """Make the transformer of a rank and execute requests; the first rank returns results."""
    become_helper()
    last_words: tuple[str, ...] = ()
    try:
        transformer = make(group, lambda number, total: connection.send(("read", number, total)))
        connection.send("made")
        kept: dict[int | None, Any] = {None: None}  # stores and states
        makers = {"store": transformer.new_store, "states": transformer.new_states}
        while True:
            match connection.recv():
                case "new", kind, number:
                    kept[number] = makers[kind]()
                    continue
                case "drop", number:
                    del kept[number]
                    continue
                case "call", number, method, *arguments:
                    getattr(kept[number], method)(*arguments)
                    continue
                case "forward", spans, store, states:
                    rows = transformer.forward(spans, kept[store], kept[states])
                case "logits", hidden:
                    rows = transformer.logits(hidden)
                case message:
                    raise InvariantError(f"a rank is asked {message}")  # noqa: TRY301 - as others are
            if group.rank == 0:
                connection.send(rows)
    except (EOFError, ConnectionError, PeerGoneError):
        return
    except BatchdecodeError as error:
        last_words = "error", str(error)
    except Exception as error:  # noqa: BLE001 - it is raised again where the calls come from
        last_words = "raised", describe(error), traceback.format_exc()
    with suppress(OSError):
        connection.send(last_words)


_GRACE = 5.0  # seconds to wait for the end of a process


class RankProcesses(Transformer):
    """A Transformer that other processes compute, each a part of every product.

    make: called in each of `world_size` processes. watch: called with the number of tensors that
    the first has read.

    Raises:
        BatchdecodeError: raised by a rank while it loads.
        LostModelError: a rank has ended.
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
        self._dropped: list[int] = []  # unreferenced stores
        context = get_context("spawn")
        self._end = Finalize(self, _end, (self._processes, self._connections), exitpriority=10)
        with self._unless_lost():
            with helpers_started(), threads_shared(world_size):
                for group in rank_groups(context, world_size):
                    ours, theirs = context.Pipe()
                    process = context.Process(target=serve, args=(theirs, group, make))
                    process.start()
                    self._processes.append(process)
                    self._connections.append(ours)
                    for end in (theirs, *group.peers):
                        end.close()
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
        return self._new("store")

    def new_states(self) -> Any:
        return None if self.config.delta_net is None else self._new("states")

    def _new(self, kind: str) -> "RemoteStore":
        self._num_kept += 1
        self._tell("new", kind, self._num_kept)
        kept = RemoteStore(self._tell, self._num_kept)
        finalize(kept, self._dropped.append, self._num_kept)
        return kept

    def forward(self, spans: Sequence[Span], store: Any, states: Any = None) -> FloatArray:
        while self._dropped:
            self._tell("drop", self._dropped.pop())
        return self._ask("forward", spans, store.number, None if states is None else states.number)

    def logits(self, hidden: FloatArray) -> FloatArray:
        return self._ask("logits", hidden)

    def _tell(self, *message: Any) -> None:
        with self._unless_lost():
            pickled = ForkingPickler.dumps(message)
            for connection in self._connections:
                connection.send_bytes(pickled)

    def _ask(self, *message: Any) -> FloatArray:
        self._tell(*message)
        with self._unless_lost():
            rows = self._connections[0].recv()
            if not isinstance(rows, np.ndarray):
                self._raise(rows)
            return rows

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Talk to ranks inside; an exception ends them, as their state is unknown."""
        if self._lost is not None:
            raise LostModelError(self._lost)
        try:
            yield
        except (EOFError, OSError):
            self._lost = "one of the ranks has ended"
            try:
                self._find_out()
            except LostModelError as error:
                self._lost = str(error)
                raise
            finally:
                self._end()
        except BaseException:
            self._lost = "its ranks were stopped"
            self._end()
            raise

    def _find_out(self) -> NoReturn:
        """Raise the error of a rank, or report which one has ended, and how."""
        for connection in self._connections:
            with suppress(EOFError, OSError):
                while connection.poll():
                    self._raise(connection.recv())
        ended = wait([process.sentinel for process in self._processes], _GRACE)
        for rank, process in enumerate(self._processes):
            if process.sentinel in ended:  # its files are closed, and it ends a moment later
                process.join(_GRACE)
            if process.exitcode is not None and process.exitcode < 0:
                raise LostModelError(
                    f"rank {rank} of {len(self._processes)} was killed by signal "
                    f"{-process.exitcode}, perhaps out of memory"
                )
        raise LostModelError("a rank has ended")

    def _raise(self, message: Any) -> NoReturn:
        match message:
            case "error", text:
                raise BatchdecodeError(text)
            case "raised", text, trace:
                raise LostModelError(f"a rank raised {text}") from InvariantError(trace)
            case _:
                raise InvariantError(f"a rank said {message}")


class RemoteStore(KVStore):
    """A KVStore, or RecurrentStates, in each rank, under a `number`."""

    def __init__(self, tell: Callable[..., None], number: int) -> None:
        self.number, self._tell = number, tell
        self._num_cells = 0

    def make_room(self, num_cells: int) -> None:
        if num_cells > self._num_cells:
            self._num_cells = num_cells
            self._tell("call", self.number, "make_room", num_cells)

    def copy(self, *which: int) -> None:
        self._tell("call", self.number, "copy", *which)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        self._tell("call", self.number, "move", moves)


def _end(processes: list[SpawnProcess], connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
