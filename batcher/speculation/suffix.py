"""What has most often followed the end of a row, in the row itself and in outputs before it.

SuffixDecoding, Oliaro et al. 2024: a suffix tree of each row, and one of the outputs of rows that
have ended.  Of either the longest end of the row is found that was there before, and from there the
most frequent continuation is followed as long as it is likely enough; the better draft is proposed.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import nlargest

from batcher.errors import InvariantError
from batcher.speculation.branches import likeliest_branches
from batcher.speculation.proposal import Proposal, merged
from batcher.speculation.suffix_tree import Node, Place, SuffixTree, Text, count_of
from batcher.tokens import Tokens

WINDOW = 2**13  # tokens: of those before the last WINDOW a row may forget what followed
MAX_TOKENS = 2**16  # of the outputs that are kept; those that ended first go first
DEPTH = 24  # tokens that are counted together
LONGEST = 8  # of them, the end of a row that is looked for
LEAST = 0.1  # how likely all of a draft up to its last token has to be
_ROUNDING = 1e-9  # of scores, of which equal ones may come of different sums


class SuffixDrafter:
    """A Drafter that learns from the outputs of the run.

    num_branches: of the trees that it proposes, each branch with its share of the drafts; 1: they
    are lines.
    """

    def __init__(self, num_branches: int = 1) -> None:
        self._num_branches = num_branches
        self._rows: dict[int, _Row] = {}
        self._outputs = SuffixTree(DEPTH)
        self._kept: deque[Text] = deque()
        self._num_kept = 0

    def open(self, slot: int, tokens: Tokens) -> None:
        """Begin a row that has `tokens`; of a long one, its last WINDOW."""
        if slot in self._rows:
            raise InvariantError(f"slot {slot} has a row already")
        self._rows[slot] = _Row(tokens[-WINDOW:])

    def extend(self, given: Mapping[int, Sequence[int]]) -> None:
        """Let rows have been given tokens."""
        for slot, tokens in given.items():
            self._rows[slot].append(tokens)

    def propose(self, num_wanted: Mapping[int, int]) -> dict[int, Proposal]:
        """Return drafts of rows whose end was there before, as long as they are likely enough."""
        drafts = {}
        for slot, number in num_wanted.items():
            row, length = self._rows[slot], -(-number // self._num_branches)
            best, score, place = list[int](), 0.0, row.place
            for found in (row.place, self._outputs.find(row.tokens, LONGEST)):
                if found is not None:
                    line, line_score = follow(*found, length)
                    if line_score > score + _ROUNDING:
                        best, score, place = line, line_score, found
            if best:
                drafts[slot] = Proposal(best)
                if self._num_branches > 1 and place is not None:
                    drafts[slot] = merged(self._branches(*place, length), number)
        return drafts

    def _branches(self, place: Place, depth: int, length: int) -> list[list[int]]:
        """Return the likeliest that follows `place`, to which `depth` tokens lead, as branches."""

        def followers(place: Place) -> list[tuple[float, int, Place]]:
            if not isinstance(place, Node):
                tokens, begin = place
                return [(1.0, token, (tokens, begin + 1)) for token in tokens[begin : begin + 1]]
            children = place.children
            likeliest = nlargest(
                self._num_branches,
                reversed(children),  # the latest first
                key=lambda token: count_of(children[token]),
            )
            return [
                (count_of(children[token]) / place.num_continued, token, children[token])
                for token in likeliest
            ]

        length = min(length, DEPTH - depth)
        return likeliest_branches(place, self._num_branches, length, followers, LEAST)

    def close(self, slot: int, *, has_ended: bool) -> None:
        """Forget the row in `slot`; if it has ended, keep what it was given here for others.

        That is its output, but for what it had generated before a preemption.
        """
        row = self._rows.pop(slot)
        if has_ended and row.num_given:
            self._keep(row.tokens[-row.num_given :])

    def _keep(self, output: list[int]) -> None:
        text = Text()
        self._outputs.append(text, output)
        self._kept.append(text)
        self._num_kept += len(output)
        while self._num_kept > MAX_TOKENS:
            oldest = self._kept.popleft()
            self._outputs.remove(oldest)
            self._num_kept -= len(oldest.tokens)


class _Row:
    """The tokens of a row; num_given: how many of the last of them it was given here."""

    __slots__ = ("_text", "_tree", "num_given")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.num_given = 0
        self._begin(tokens)

    @property
    def tokens(self) -> list[int]:
        """Those that are known, at least the last WINDOW."""
        return self._text.tokens

    def append(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that follow."""
        self._tree.append(self._text, tokens)
        self.num_given += len(tokens)
        if len(self.tokens) >= 2 * WINDOW:
            self._begin(self.tokens[-WINDOW:])
            self.num_given = min(self.num_given, WINDOW)

    @property
    def place(self) -> tuple[Place, int] | None:
        """Where the longest end of the row leads that was in it before, and how long it is."""
        end = next((node for node in self._text.ends if node.depth <= LONGEST), None)
        return None if end is None else (end, end.depth)

    def _begin(self, tokens: Sequence[int]) -> None:
        self._tree, self._text = SuffixTree(DEPTH), Text()
        self._tree.append(self._text, tokens)


def follow(place: Place, depth: int, number: int) -> tuple[list[int], float]:
    """Return at most `number` tokens that follow `place`, and how many are likely to be right.

    Each is the one that has followed most often, of several the one that did last.
    depth: how many tokens lead to `place`.
    """
    draft: list[int] = []
    likely, score = 1.0, 0.0
    number = min(number, DEPTH - depth)
    while len(draft) < number:
        if not isinstance(place, Node):
            tokens, begin = place
            rest = tokens[begin : begin + number - len(draft)]
            return draft + rest, score + likely * len(rest)
        token = place.likeliest()
        if token is None:
            break
        child = place.children[token]
        likely *= count_of(child) / place.num_continued
        if likely < LEAST:
            break
        draft.append(token)
        score += likely
        place = child
    return draft, score
