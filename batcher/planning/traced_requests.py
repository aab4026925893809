"""The requests of a real run, from a log of requests or from the trace of a run with times."""

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import NamedTuple

from batcher.errors import BatchdecodeError
from batcher.events import Event, RunEvent
from batcher.metrics.times import EndedRequest, StepFeed, TokenTimes, is_untimed, open_feed
from batcher.planning.request_log import LoggedRequest, read_request_log
from batcher.trace.files import is_trace, read_numbered_trace
from batcher.trace.run import RequestFold, TraceChecks, label_of
from batcher.trace.workers import ByWorker


class RequestsOfRun(NamedTuple):
    """The requests in the order they came.

    batch: the slots of the engine, if that is told; of a server, what its client had in flight.
    """

    requests: list[LoggedRequest]
    batch: int | None
    is_of_client: bool = False


def read_requests(lines: Iterable[tuple[int, bytes]], name: str) -> RequestsOfRun:
    """Return the requests of a log or a trace, given as (line number, line).

    Of a trace, those that came to their end by themselves; each sample is one.

    Raises:
        BatchdecodeError: it is neither, its times are not told, no run can have written it, or
            nothing has come to its end.
    """
    numbered = iter(lines)
    head = [line for _, line in zip(range(1), numbered, strict=False)]
    if not head or not is_trace(head[0][1]):
        return RequestsOfRun(read_request_log(chain(head, numbered), name), None)
    by_worker = ByWorker(partial(_TimedRequests, name))
    for event in read_numbered_trace(chain(head, numbered), name, TraceChecks().complaint):
        by_worker.add(event)
    requests = [request for worker in by_worker.close() for request in worker.close()]
    if not requests:
        raise BatchdecodeError(f"{name}: no request has come to its end in it")
    for request in requests:
        if not request.input_toks:
            raise BatchdecodeError(
                f"{name}: nobody has told how long the prompt of {request.request_id!r} is"
            )
    requests.sort(key=lambda request: request.queued_ts)
    run = by_worker.run
    batch = run.batch if run.workers == 1 else None
    return RequestsOfRun(requests, batch, is_of_client=run.layout == "remote")


class _TimedRequests:
    """Takes in the events of a worker, and has the requests of it that came to their end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._fold, self._times = RequestFold(), TokenTimes()
        self._feed: StepFeed | None = None
        self._requests: list[LoggedRequest] = []

    def add(self, event: Event) -> None:
        """Take in the next event.

        Raises:
            BatchdecodeError: the steps of the run have no times.
        """
        if self._feed is None:
            if not isinstance(event, RunEvent) or is_untimed(event):
                raise BatchdecodeError(
                    f"{self._name}: its steps have no times; those of a server, of --profile, or "
                    "wall have"
                )
            self._feed = open_feed(event)
            return
        for step in self._feed.take(event, self._fold.take(event)):
            self._keep(self._times.observe(step)[1])

    def close(self) -> list[LoggedRequest]:
        """Return the requests, as they ended."""
        if self._feed is not None:
            self._keep(self._times.interrupt(self._feed.take_events()))
        return self._requests

    def _keep(self, ended: Iterable[EndedRequest]) -> None:
        self._requests += map(_logged, filter(_is_whole, ended))


def _is_whole(ended: EndedRequest) -> bool:
    return ended.is_ok and ended.finish.tokens > 0


def _logged(ended: EndedRequest) -> LoggedRequest:
    """Return a request that has come to its end as a log has it."""
    finish, came = ended.finish, ended.arrive.time
    return LoggedRequest(
        request_id=label_of(finish.id, finish.index, finish.role),
        input_toks=finish.prompt_tokens or ended.arrive.prompt_tokens,
        output_toks=finish.tokens,
        queued_ts=came,
        first_token_ts=came + (ended.ttft or 0.0),
        last_token_ts=ended.end,
    )
