"""When each request was given its slot and its tokens: queue time, TTFT, TPOT, ITL and E2E.

Rule: rows that go on in lockstep share the gaps between their tokens, so a gap is counted once for
all of them; nothing is done per row per step.  docs/metrics.md has the definitions.
"""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    EndReason,
    FinishEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    ReceiveEvent,
)
from batcher.metrics.distributions import SecondsDistribution, SecondsHistogram
from batcher.metrics.steps import EventOfRequest, WholeStep
from batcher.trace.records import RequestTimeline

NO_TOKENS: EndReason = "error"


class Latencies(Struct, frozen=True, kw_only=True):
    """How long requests waited and took, in seconds; None for what there was none of.

    queue: up to the admission.  ttft, e2e: up to the first and the last token.  tpot: of each token
    after the first, on average.  itl: from a token to the next one of the same sample.
    """

    queue: SecondsDistribution | None
    ttft: SecondsDistribution | None
    tpot: SecondsDistribution | None
    itl: SecondsDistribution | None
    e2e: SecondsDistribution | None


class GivenTokens(NamedTuple):
    """What a step gave: tokens, how many of them were first ones, and the sum of their TTFTs."""

    num_tokens: int
    num_first: int
    sum_ttft: float


class EndedRequest(NamedTuple):
    """A sample, or all beams of a request, that has ended; times are in seconds.

    end: of its last step.  queue, ttft: None if it was not admitted, or given no token.
    """

    finish: FinishEvent
    arrive: ArriveEvent
    end: float
    queue: float | None
    ttft: float | None

    @property
    def is_ok(self) -> bool:
        """Whether it came to its end by itself, and was given tokens."""
        return self.finish.reason in {"stop", "length"} and self.ttft is not None

    @property
    def e2e(self) -> float:
        """From its arrival to the end of its last step."""
        return self.end - self.arrive.time

    @property
    def tpot(self) -> float | None:
        """The mean time of a token after the first; None if there is none after it."""
        num_tokens = self.finish.tokens
        if self.ttft is None or num_tokens < 2:  # noqa: PLR2004 - the first, and one more
            return None
        return (self.e2e - self.ttft) / (num_tokens - 1)


class TokenTimes:
    """Follows all sequences from step to step, tells their times and counts them.

    times: how they are distributed so far, by the names of Latencies.
    """

    def __init__(self) -> None:
        self.times = {name: SecondsHistogram() for name in Latencies.__struct_fields__}
        self._last_advance = 0.0  # when decoding rows were last given a token, all at once
        # Of the decoding rows: how many were given their last token when.
        self._decoding: dict[float, int] = {}

    def observe(self, step: WholeStep) -> tuple[GivenTokens, list[EndedRequest]]:
        """Take in the next step; return what it gave, and who has ended in it."""
        ended = self.interrupt(step.events, step)
        num_tokens = self._advance(step.end) if step.decodes else 0
        num_first, sum_ttft = 0, 0.0
        for event, found in step.events:
            if isinstance(event, AdmitEvent | PrefillEvent):
                arrive = self._arrival(found)
                if event.left or arrive is None or not arrive.max_tokens:
                    continue  # only its prompt is computed
                num_tokens += 1
                is_first = found.ttft is None
                self._start(found, arrive, step.end)
                num_first += is_first
                sum_ttft += found.ttft or 0.0 if is_first else 0.0
            elif isinstance(event, ReceiveEvent):
                is_first = found.ttft is None
                num_tokens += event.tokens
                self._receive(event, found, step.end)
                num_first += is_first
                sum_ttft += found.ttft or 0.0 if is_first else 0.0
            elif isinstance(event, JumpEvent | AcceptEvent):
                self.times["itl"].add(0, event.tokens)
                num_tokens += event.tokens
            elif isinstance(event, FinishEvent):
                ended += self._end(event, found, step.end)
        return GivenTokens(num_tokens, num_first, sum_ttft), ended

    def interrupt(
        self, events: list[EventOfRequest], step: WholeStep | None = None
    ) -> list[EndedRequest]:
        """Take in what happens before the rows of `step` go on; return who ends by that.

        Without a step, at the end of the run, that is all that happens.
        """
        ended: list[EndedRequest] = []
        for event, found in events:
            arrive = self._arrival(found)
            if arrive is None:  # it has ended, came along with another one or never arrived
                continue
            if isinstance(event, AdmitEvent):
                if found.queue is None:
                    found.queue = event.time - arrive.time
                    self.times["queue"].add(found.queue)
            elif isinstance(event, PrefillEvent | PreemptEvent):
                self._stop(found)
            elif isinstance(event, FinishEvent) and (
                step is None or event.step < step.step or _is_without_tokens(event, found)
            ):
                ended += self._end(event, found, event.time if step is None else step.end)
        return ended

    def _arrival(self, found: RequestTimeline) -> ArriveEvent | None:
        """Return what a sequence asked for, None if it is none to follow."""
        return None if found.ended is not None else found.arrive

    def _advance(self, end: float) -> int:
        """Give each decoding row a token; return how many there are."""
        total = 0
        for last, num_rows in self._decoding.items():
            self.times["itl"].add(end - last, num_rows)
            total += num_rows
        self._decoding = {end: total} if total else {}
        self._last_advance = end
        return total

    def _start(self, found: RequestTimeline, arrive: ArriveEvent, end: float) -> None:
        """Give a sequence a token and let it decode."""
        if found.ttft is None:
            found.ttft = end - arrive.time
            self.times["ttft"].add(found.ttft)
        else:
            self.times["itl"].add(end - found.last_token)
        found.last_token, found.is_decoding = end, True
        self._decoding[end] = self._decoding.get(end, 0) + 1

    def _receive(self, event: ReceiveEvent, found: RequestTimeline, end: float) -> None:
        """Give a sequence what a server has sent; it goes on by itself, with no other row."""
        arrive = self._arrival(found)
        if arrive is None or not event.tokens:
            return
        if found.ttft is None:
            found.ttft = end - arrive.time
            self.times["ttft"].add(found.ttft)
        else:
            self.times["itl"].add(end - found.last_token)
        self.times["itl"].add(0, event.tokens - 1)
        found.last_token = end

    def _stop(self, found: RequestTimeline) -> None:
        """Let a sequence decode no more, until it starts again."""
        if found.is_decoding:
            last = found.last_token = max(found.last_token, self._last_advance)
            found.is_decoding = False
            self._decoding[last] -= 1
            if not self._decoding[last]:
                del self._decoding[last]

    def _end(
        self, event: FinishEvent, found: RequestTimeline, end: float
    ) -> Iterator[EndedRequest]:
        """Count the times of a sequence that has ended, and yield them; nothing the second time."""
        arrive = self._arrival(found)
        if arrive is None:
            return
        self._stop(found)
        found.ended = end
        ended = EndedRequest(event, arrive, end, found.queue, found.ttft)
        if ended.is_ok:
            self.times["e2e"].add(ended.e2e)
            if ended.tpot is not None:
                self.times["tpot"].add(ended.tpot)
        yield ended


def _is_without_tokens(event: FinishEvent, found: RequestTimeline) -> bool:
    """Return whether a row failed in its last step, and no server has sent it a token."""
    has_received = found.admission is not None and found.admission.num_received is not None
    return event.reason == NO_TOKENS and not has_received
