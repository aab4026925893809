"""The folds of the workers of a run, as one that takes in the events of its trace.

Rule: each worker has a queue and sequences of its own, so nothing but sums and news is common.
"""

from collections.abc import Collection
from itertools import chain

from batcher.errors import InvariantError
from batcher.events import BlockedEvent, Event, RunEvent
from batcher.trace.run import FoldNews, RequestFold, RequestTimeline


class WorkerFolds:
    """What a RequestFold tells of a run, of one with several workers; slots are those of the run.

    workers: the fold of each.
    """

    def __init__(self, num_workers: int) -> None:
        self.workers = [RequestFold() for _ in range(num_workers)]

    def take(self, event: Event) -> RequestTimeline | None:
        """Take in the next event, and return the sequence that it tells of, if it is of one.

        Raises:
            InvariantError: it is of no worker, or contradicts those of its worker before it.
        """
        if isinstance(event, RunEvent) or event.worker is None:
            raise InvariantError("an event of no worker")
        return self.workers[event.worker].take(event)

    @property
    def news(self) -> FoldNews | None:
        """What they have come to know; see RequestFold."""
        return self.workers[0].news

    @news.setter
    def news(self, news: FoldNews) -> None:
        for fold in self.workers:
            fold.news = news

    @property
    def open(self) -> Collection[RequestTimeline]:
        """The sequences that have not ended."""
        return list(chain.from_iterable(fold.open for fold in self.workers))

    @property
    def num_open(self) -> int:
        """How many have not ended."""
        return sum(fold.num_open for fold in self.workers)

    @property
    def slots(self) -> dict[int, RequestTimeline]:
        """The newest sequence of each slot that was used."""
        return dict(chain.from_iterable(fold.slots.items() for fold in self.workers))

    @property
    def blocked(self) -> BlockedEvent | None:
        """Why the first of a waiting queue is not admitted, of the first worker that knows."""
        return next((fold.blocked for fold in self.workers if fold.blocked is not None), None)

    @property
    def num_arrived(self) -> int:
        """How many samples have arrived, or beams together."""
        return sum(fold.num_arrived for fold in self.workers)

    @property
    def num_wanted(self) -> int:
        """How many tokens they may generate."""
        return sum(fold.num_wanted for fold in self.workers)

    @property
    def num_drafted(self) -> int:
        """How many drafts there were."""
        return sum(fold.num_drafted for fold in self.workers)

    @property
    def num_accepted(self) -> int:
        """How many of them were accepted."""
        return sum(fold.num_accepted for fold in self.workers)
