"""What happened to one sequence of a run, as the fold of its events keeps it."""

from msgspec import Struct

from batcher.events import AdmitEvent, ArriveEvent, FinishEvent, PreemptEvent, Role
from batcher.timeline.records import Fork, SlotSpan, SpanOutcome, SpanPreemption, label_of


class AdmissionRecord(Struct, gc=False):
    """What came of an admission, up to the preemption or the end of the sequence.

    waits_from: when it had joined the queue.
    left: how many tokens are left to compute before it generates.
    first_token: the step that was through with what it began with; None while none was.
    chunks: the steps after the admission that computed tokens of that.  forks: by step.  None for
    none: most have neither, and a list for each would take time.
    num_still: how many steps after that one gave it no token.
    has_jumped: whether a constraint has forced tokens on it that are not known to be computed.
    """

    event: AdmitEvent
    waits_from: int
    left: int
    first_token: int | None
    chunks: list[int] | None = None
    num_jumped: int = 0
    num_still: int = 0
    has_jumped: bool = False
    forks: list[Fork] | None = None
    preempt: PreemptEvent | None = None


class RequestTimeline(Struct, gc=False, eq=False):
    """A sequence on its way through a run; the first of a sequence group stands for all of it.

    arrive: None if the events begin later, if it was aborted before, or came along with another.
    waits_from, number: when it joined the queue last, and as which of all that did.
    admission: the one by which it holds a slot, or did when it ended; None while it waits.
    finish: None while it has not ended.
    max_tokens: how many it may generate; 0 for a negative prompt.
    num_rows: how many slots its group takes at once.
    The times of its tokens, in seconds, where somebody follows them (see metrics.latencies) -
    queue, ttft: from its arrival to its admission and its first token.  last_token: when it was
    given the last one while it was not decoding, or before it began to.  ended: the end of its last
    step.
    """

    id: str
    index: int
    role: Role
    arrive: ArriveEvent | None = None
    waits_from: int = 0
    number: int = 0
    max_tokens: int = 0
    admissions: list[AdmissionRecord] = []
    admission: AdmissionRecord | None = None
    finish: FinishEvent | None = None
    num_rows: int = 1
    queue: float | None = None
    ttft: float | None = None
    last_token: float = 0.0
    is_decoding: bool = False
    ended: float | None = None

    @property
    def label(self) -> str:
        """What the sequence is called."""
        return label_of(self.id, self.index, self.role)

    @property
    def first_event(self) -> ArriveEvent | AdmitEvent | FinishEvent | None:
        """The event that made it known."""
        return self.arrive or (self.admissions[0].event if self.admissions else self.finish)

    @property
    def first_token(self) -> int | None:
        """The step that gave its first token; None while none has."""
        for admission in reversed(self.admissions):
            if not admission.event.generated:
                return admission.first_token
        return None

    def tokens_after(self, step: int) -> int:
        """Return how many tokens it has after `step`, the last one that was made.

        A beam has made as many as it had steps, whatever it passes on as a result.
        """
        if not self.admissions or self.role == "negative":
            return 0
        admission = self.admissions[-1]
        if admission.preempt is not None:
            return admission.preempt.generated
        if self.finish is not None:
            if self.role != "beam":
                return self.finish.tokens
            step = self.finish.step
        start = step + 1 if admission.first_token is None else admission.first_token
        num_steps = step + 1 - start - admission.num_still
        return num_steps + admission.event.generated + admission.num_jumped

    def end(self, num_steps: int) -> int:
        """Return the step after its last one, of a run of `num_steps`."""
        if self.finish is None:
            return num_steps
        return min(self.finish.step + (self.admission is not None), num_steps)

    def steps(self, num_steps: int) -> range:
        """Return the steps from its arrival to its end, of a run of `num_steps`."""
        return range(self.arrive.step, self.end(num_steps)) if self.arrive else range(0)

    def slot_span(
        self, admission: AdmissionRecord, end: int, outcome: SpanOutcome | None
    ) -> SlotSpan:
        """Return the span that began with one of its admissions."""
        admit, preempt = admission.event, admission.preempt
        first_token = end - 1 if admission.first_token is None else admission.first_token
        return SlotSpan(
            admit.slot,
            admit.id,
            admit.index,
            admit.step,
            end,
            outcome,
            admit.role,
            admission.num_jumped,
            forks=tuple(admission.forks or ()),
            prefill=first_token + 1 - admit.step,
            cached=admit.cached,
            generated=admit.generated,
            resumed=admission is not self.admissions[0],
            preemption=None if preempt is None else SpanPreemption.by(preempt),
        )


def first_index(index: int, role: Role) -> int:
    """Return the index of the first of the group that a sequence of this index and role is in."""
    return 0 if role == "beam" else index
