"""A drafter of an engine whose drafts are right exactly where a simulation assumes they are."""

from batcher.speculation.settings import Proposal

ANY = 17  # a token: nobody asks for those behind the end of an output


class AssumedDrafter:
    """Knows what rows will be given, by the first token of their prompts, and where it is wrong."""

    def __init__(self, workload, drafts):
        self._drafts = drafts
        self._jobs = {}
        for job in workload.jobs:
            (piece,) = job.prompt
            assert piece.tokens is not None
            assert job.output.tokens is not None
            self._jobs[piece.tokens[0]] = job, len(piece.tokens), list(job.output.tokens)
        assert len(self._jobs) == len(workload.jobs)
        self._rows = {}

    def open(self, slot, tokens):
        first = tokens[0]
        self._rows[slot] = first, len(tokens) - self._jobs[first][1]

    def extend(self, given):
        for slot, tokens in given.items():
            first, num_given = self._rows[slot]
            self._rows[slot] = first, num_given + len(tokens)

    def propose(self, num_wanted):
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

    def close(self, slot, *, has_ended):
        del has_ended, self._rows[slot]
