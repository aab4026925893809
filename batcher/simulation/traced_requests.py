"""The requests of a real run, from a log of requests or from the trace of a run with times."""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from batcher.errors import BatchdecodeError
from batcher.events import RunEvent
from batcher.formats.trace import is_trace, read_trace
from batcher.metrics.latencies import EndedRequest, TokenTimes
from batcher.metrics.steps import is_untimed, open_feed
from batcher.simulation.request_log import LoggedRequest, read_request_log
from batcher.timeline.fold import RequestFold
from batcher.timeline.records import label_of


class RequestsOfRun(NamedTuple):
    """The requests in the order they came; batch: how many slots there were, if that is told."""

    requests: list[LoggedRequest]
    batch: int | None


def read_requests(lines: Iterable[tuple[int, bytes]], name: str) -> RequestsOfRun:
    """Return the requests of a log or a trace, given as (line number, line).

    Of a trace, those that came to their end by themselves; each sample is one.

    Raises:
        BatchdecodeError: it is neither, its times are not told, or nothing has come to its end.
    """
    numbered = iter(lines)
    head = [line for _, line in zip(range(1), numbered, strict=False)]
    if not head or not is_trace(head[0][1]):
        return RequestsOfRun(read_request_log(chain(head, numbered), name), None)
    fold, times = RequestFold(), TokenTimes()
    events = read_trace((line for _, line in chain(head, numbered)), name)
    run = next(events)
    if not isinstance(run, RunEvent) or is_untimed(run):
        raise BatchdecodeError(
            f"{name}: its steps have no times; those of a server, of --profile, or wall have"
        )
    feed = open_feed(run)
    requests: list[LoggedRequest] = []
    for event in events:
        for step in feed.take(event, fold.take(event)):
            requests += map(_logged, filter(_is_whole, times.observe(step)[1]))
    requests += map(_logged, filter(_is_whole, times.interrupt(feed.take_events())))
    if not requests:
        raise BatchdecodeError(f"{name}: no request has come to its end in it")
    for request in requests:
        if not request.input_toks:
            raise BatchdecodeError(
                f"{name}: nobody has told how long the prompt of {request.request_id!r} is"
            )
    requests.sort(key=lambda request: request.queued_ts)
    return RequestsOfRun(requests, run.batch)


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
