"""One request that is in the engine, as the event loop sees it: what has come of it, in order."""

import asyncio

from batcher.events import TokenEvent
from batcher.request import Request
from batcher.result import Result

MAX_UNREAD = 4096
"""So many steps may have told of a request whose client reads nothing; then it is given up."""

News = TokenEvent | Result


class Exchange:
    """What the engine tells of one request, until somebody takes it; for the event loop alone.

    wants_tokens: whether it is told of tokens as they come.
    num_left: how many of its results have not come.
    failure: why no more will come, if something went wrong.
    """

    def __init__(self, request: Request, name: str, *, wants_tokens: bool) -> None:
        self.request, self.name, self.wants_tokens = request, name, wants_tokens
        self.num_left = request.n
        self.failure: Exception | None = None
        self._news: list[News] = []
        self._has_news = asyncio.Event()

    @property
    def is_unread(self) -> bool:
        """Whether more is there than a client may leave unread."""
        return len(self._news) > MAX_UNREAD

    def tell(self, news: News) -> None:
        """Take in what has come of the request."""
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
        """Wait for news and return all there are; of a request without tokens, all results.

        Raises:
            ApiError, ClientGoneError: nothing more will come.
        """
        await self._has_news.wait()
        self._has_news.clear()
        if self.failure is not None:
            raise self.failure
        news, self._news = self._news, []
        return news
