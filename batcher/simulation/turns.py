"""The jobs of a workload as sequences: at once, or one turn of a session after the other."""

from collections import deque

from batcher.simulation.sequence import SimulatedSequence, make_sequence
from batcher.simulation.workload import Job, Piece, Workload


class _Session:
    """What one conversation has come to, and the jobs of the turns that are left."""

    __slots__ = ("end", "has_failed", "pieces", "places")

    def __init__(self) -> None:
        self.places: deque[int] = deque()
        self.pieces: tuple[Piece, ...] = ()
        self.end: float | None = None
        self.has_failed = False


class Turns:
    """Makes the sequences of a workload; of one session at most one is on its way.

    sequences: one for each job, those of turns that have not begun without a history.
    begun: turns that go on, until they are taken.
    """

    def __init__(self, workload: Workload) -> None:
        self._jobs = workload.jobs
        self.sequences = [make_sequence(job) for job in workload.jobs]
        self.begun: list[SimulatedSequence] = []
        self._sessions: dict[str, _Session] = {}

    @property
    def all_wait(self) -> bool:
        """Whether all jobs have to be admitted, and none waits for another one."""
        return all(job.max_tokens and job.session is None for job in self._jobs)

    def begin(self) -> list[SimulatedSequence]:
        """Return the sequences that wait for no other one."""
        first = []
        for place, job in enumerate(self._jobs):
            if job.session is None:
                first.append(self.sequences[place])
                continue
            session = self._sessions.get(job.session)
            if session is None:
                self._sessions[job.session] = _Session()
                first.append(self.sequences[place])
            else:
                session.places.append(place)
        return first

    def take_begun(self) -> list[SimulatedSequence]:
        """Return the turns that go on since the last call; those that have failed at once, too."""
        begun, self.begun = self.begun, []
        return begun

    def end(self, sequence: SimulatedSequence, now: float) -> None:
        """Take note that a turn has ended at `now`; the next one of its session goes on."""
        session = self._sessions[sequence.job.session or ""]
        session.pieces, session.end = sequence.pieces, now
        session.has_failed = sequence.has_failed
        if not session.places:
            return
        place = session.places.popleft()
        job: Job = self._jobs[place]
        turn = make_sequence(job, session.pieces)
        turn.arrival_time = max(job.arrival_time, now + job.think_time)
        turn.has_failed = session.has_failed
        self.sequences[place] = turn
        self.begun.append(turn)
