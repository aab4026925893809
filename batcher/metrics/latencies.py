"""When each request was given its slot and its tokens: queue time, TTFT, TPOT, ITL and E2E.

Rule: rows that go on in lockstep share the gaps between their tokens, so a gap is counted once for
all of them; nothing is done per row per step.  docs/metrics.md has the definitions.
"""

from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    EndReason,
    FinishEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
)
from batcher.metrics.distributions import SecondsDistribution, SecondsHistogram
from batcher.metrics.steps import SequenceEvent, WholeStep, leader_key
from batcher.timeline.records import SequenceKey, key_of

NO_TOKENS: EndReason = "error"  # a row that fails is given no token in its last step


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


class Ended(NamedTuple):
    """A sample, or all beams of a request, that has ended; times are in seconds.

    end: of its last step.  queue, ttft: None if it was not admitted, or given no token.
    """

    reason: EndReason
    arrival: float
    deadline: float | None
    end: float
    queue: float | None
    ttft: float | None
    num_tokens: int
    max_tokens: int

    @property
    def is_ok(self) -> bool:
        """Whether it came to its end by itself, and was given tokens."""
        return self.reason in {"stop", "length"} and self.ttft is not None

    @property
    def e2e(self) -> float:
        """From its arrival to the end of its last step."""
        return self.end - self.arrival

    @property
    def tpot(self) -> float | None:
        """The mean time of a token after the first; None if there is none after it."""
        if self.ttft is None or self.num_tokens < 2:  # noqa: PLR2004 - the first, and one more
            return None
        return (self.e2e - self.ttft) / (self.num_tokens - 1)


@dataclass(slots=True)
class _Row:
    """A sample, or the first beam, that has arrived and not ended.

    last: when it was given the last token while it was not decoding, or before it began to.
    """

    arrival: float
    deadline: float | None
    max_tokens: int
    queue: float | None = None
    ttft: float | None = None
    last: float = 0.0
    is_decoding: bool = False


class TokenTimes:
    """Follows all rows from step to step, and counts their times."""

    def __init__(self) -> None:
        self.queue, self.ttft, self.tpot = (
            SecondsHistogram(),
            SecondsHistogram(),
            SecondsHistogram(),
        )
        self.itl, self.e2e = SecondsHistogram(), SecondsHistogram()
        self.rows: dict[SequenceKey, _Row] = {}
        self._last_advance = 0.0  # when decoding rows were last given a token, all at once
        # Of the decoding rows: how many were given their last token when.
        self._decoding: dict[float, int] = {}

    def latencies(self) -> Latencies:
        """Return what was counted so far."""
        return Latencies(
            queue=self.queue.distribution(),
            ttft=self.ttft.distribution(),
            tpot=self.tpot.distribution(),
            itl=self.itl.distribution(),
            e2e=self.e2e.distribution(),
        )

    def observe(self, step: WholeStep) -> tuple[GivenTokens, list[Ended]]:
        """Take in the next step; return what it gave, and who has ended in it."""
        ended = self.interrupt(step.events, step)
        num_tokens = self._advance(step.end) if step.decodes else 0
        num_first, sum_ttft = 0, 0.0
        for event in step.events:
            if isinstance(event, AdmitEvent | PrefillEvent):
                row = self._row(event)
                if event.left or row is None or row.max_tokens == 0:  # only its prompt is computed
                    continue
                num_tokens += 1
                is_first = self._start(row, step.end)
                if is_first and row.ttft is not None:
                    num_first += 1
                    sum_ttft += row.ttft
            elif isinstance(event, JumpEvent):
                self.itl.add(0, event.tokens)
                num_tokens += event.tokens
            elif isinstance(event, FinishEvent) and (found := self._end(event, step.end)):
                ended.append(found)
        return GivenTokens(num_tokens, num_first, sum_ttft), ended

    def interrupt(self, events: list[SequenceEvent], step: WholeStep | None = None) -> list[Ended]:
        """Take in what happens before the rows of `step` go on; return who ends by that.

        Without a step, at the end of the run, that is all that happens.
        """
        ended = []
        for event in events:
            if isinstance(event, AdmitEvent):
                row = self._row(event)
                if row is not None and row.queue is None:
                    row.queue = event.time - row.arrival
                    self.queue.add(row.queue)
            elif isinstance(event, ArriveEvent):
                row = _Row(event.time, event.deadline, event.max_tokens)
                self.rows[key_of(event.id, event.index, "sample")] = row
            elif isinstance(event, PrefillEvent | PreemptEvent):
                row = self._row(event)
                if row is not None:
                    self._stop(row)
            elif isinstance(event, FinishEvent) and (
                step is None or event.step < step.step or event.reason == NO_TOKENS
            ):
                found = self._end(event, event.time if step is None else step.end)
                if found is not None:
                    ended.append(found)
        return ended

    def _row(self, event: AdmitEvent | PrefillEvent | PreemptEvent | FinishEvent) -> _Row | None:
        key = leader_key(event)
        return None if key is None else self.rows.get(key)

    def _advance(self, end: float) -> int:
        """Give each decoding row a token; return how many there are."""
        total = 0
        for last, num_rows in self._decoding.items():
            self.itl.add(end - last, num_rows)
            total += num_rows
        self._decoding = {end: total} if total else {}
        self._last_advance = end
        return total

    def _start(self, row: _Row, end: float) -> bool:
        """Give `row` a token and let it decode; return whether the token is its first."""
        is_first = row.ttft is None
        if is_first:
            row.ttft = end - row.arrival
            self.ttft.add(row.ttft)
        else:
            self.itl.add(end - row.last)
        row.last, row.is_decoding = end, True
        self._decoding[end] = self._decoding.get(end, 0) + 1
        return is_first

    def _stop(self, row: _Row) -> None:
        """Let `row` decode no more, until it starts again."""
        if row.is_decoding:
            row.last, row.is_decoding = max(row.last, self._last_advance), False
            self._decoding[row.last] -= 1
            if not self._decoding[row.last]:
                del self._decoding[row.last]

    def _end(self, event: FinishEvent, end: float) -> Ended | None:
        """Forget the row that has ended and count its times; None if it never arrived."""
        key = leader_key(event)
        row = None if key is None else self.rows.pop(key, None)
        if row is None:
            return None
        self._stop(row)
        ended = Ended(
            reason=event.reason,
            arrival=row.arrival,
            deadline=row.deadline,
            end=end,
            queue=row.queue,
            ttft=row.ttft,
            num_tokens=event.tokens,
            max_tokens=row.max_tokens,
        )
        if ended.is_ok:
            self.e2e.add(ended.e2e)
            if ended.tpot is not None:
                self.tpot.add(ended.tpot)
        return ended
