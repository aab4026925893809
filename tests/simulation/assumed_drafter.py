"""A drafter of an engine whose drafts are right exactly where a simulation assumes they are."""

from collections.abc import Mapping, Sequence

from batcher.planning.simulator import AssumedDrafts
from batcher.planning.workload import Workload
from batcher.speculation.settings import Proposal
from batcher.tokens import Tokens

ANY = 17  # a token: nobody asks for those behind the end of an output


class AssumedDrafter:
    """Knows what rows will be given, by the first token of their prompts, and where it is wrong."""

    def __init__(self, workload: Workload, drafts: AssumedDrafts) -> None:
        self._drafts = drafts
        self._jobs = {}
        for job in workload.jobs:
            (piece,) = job.prompt
            assert piece.tokens is not None
            assert job.output.tokens is not None
            self._jobs[piece.tokens[0]] = job, len(piece.tokens), list(job.output.tokens)
        assert len(self._jobs) == len(workload.jobs)
        self._rows: dict[int, tuple[int, int]] = {}

    def open(self, slot: int, tokens: Tokens) -> None:
        first = tokens[0]
        self._rows[slot] = first, len(tokens) - self._jobs[first][1]

    def extend(self, given: Mapping[int, Sequence[int]]) -> None:
        for slot, tokens in given.items():
            first, num_given = self._rows[slot]
            self._rows[slot] = first, num_given + len(tokens)

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, Proposal]:
        proposed = {}
        for slot, num in num_wanted.items():
            first, place = self._rows[slot]
            job, _, output = self._jobs[first]
            coming = (output[place:] + [ANY] * num)[:num]
            for number in range(num):
                if not self._drafts.num_accepted(job, place + number, 1):
                    coming[number] = 3 if coming[number] != 3 else 4
            proposed[slot] = Proposal(coming)
        return proposed

    def close(self, slot: int, *, has_ended: bool) -> None:
        del has_ended, self._rows[slot]
