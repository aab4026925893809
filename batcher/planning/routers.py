"""Routers choose the replica for each request by what a real router can know.

Rule: a router knows the requests it sent, the ends of responses, and the reports of replicas, which
are as old as the report interval; never the present state.
"""

import reprlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import chain
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.foreign import calling, import_function

if TYPE_CHECKING:
    from batcher.planning.simulated_sequence import SimulatedSequence

DEFAULT_ROUTER = "round-robin"
DEFAULT_REPORT_INTERVAL = 0.1  # seconds, as vLLM has it for data-parallel ranks
SEED = 0
WAITING_WEIGHT = 4  # of a waiting request relative to a running one, as in vLLM
PREFIX_BLOCK = 16  # tokens
MAX_PREFIXES = 2**20  # remembered blocks of prompts, least recently used first out
MAX_OUTDATED = 8  # entries of the heap of loads per replica
MAX_OVERLOAD = 1.25  # of the mean load, as in consistent hashing with bounded loads


class ReplicaStats(Struct, frozen=True, gc=False):
    """The numbers of running and waiting sequences of a replica at `time`."""

    time: float
    running: int
    waiting: int


class ReplicaView(Struct, eq=False):
    """The knowledge of a router about a replica.

    num_requests, num_tokens: in flight, and their prompt tokens.  num_unreported: requests sent
    since the last `report`.  group: in the fleet file, or "".
    """

    index: int
    group: str = ""
    batch: int = 1
    kv_blocks: int | None = None
    num_requests: int = 0
    num_tokens: int = 0
    num_unreported: int = 0
    report: ReplicaStats | None = None


class Router:
    """Chooses one of at least one `replicas`; hears_ends, hears_reports: it uses these."""

    hears_ends = hears_reports = False
    replicas: Sequence[ReplicaView] = ()

    def use(self, replicas: Sequence[ReplicaView]) -> None:
        self.replicas = replicas

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView | None:
        """Return the replica for a request, or None to refuse it."""
        raise NotImplementedError

    def note(self, replica: ReplicaView) -> None:
        """Update the load of a replica after a request was sent, an end, or a report."""


class RoundRobin(Router):
    """Each replica in turn."""

    _place = -1

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView:  # noqa: ARG002
        self._place = (self._place + 1) % len(self.replicas)
        return self.replicas[self._place]


class RandomChoice(Router):
    """A random replica."""

    def __init__(self) -> None:
        self._random = Random(SEED).random  # noqa: S311 - chance, not secrets

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView:  # noqa: ARG002
        return self.replicas[int(self._random() * len(self.replicas))]


class RandomTwo(RandomChoice):
    """The less loaded of two random replicas (Mitzenmacher, IEEE TPDS 12, 2001)."""

    hears_ends = True

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView:  # noqa: ARG002
        replicas = self.replicas
        first = int(self._random() * len(replicas))
        if len(replicas) == 1:
            return replicas[first]
        second = int(self._random() * (len(replicas) - 1))
        one, other = replicas[first], replicas[second + (second >= first)]
        return other if other.num_requests < one.num_requests else one


class LeastOf(Router):
    """The replica with the least `load`; of equal ones the one that has had it longest."""

    def __init__(
        self, load: Callable[[ReplicaView], float], *, hears_reports: bool = False
    ) -> None:
        self._load, self.hears_reports, self.hears_ends = load, hears_reports, not hears_reports
        self._num_entries = 0
        self._entries: dict[ReplicaView, tuple[float, int, ReplicaView]] = {}
        self._heap: list[tuple[float, int, ReplicaView]] = []  # outdated ones, too

    def use(self, replicas: Sequence[ReplicaView]) -> None:
        super().use(replicas)
        self._entries, self._heap = {replica: (0.0, 0, replica) for replica in replicas}, []
        for replica in replicas:
            self.note(replica)

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView:  # noqa: ARG002
        heap, entries = self._heap, self._entries
        while entries[heap[0][-1]] is not heap[0]:
            heappop(heap)
        return heap[0][-1]

    def note(self, replica: ReplicaView) -> None:
        entries, heap = self._entries, self._heap
        if replica not in entries:  # it receives no more requests
            return
        self._num_entries += 1
        entries[replica] = entry = self._load(replica), self._num_entries, replica
        heappush(heap, entry)
        if len(heap) > MAX_OUTDATED * len(entries):
            self._heap = sorted(entries.values())


num_requests = attrgetter("num_requests")
num_prompt_tokens = attrgetter("num_tokens")


