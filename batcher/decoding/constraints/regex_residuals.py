"""Which beginnings of a regex's matches go on alike, by Antimirov's partial derivatives.

What may follow a text is written as a set of expressions, one of which has to match the rest; equal
sets mean equal continuations (Antimirov, "Partial derivatives of regular expressions and finite
automaton constructions", 1996).  Counts are kept as numbers, so that no copies are made.
"""

from batcher.decoding.constraints.regexes import (
    Alternation,
    Anchor,
    Characters,
    DoubtfulError,
    Node,
    Nodes,
    Repeat,
    read_regex,
)

RegexResidual = frozenset[Nodes]

MAX_RESIDUAL = 64  # expressions; what needs more is not told
MAX_KEPT = 1 << 12  # of the steps from one to the next
_NUM_ASCII = 128


class RegexResiduals:
    """What may follow the beginnings of a regex's matches, as far as they are ASCII."""

    def __init__(self, start: Alternation) -> None:
        self.start: RegexResidual = frozenset({(start,)})
        self._known: dict[tuple[RegexResidual, int], RegexResidual | None] = {}

    def after(self, residual: RegexResidual, text: bytes) -> RegexResidual | None:
        """Return what may follow `text`, which `residual` allows; None if that is not told."""
        after: RegexResidual | None = residual
        for byte in text:
            if after is None:
                break
            step = after, byte
            if step not in self._known:
                if len(self._known) >= MAX_KEPT:
                    self._known.clear()
                self._known[step] = _after_all(after, byte)
            after = self._known[step]
        return after


def regex_residuals_of(regex: str) -> RegexResiduals | None:
    """Return those of a regex, None if its meaning is in doubt."""
    try:
        start = read_regex(regex)
    except DoubtfulError:
        return None
    return None if has_edge(start) else RegexResiduals(start)


def has_edge(node: Node) -> bool:
    """Return whether `node` speaks of where a text begins or ends."""
    match node:
        case Repeat(body):
            return has_edge(body)
        case Alternation(options):
            return any(has_edge(part) for nodes in options for part in nodes)
        case _:
            return isinstance(node, Anchor)


def _after_all(residual: RegexResidual, byte: int) -> RegexResidual | None:
    if byte >= _NUM_ASCII:  # dialects differ
        return None
    after = {nodes for before in residual for nodes in _after(before, byte)}
    return frozenset(after) if len(after) <= MAX_RESIDUAL else None


def _after(nodes: Nodes, byte: int) -> set[Nodes]:
    """Return what may follow `byte`, an ASCII character, where `nodes` were to match."""
    found: set[Nodes] = set()
    for place, node in enumerate(nodes):
        rest = nodes[place + 1 :]
        match node:
            case Characters(ranges):
                if any(start <= byte <= end for start, end in ranges):
                    found.add(rest)
            case Alternation(options):
                found |= {after + rest for option in options for after in _after(option, byte)}
            case Repeat(body, least, most) if most != 0:
                more = Repeat(body, max(0, least - 1), None if most is None else most - 1)
                found |= {(*after, more, *rest) for after in _after((body,), byte)}
        if not _can_be_empty(node):
            break
    return found


def _can_be_empty(node: Node) -> bool:
    match node:
        case Repeat(body, least, most):
            return least == 0 or most == 0 or _can_be_empty(body)
        case Alternation(options):
            return any(all(map(_can_be_empty, nodes)) for nodes in options)
        case _:
            return False
