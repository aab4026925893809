"""The replicas that a router chooses from: those that it takes for serving, and have room.

Rule: a replica has room while fewer requests were sent to it than it may have in flight.
"""

from collections.abc import Sequence

from batcher.planning.routers import ReplicaView, Router


class Pool:
    """What a router may send to.

    known: those that it takes for serving.  open: of these, those that have room.
    """

    def __init__(
        self, router: Router, replicas: Sequence[ReplicaView], max_in_flight: float
    ) -> None:
        self.known, self.open = list(replicas), list(replicas)
        self._router, self._max_in_flight = router, max_in_flight
        router.use(self.open)

    def add(self, view: ReplicaView) -> None:
        """Let a replica be sent to from now on."""
        self.known.append(view)
        self._offer()

    def withdraw(self, view: ReplicaView) -> bool:
        """Let nothing be sent to a replica from now on; return whether something was by now."""
        if view not in self.known:
            return False
        self.known.remove(view)
        self._offer()
        return True

    def note_sent(self, view: ReplicaView) -> None:
        """Take note that one more request is in flight to a replica."""
        if view.num_requests == self._max_in_flight:
            self._offer()

    def note_end(self, view: ReplicaView) -> None:
        """Take note that one request less is in flight to a replica."""
        if view.num_requests == self._max_in_flight - 1:
            self._offer()

    def _offer(self) -> None:
        self.open = [view for view in self.known if view.num_requests < self._max_in_flight]
        if self.open:
            self._router.use(self.open)
