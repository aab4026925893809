"""A sequence that is simulated: what the scheduler knows of it, what it holds, and its times."""

from itertools import accumulate

from batcher.scheduling.sequence import NEVER, Schedulable
from batcher.simulation.workload import Job, Piece
from batcher.timing.step_time import TICKS_PER_SECOND


class SimulatedSequence(Schedulable, eq=False, gc=False, kw_only=True):
    """A job on its way.

    pieces: what its tokens are, prompt and output.  ends: where each of them ends.
    arrival_time: of a turn, when it went on at last.  admitted_ticks: when its first admission
    began; first_token_ticks, end_ticks: when the steps of its first and its last token had ended;
    all NEVER if that did not happen.  has_failed: it, or a turn before it, could never run.
    num_cached_at_first: the tokens found in blocks when it was first admitted.
    num_preemptions: how often it lost its slot.  num_lost: computed tokens, lost the last time.
    """

    job: Job
    pieces: tuple[Piece, ...]
    ends: tuple[int, ...]
    admitted_ticks: int = NEVER
    first_token_ticks: int = NEVER
    end_ticks: int = NEVER
    has_failed: bool = False
    num_cached_at_first: int = 0
    num_preemptions: int = 0
    num_lost: int = 0

    @property
    def admitted(self) -> float | None:
        """When the step began that first gave it a slot, in seconds."""
        return _seconds(self.admitted_ticks)

    @property
    def first_token(self) -> float | None:
        """When the step ended that gave it its first token, in seconds."""
        return _seconds(self.first_token_ticks)

    @property
    def end(self) -> float | None:
        """When the step ended that gave it its last token, in seconds; None if it failed."""
        return _seconds(self.end_ticks)

    @property
    def num_output_tokens(self) -> int:
        """How many tokens it is given."""
        return 0 if self.has_failed else self.job.num_output_tokens


def _seconds(ticks: int) -> float | None:
    return None if ticks == NEVER else ticks / TICKS_PER_SECOND


def make_sequence(job: Job, history: tuple[Piece, ...] = ()) -> SimulatedSequence:
    """Return what waits in the queue for `job`; `history` is what its session has come to."""
    start = sum(piece.length for piece in history)
    pieces = (*history, *job.prompt, job.output)
    pieces = tuple(piece for piece in pieces if piece.length) or (job.output,)
    num_tokens = start + job.num_prompt_tokens
    sequence = SimulatedSequence(
        id=job.id,
        index=job.index,
        input_index=job.place,
        arrival_time=job.arrival_time,
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
        max_tokens=job.max_tokens,
        priority=job.priority,
        deadline=job.deadline,
        cache_salt=job.cache_salt,
        has_siblings=job.has_siblings,
        job=job,
        pieces=pieces,
        ends=tuple(accumulate(piece.length for piece in pieces)),
    )
    if job.ranks:
        borders = tuple((start + end, rank) for end, rank in job.ranks)
        sequence.ranks = ((start, 0), *borders) if start else borders
    return sequence
