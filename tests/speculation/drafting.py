"""A drafter of rows and one that is slow and obviously right, told the same in random order."""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batcher.speculation.drafter import Drafter
from batcher.speculation.proposal import Proposal

SLOTS = st.integers(0, 3)
TOKENS = st.lists(st.integers(0, 3), max_size=12)  # so few that everything comes again
SlowDraft = Callable[[list[int], int], list[int]]
"""From all tokens of a row and the number of drafts that are wanted to the drafts."""


class Drafting(RuleBasedStateMachine):
    """Rows come, are given tokens, are preempted and come back elsewhere, and end."""

    def __init__(self) -> None:
        super().__init__()
        self.drafter = self.make_drafter()
        self.rows: dict[int, list[int]] = {}
        self.preempted: list[list[int]] = []

    def make_drafter(self) -> Drafter:
        raise NotImplementedError

    def expected(self, slot: int, number: int) -> list[int]:
        """Return what is to be proposed for the row in `slot`."""
        raise NotImplementedError

    def opened(self, slot: int) -> None:
        """Take note that the row in `slot` has begun."""

    def ended(self, slot: int) -> None:
        """Take note that the row in `slot`, which is still there, has ended."""

    @rule(slot=SLOTS, tokens=TOKENS)
    def open(self, slot: int, tokens: list[int]) -> None:
        if slot in self.rows:
            return
        self.rows[slot] = tokens.copy()
        self.drafter.open(slot, tokens)
        self.opened(slot)

    @rule(given=st.dictionaries(SLOTS, TOKENS))
    def extend(self, given: dict[int, list[int]]) -> None:
        given = {slot: tokens for slot, tokens in given.items() if slot in self.rows}
        self.drafter.extend(given)
        for slot, tokens in given.items():
            self.rows[slot] += tokens

    @rule(slot=SLOTS)
    def preempt(self, slot: int) -> None:
        if slot in self.rows:
            self.preempted.append(self.rows.pop(slot))
            self.drafter.close(slot, has_ended=False)

    @precondition(lambda self: self.preempted)
    @rule(slot=SLOTS)
    def come_back(self, slot: int) -> None:
        if slot not in self.rows:
            self.open(slot, self.preempted.pop())

    @rule(slot=SLOTS)
    def end(self, slot: int) -> None:
        if slot in self.rows:
            self.ended(slot)
            del self.rows[slot]
            self.drafter.close(slot, has_ended=True)

    @invariant()
    def proposes_what_it_should(self) -> None:
        for number in (1, 2, 7):
            drafts = self.drafter.propose(dict.fromkeys(self.rows, number))
            assert drafts.keys() <= self.rows.keys()
            for slot in self.rows:
                draft = drafts.get(slot, Proposal([]))
                assert len(draft) <= number
                assert draft == Proposal(self.expected(slot, number))
