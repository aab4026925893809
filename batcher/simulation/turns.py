"""The jobs of a workload as sequences: at once, or one turn of a session after the other."""

from collections import deque

from batcher.simulation.sequence import SimulatedSequence, make_sequence
from batcher.simulation.workload import Workload


class Turns:
    """Makes the sequences of a workload; of one session at most one is on its way.

    sequences: one for each job, those of turns that have not begun without a history.
    ended: turns that have ended since the next ones went on.
    """

    def __init__(self, workload: Workload) -> None:
        self._jobs = workload.jobs
        self.sequences = [make_sequence(job) for job in workload.jobs]
        self.ended: list[SimulatedSequence] = []
        self._sessions: dict[str, deque[int]] = {}  # the places of turns that wait

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
            waiting = self._sessions.get(job.session)
            if waiting is None:
                self._sessions[job.session] = deque()
                first.append(self.sequences[place])
            else:
                waiting.append(place)
        return first

    def go_on(self, now: float) -> SimulatedSequence | None:
        """Return the turn after the first that has ended, which goes on at `now`; None for none.

        It has failed if the one before it has.
        """
        ended = self.ended.pop(0)
        waiting = self._sessions[ended.job.session or ""]
        if not waiting:
            return None
        place = waiting.popleft()
        job = self._jobs[place]
        turn = make_sequence(job, ended.pieces)
        turn.arrival_time = max(job.arrival_time, now + job.think_time)
        turn.has_failed = ended.has_failed
        self.sequences[place] = turn
        return turn
