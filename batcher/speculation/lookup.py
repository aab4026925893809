"""What follows the end of a row in texts that were there before: REST, He et al. 2023."""

from collections.abc import Mapping, Sequence

from batcher.errors import InvariantError
from batcher.speculation.datastore import LONGEST, Datastore
from batcher.speculation.proposal import Proposal, merged
from batcher.tokens import Tokens


class LookupDrafter:
    """A Drafter that looks the end of each row up in a Datastore; see SuffixDrafter."""

    def __init__(self, datastore: Datastore, num_branches: int = 1) -> None:
        self._datastore, self._num_branches = datastore, num_branches
        self._ends: dict[int, list[int]] = {}

    def open(self, slot: int, tokens: Tokens) -> None:
        """Begin a row that has `tokens`, the last of which are looked up."""
        if slot in self._ends:
            raise InvariantError(f"slot {slot} has a row already")
        self._ends[slot] = list(tokens[-LONGEST:])

    def extend(self, given: Mapping[int, Sequence[int]]) -> None:
        """Let rows have been given tokens."""
        for slot, tokens in given.items():
            self._ends[slot] = [*self._ends[slot], *tokens][-LONGEST:]

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, Proposal]:
        """Return drafts of rows whose last token is in the texts, and is followed by another."""
        drafts = {}
        for slot, number in num_wanted.items():
            proposal = self._drafts(self._ends[slot], number)
            if proposal:
                drafts[slot] = proposal
        return drafts

    def _drafts(self, end: list[int], number: int) -> Proposal:
        if self._num_branches == 1:
            return Proposal(self._datastore.continuation(end, number))
        length = -(-number // self._num_branches)
        return merged(self._datastore.branches(end, self._num_branches, length), number)

    def close(self, slot: int, *, has_ended: bool) -> None:  # noqa: ARG002 - see Drafter
        """Forget the row in `slot`."""
        del self._ends[slot]
