"""The timeline of a page: with all that the stories of its sequences are made of.

Rule: of a sequence that has ended nothing stays in memory but what sorted records keep of all.
"""

import msgspec
from msgspec import Struct

from batcher.events import Event, FinishEvent, RejectEvent, Role
from batcher.explaining.story import Arrival, RequestEnd, StoryDrafts, StoryRetry, computes_at_once
from batcher.trace.run import AdmissionRecord, RequestTimeline
from batcher.trace.timeline import SortedRecords, Timeline

_encoder = msgspec.json.Encoder()


class PageSequence(Struct, frozen=True):
    """A sequence, as a story tells of it.

    arrived: None if nothing tells of that.
    ended: None if nothing tells; its time is that of its event, `in_slot` or not.
    """

    id: str
    index: int
    role: Role
    num_rows: int
    arrived: Arrival | None
    ended: RequestEnd | None
    in_slot: bool


class SpanDetail(Struct, frozen=True):
    """What a story tells of a slot span, and a SlotSpan does not.

    sequence: the number of the one that held the slot.  has_first_token: whether a step was through
    with what it began with.  has_share: whether the step that admitted it computed any of that.
    more: drafts, retries, and the later steps that computed some, as JSON; "" for nothing.
    """

    sequence: int
    has_first_token: bool
    has_share: bool
    more: str


class PageTimeline(Timeline):
    """A timeline that keeps of its sequences what a page tells of them, beside their spans.

    sequences: as they became known, which is how they are numbered.  details: of the spans, in
    their order.  rejects: the lines that were no requests.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sequences = SortedRecords[PageSequence](PageSequence)
        self.details = SortedRecords[SpanDetail](SpanDetail)
        self.rejects = SortedRecords[RejectEvent](RejectEvent)
        self._open: dict[int, tuple[int, RequestTimeline]] = {}  # by identity, with their numbers
        self._num_known = 0

    def add(self, event: Event) -> RequestTimeline | None:
        """Take in the next event, as every timeline does."""
        found = super().add(event)
        if isinstance(event, RejectEvent):
            self.rejects.add((len(self.rejects),), event)
        if found is None:
            return None
        if found.first_event is event:
            self._open[id(found)] = self._num_known, found
            self._num_known += 1
        if type(event) is FinishEvent and id(found) in self._open:
            self._keep(*self._open.pop(id(found)))
        return found

    def close(self) -> None:
        """End what has not ended where the events break off."""
        for number, found in self._open.values():
            self._keep(number, found)
        self._open.clear()
        super().close()

    def _keep(self, number: int, found: RequestTimeline) -> None:
        """Record a sequence of which all is known, and what its spans do not tell."""
        arrive, finish = found.arrive, found.finish
        sequence = PageSequence(
            id=found.id,
            index=found.index,
            role=found.role,
            num_rows=found.num_rows,
            arrived=None if arrive is None else Arrival.by(arrive, finish),
            ended=None if finish is None else RequestEnd.by(finish, finish.time),
            in_slot=found.admission is not None,
        )
        self.sequences.add((number,), sequence)
        for admission in found.admissions:
            detail = SpanDetail(
                number,
                admission.first_token is not None,
                computes_at_once(found, admission),
                _more(admission),
            )
            self.details.add((admission.event.step, admission.event.slot), detail)


def _more(admission: AdmissionRecord) -> str:
    """Return what few spans have, as JSON; "" for nothing."""
    told: dict[str, object] = {}
    if admission.drafts is not None:
        told["drafts"] = StoryDrafts.of(admission.drafts)
    if admission.retries:
        told["retries"] = [StoryRetry.by(event) for event in admission.retries]
    if admission.chunks:
        told["chunks"] = admission.chunks
    return _encoder.encode(told).decode() if told else ""
