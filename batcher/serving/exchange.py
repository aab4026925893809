"""The requests of one body in the engine, as the event loop sees them: their news, in order."""

import asyncio
from collections.abc import Sequence

from batcher.events import TokenEvent
from batcher.request import Request
from batcher.result import Result

MAX_UNREAD = 4096
"""So many steps may have told of a request whose client reads nothing; then it is given up."""

News = TokenEvent | Result


class Exchange:
    """The news of one or more requests, until they are taken; for the event loop alone.

    names: of the requests in the engine.  wants_tokens: whether tokens are news.
    places: of the first choice of each request in the answer, by name.
    num_left: how many results have not come.
    failure: why no more will come, if something went wrong.
    """

    def __init__(
        self, requests: Sequence[Request], names: Sequence[str], *, wants_tokens: bool
    ) -> None:
        self.names, self.wants_tokens = names, wants_tokens
        self.places = {name: place * requests[0].n for place, name in enumerate(names)}
        self.num_left = sum(request.n for request in requests)
        self.failure: Exception | None = None
        self._news: list[News] = []
        self._has_news = asyncio.Event()

    @property
    def is_unread(self) -> bool:
        """Whether more is there than a client may leave unread."""
        return len(self._news) > MAX_UNREAD

    def tell(self, news: News) -> None:
        """Add news of a request."""
        if isinstance(news, Result):
            self.num_left -= 1
        elif not self.wants_tokens:
            return
        self._news.append(news)
        if self.wants_tokens or not self.num_left:
            self._has_news.set()

    def fail(self, failure: Exception) -> None:
        """Let nothing more come; whoever waits for it is told why."""
        self.failure = failure
        self._has_news.set()

    async def take(self) -> list[News]:
        """Wait for news and return all there are; without tokens, all results.

        Raises:
            ApiError, ClientGoneError: nothing more will come.
        """
        await self._has_news.wait()
        self._has_news.clear()
        if self.failure is not None:
            raise self.failure
        news, self._news = self._news, []
        return news
