"""What follows what in texts, and how often: every sequence of up to so many tokens is counted.

A suffix tree (Weiner 1973) without its links, as of SuffixDecoding (Oliaro et al. 2024), grown a
token at a time: a sequence has a node once it has occurred twice, and before that it is a leaf,
which is the place in its text where what followed stands.  So text that never repeats itself takes
a leaf for each token.
"""

from collections.abc import Sequence
from math import inf

Leaf = tuple[list[int], int]
"""What has occurred once: the tokens of its text, and the place of what followed."""


class Node:
    """What has occurred more than once, or did before texts were taken out.

    count: how often.  num_continued: how often a token followed, which the end of a text lacks.
    children: what follows, by its first token, in the order of when it last did.
    best: the child that has followed most often, of several the latest, and most: how often it has;
    None and more than any has if that is not known.
    """

    __slots__ = ("best", "children", "count", "depth", "most", "num_continued")

    def __init__(self, depth: int, count: int) -> None:
        self.depth, self.count, self.num_continued = depth, count, 0
        self.children: dict[int, Node | Leaf] = {}
        self.best: int | None = None
        self.most = 0.0

    def likeliest(self) -> int | None:
        """Return the token that has followed most often, of several the latest."""
        if self.best is None and self.children:
            latest_first = reversed(self.children)
            self.best = max(latest_first, key=lambda token: count_of(self.children[token]))
            self.most = count_of(self.children[self.best])
        return self.best


Place = Node | Leaf


def count_of(place: Place) -> int:
    """Return how often what leads to `place` has occurred."""
    return place.count if isinstance(place, Node) else 1


class Text:
    """A text in a tree.

    ends: the nodes of those ends of it that have occurred before, the longest first.
    """

    __slots__ = ("ends", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[Node] = []


class SuffixTree:
    """Counts sequences of up to `depth` tokens; of its texts only the latest may grow."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._root = Node(0, 0)

    def append(self, text: Text, tokens: Sequence[int]) -> None:
        """Let `text` grow by `tokens`; each costs as much as the text repeats before it."""
        known, max_depth = text.tokens, self._depth
        for token in tokens:
            known.append(token)
            leaf = known, len(known)
            ends = []
            for node in (*text.ends, self._root):
                children = node.children
                child = children.pop(token, None)
                node.num_continued += 1
                if child is None:
                    children[token], count = leaf, 1
                else:
                    if isinstance(child, Node):
                        child.count += 1
                    else:
                        child = self._split(child, node.depth + 1)
                    children[token], count = child, child.count
                    if child.depth < max_depth:
                        ends.append(child)
                if count >= node.most:
                    node.best, node.most = token, count
            text.ends = ends

    def _split(self, leaf: Leaf, depth: int) -> Node:
        """Return what a leaf becomes when it occurs again."""
        tokens, place = leaf
        node = Node(depth, 2)
        if place < len(tokens) and depth < self._depth:
            node.children[tokens[place]] = tokens, place + 1
            node.num_continued, node.best, node.most = 1, tokens[place], 1
        return node

    def remove(self, text: Text) -> None:
        """Take out a text, the one that was put in before all others."""
        tokens = text.tokens
        for begin in range(len(tokens)):
            node = self._root
            for token in tokens[begin : begin + self._depth]:
                child = node.children[token]
                node.num_continued -= 1
                if node.best == token:
                    node.best, node.most = None, inf
                if not isinstance(child, Node) or child.count == 1:
                    del node.children[token]
                    break
                child.count -= 1
                node = child

    def find(self, tokens: list[int], longest: int) -> tuple[Place, int] | None:
        """Return where the longest end of `tokens` leads that was followed, and how long it is.

        None if there is none, of at most `longest` tokens.
        """
        found, low, high = None, 1, min(longest, len(tokens))
        while low <= high:
            length = (low + high) // 2
            place = self._walk(tokens[-length:])
            if place is None:
                high = length - 1
            else:
                found, low = (place, length), length + 1
        return found

    def _walk(self, tokens: list[int]) -> Place | None:
        """Return where `tokens` lead, None if they have not occurred or nothing followed them."""
        node = self._root
        for number, token in enumerate(tokens, 1):
            child = node.children.get(token)
            if child is None:
                return None
            if not isinstance(child, Node):
                known, place = child
                end = place + len(tokens) - number
                is_there = end < len(known) and known[place:end] == tokens[number:]
                return (known, end) if is_there else None
            node = child
        return node if node.num_continued else None