def reported_queue(replica: ReplicaView) -> float:
    """Return the reported queue and requests sent since; waiting counts 4 times, as in vLLM."""
    report, waiting = replica.report, replica.num_unreported
    if report is None:
        return WAITING_WEIGHT * waiting
    return WAITING_WEIGHT * (waiting + report.waiting) + report.running


class _Prefix(Struct, eq=False):
    """A block of prompts behind the same blocks, and the replica it was last sent to."""

    number: int
    home: ReplicaView | None = None


class PrefixAffinity(LeastOf):
    """The replica that last had the longest prefix of the prompt, or the least loaded one.

    The latter if it has more than MAX_OVERLOAD times the mean number of requests in flight (bounded
    loads: Mirrokni, Thorup and Zadimoghaddam, SODA 2018).
    """

    def __init__(self) -> None:
        from batcher.planning.simulated_sequence import SimulatedContents  # noqa: PLC0415 - imports numpy

        super().__init__(num_requests)
        self._prefixes: OrderedDict[tuple[int, Hashable], _Prefix] = OrderedDict()
        self._contents = SimulatedContents()
        self._num_prefixes = 0

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView:
        prefixes, path, home = self._prefixes, list[_Prefix](), None
        num_tokens = request.num_prompt_tokens // PREFIX_BLOCK * PREFIX_BLOCK
        blocks = self._contents.blocks(request, 0, num_tokens, PREFIX_BLOCK)
        parent, is_known = 0, True
        for key in chain([request.cache_salt], blocks):
            prefix = prefixes.get((parent, key))
            if prefix is None:
                is_known = False
                self._num_prefixes += 1
                prefix = prefixes[parent, key] = _Prefix(self._num_prefixes)
            else:
                prefixes.move_to_end((parent, key))
            if is_known and path:  # a salt alone is not a prefix
                home = prefix.home
            path.append(prefix)
            parent = prefix.number
        while len(prefixes) > MAX_PREFIXES:
            prefixes.popitem(last=False)
        mean = (sum(each.num_requests for each in self.replicas) + 1) / len(self.replicas)
        if home not in self._entries or home.num_requests + 1 > max(1, MAX_OVERLOAD * mean):
            home = super().choose(request, now)
        for prefix in path:
            prefix.home = home
        return home


class BySession(Router):
    """One replica for all turns of a session, by rendezvous hashing; round-robin for others.

    When a replica is added or removed, only its own sessions move (Thaler and Ravishankar, IEEE/ACM
    Transactions on Networking 6(1), 1998).
    """

    def __init__(self) -> None:
        self._others = RoundRobin()

    def use(self, replicas: Sequence[ReplicaView]) -> None:
        super().use(replicas)
        self._others.use(replicas)

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView:
        session = request.session
        if session is None:
            return self._others.choose(request, now)
        return max(
            self.replicas,
            key=lambda each: blake2b(f"{each.index}:{session}".encode(), digest_size=8).digest(),
        )


class RoutedRequest(Struct, frozen=True, gc=False):
    """A request as a custom router sees it."""

    id: str
    arrival_time: float
    session: str | None
    prompt_tokens: int
    max_tokens: int
    priority: int


class OwnRouter(Router):
    """The replica whose index `choose_place` returns; None refuses the request."""

    hears_ends = hears_reports = True

    def __init__(
        self, name: str, choose_place: Callable[[RoutedRequest, Sequence[ReplicaView]], int | None]
    ) -> None:
        self._name, self._choose_place = name, choose_place

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView | None:
        routed = RoutedRequest(
            request.id,
            now,
            request.session,
            request.num_prompt_tokens,
            request.max_tokens,
            request.priority,
        )
        with calling(f"the router {self._name} raised"):
            place = self._choose_place(routed, self.replicas)
        if place is None:
            return None
        if not isinstance(place, int) or not 0 <= place < len(self.replicas):
            raise BatchdecodeError(
                f"the router {self._name} returned {reprlib.repr(place)}, not the index of one of "
                f"{len(self.replicas)} replicas, or None"
            )
        return self.replicas[place]


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "random": RandomChoice,
    "random-two": RandomTwo,
    "least-loaded": partial(LeastOf, num_requests),
    "least-tokens": partial(LeastOf, num_prompt_tokens),
    "shortest-queue": partial(LeastOf, reported_queue, hears_reports=True),
    "prefix-affinity": PrefixAffinity,
    "session": BySession,
}


def router_of(name: str) -> Router:
    """Return a new router of that name, or one that calls `module:function`."""
    if name in ROUTERS:
        return ROUTERS[name]()
    return OwnRouter(name, import_function(name, "router", ", ".join(ROUTERS)))
