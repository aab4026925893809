"""Routers: which replica a request is sent to, by what a real router can know.

Rule: a router knows what it has sent, the ends of the responses that pass through it, and the
reports of replicas, which are as old as the report interval lets them be; never the present state.
"""

import reprlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from difflib import get_close_matches
from functools import partial
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import chain
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.foreign import calling, import_object

if TYPE_CHECKING:
    from batcher.planning.simulated_sequence import SimulatedSequence

DEFAULT_ROUTER = "round-robin"
DEFAULT_REPORT_INTERVAL = 0.1  # seconds, as vLLM has it for data-parallel ranks
SEED = 0
WAITING_WEIGHT = 4  # of one that waits, against one that runs: as vLLM weighs them
PREFIX_BLOCK = 16  # tokens
MAX_PREFIXES = 2**20  # blocks of prompts that are remembered, those seen last
MAX_OUTDATED = 8  # entries of the heap of loads, for each replica
MAX_OVERLOAD = 1.25  # of the mean load, as in consistent hashing with bounded loads


class ReplicaStats(Struct, frozen=True, gc=False):
    """The state of a replica at `time`: how many sequences ran, and how many waited."""

    time: float
    running: int
    waiting: int


class ReplicaView(Struct, eq=False):
    """What a router knows of a replica.

    num_requests, num_tokens: sent and not ended, and their prompt tokens.  report: the last one, or
    None.  num_unreported: requests sent since then.  group: in the fleet's file, or "".
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
    """Chooses the replica for each request.

    hears_ends, hears_reports: it uses the ends of responses, or reports.  replicas: at least one.
    """

    hears_ends = hears_reports = False

    def __init__(self) -> None:
        self.replicas: Sequence[ReplicaView] = ()

    def use(self, replicas: Sequence[ReplicaView]) -> None:
        self.replicas = replicas

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView | None:
        """Return where to send a request; None: refuse it."""
        raise NotImplementedError

    def note(self, replica: ReplicaView) -> None:
        """Note that a request was sent to this replica, or ended there, or that it reported."""


class RoundRobin(Router):
    """To each replica in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._place = -1

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView:  # noqa: ARG002 - that is it
        self._place = (self._place + 1) % len(self.replicas)
        return self.replicas[self._place]


class RandomChoice(Router):
    """To any of them."""

    def __init__(self) -> None:
        super().__init__()
        self._random = Random(SEED).random  # noqa: S311 - chance, not secrets

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView:  # noqa: ARG002 - that is it
        return self.replicas[int(self._random() * len(self.replicas))]


class RandomTwo(RandomChoice):
    """To that of any two which has fewer requests in flight (Mitzenmacher, IEEE TPDS 12, 2001)."""

    hears_ends = True

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView:  # noqa: ARG002 - others need it
        replicas = self.replicas
        first = int(self._random() * len(replicas))
        if len(replicas) == 1:
            return replicas[first]
        second = int(self._random() * (len(replicas) - 1))
        one, other = replicas[first], replicas[second + (second >= first)]
        return other if other.num_requests < one.num_requests else one


class LeastOf(Router):
    """To the replica of the least `load`; of equals to the one that has had it for longest."""

    def __init__(
        self, load: Callable[[ReplicaView], float], *, hears_reports: bool = False
    ) -> None:
        super().__init__()
        self._load, self.hears_reports, self.hears_ends = load, hears_reports, not hears_reports
        self._num_entries = 0
        self._entries: dict[ReplicaView, tuple[float, int, ReplicaView]] = {}
        self._heap: list[tuple[float, int, ReplicaView]] = []  # outdated ones, too

    def use(self, replicas: Sequence[ReplicaView]) -> None:
        super().use(replicas)
        self._entries, self._heap = {replica: (0.0, 0, replica) for replica in replicas}, []
        for replica in replicas:
            self.note(replica)

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView:  # noqa: ARG002 - as above
        heap, entries = self._heap, self._entries
        while entries[heap[0][-1]] is not heap[0]:
            heappop(heap)
        return heap[0][-1]

    def note(self, replica: ReplicaView) -> None:
        """Put a replica behind all of equal load."""
        entries, heap = self._entries, self._heap
        if replica not in entries:  # nothing is sent to it any more
            return
        self._num_entries += 1
        entries[replica] = entry = self._load(replica), self._num_entries, replica
        heappush(heap, entry)
        if len(heap) > MAX_OUTDATED * len(entries):
            self._heap = sorted(entries.values())


num_requests = attrgetter("num_requests")
num_prompt_tokens = attrgetter("num_tokens")


def reported_queue(replica: ReplicaView) -> float:
    """Return the queue that a replica reported, and what was sent there since.

    Like vLLM's balancer, it counts what waits, or was sent, four times.
    """
    report, waiting = replica.report, replica.num_unreported
    if report is None:
        return WAITING_WEIGHT * waiting
    return WAITING_WEIGHT * (waiting + report.waiting) + report.running


class _Prefix(Struct, eq=False):
    """A block of prompts after the same ones, and where the last that has it was sent."""

    number: int
    home: ReplicaView | None = None


class PrefixAffinity(LeastOf):
    """To where most of the prompt was sent last; if that is overloaded, to the least loaded.

    Overloaded: more than MAX_OVERLOAD times the mean number of requests in flight (bounded loads:
    Mirrokni, Thorup and Zadimoghaddam, SODA 2018).
    """

    def __init__(self) -> None:
        from batcher.planning.simulated_sequence import SimulatedContents  # noqa: PLC0415 - it imports numpy

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
            if is_known and path:  # a salt alone is no prefix
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
    """All turns of a session to one replica, by rendezvous hashing; others in turn.

    When a replica comes or goes, only its own sessions move (Thaler and Ravishankar, IEEE/ACM
    Transactions on Networking 6(1), 1998).
    """

    def __init__(self) -> None:
        super().__init__()
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
    """A request as a user's router gets it."""

    id: str
    arrival_time: float
    session: str | None
    prompt_tokens: int
    max_tokens: int
    priority: int


class OwnRouter(Router):
    """To the replica whose place in the list `choose_place` returns; None refuses the request."""

    hears_ends = hears_reports = True

    def __init__(
        self, name: str, choose_place: Callable[[RoutedRequest, Sequence[ReplicaView]], int | None]
    ) -> None:
        super().__init__()
        self._name, self._choose_place = name, choose_place

    def choose(self, request: "SimulatedSequence", now: float) -> ReplicaView | None:
        """Return what the function says, or raise a BatchdecodeError where it fails."""
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
                f"the router {self._name} returned {reprlib.repr(place)}, not the place of one of "
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
    known = ", ".join(ROUTERS)
    if ":" not in name:
        near = get_close_matches(name, ROUTERS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BatchdecodeError(
            f"unknown router {name!r}{hint} (known: {known}, or module:function)"
        )
    found = import_object(name, "router", known)
    if not callable(found):
        raise BatchdecodeError(f"the router {name} is no function, but a {type(found).__name__}")
    return OwnRouter(name, found)
