"""Logs of real runs, as vLLM tells of requests: how long each was, and when what happened to it."""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError
from batcher.planning.entries import MAX_LENGTH
from batcher.planning.workload import GREEDY, Job, Piece, Workload
from batcher.request import MAX_TIME

FIELDS = (
    "request_id, input_toks, output_toks, queued_ts, first_token_ts, last_token_ts, "
    "maybe scheduled_ts and replica"
)
MARK = b'"queued_ts"'  # what tells a line of such a log from one of a log of steps

Length = Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
Time = Annotated[float, Meta(ge=0, le=MAX_TIME)]
NUM_DIGITS = 9  # of seconds, after the point: a log has no more


class LoggedRequest(Struct, frozen=True, gc=False, kw_only=True):
    """A line of the log; its other fields are not used.  Times are seconds from anywhere.

    queued_ts: when it came.  scheduled_ts: when its first step began.  first_token_ts,
    last_token_ts: when these tokens were there.  replica: which of several engines had it.
    """

    request_id: str
    input_toks: Length
    output_toks: Length
    queued_ts: Time
    first_token_ts: Time
    last_token_ts: Time
    scheduled_ts: Time | None = None
    replica: int | str | None = None


def read_request_log(lines: Iterable[tuple[int, bytes]], name: str) -> list[LoggedRequest]:
    """Return the requests of a log, given as (line number, line), in the order they came.

    name: how errors call the file.

    Raises:
        BatchdecodeError: a line is no such request, or its times cannot be; or there is none.
    """
    decoder = msgspec.json.Decoder(LoggedRequest)
    requests, lines_of = list[LoggedRequest](), dict[str, int]()
    for number, text in lines:
        try:
            request = decoder.decode(text)
        except (ValueError, RecursionError) as error:  # the other: nested too deeply
            message = f"{name}:{number}: {_fault(error)}; fields: {FIELDS}"
            raise BatchdecodeError(message) from None
        first_line = lines_of.setdefault(request.request_id, number)
        if first_line != number:
            message = f"request_id {request.request_id!r} is in line {first_line} already"
            raise BatchdecodeError(f"{name}:{number}: {message}")
        _check_times(request, f"{name}:{number}")
        if requests and (request.replica is None) is not (requests[0].replica is None):
            message = "replica: all requests name one, or none does"
            raise BatchdecodeError(f"{name}:{number}: {message}")
        requests.append(request)
    if not requests:
        raise BatchdecodeError(f"{name}: there are no requests in it; fields of a line: {FIELDS}")
    return sorted(requests, key=lambda request: request.queued_ts)


_WORDS = {
    "`int`": "a whole number",
    "`float`": "a number",
    "`str`": "a text",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "an object",
    " - at `$.": " at `",
}


def _fault(error: Exception) -> str:
    """Return what is wrong with a line, in the words of JSON and not of Python."""
    text = str(error)
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    return text if text.startswith("JSON") else f"{text[:1].lower()}{text[1:]}"


def _check_times(request: LoggedRequest, place: str) -> None:
    """Make sure that the times of a request do not go back.

    Raises:
        BatchdecodeError: they do.
    """
    times = {
        "queued_ts": request.queued_ts,
        "scheduled_ts": request.scheduled_ts,
        "first_token_ts": request.first_token_ts,
        "last_token_ts": request.last_token_ts,
    }
    before, last = "", 0.0
    for field, time in times.items():
        if time is None:
            continue
        if time < last:
            raise BatchdecodeError(f"{place}: {field} {time} is before {before} {last}")
        before, last = field, time


def workload_of_log(log: list[LoggedRequest]) -> Workload:
    """Return the requests of a log as jobs; the first comes at 0 s, and none shares a prefix."""
    first = log[0].queued_ts
    jobs = [
        Job(
            id=request.request_id,
            input_index=input_index,
            arrival_time=round(request.queued_ts - first, NUM_DIGITS),
            num_prompt_tokens=request.input_toks,
            num_output_tokens=request.output_toks,
            max_tokens=request.output_toks,
            prompt=(Piece(request.input_toks, ("prompt", input_index)),),
            output=Piece(request.output_toks, GREEDY),
        )
        for input_index, request in enumerate(log)
    ]
    return Workload(jobs, len(jobs))
