"""Reading tokens through a state machine, one at a time: the exact rule that the table repeats.

Text is matched byte by byte inside the token, so one token may lead through several states; ids
match at a token's end.  After a match nothing before it counts, and ids count from the next token.
"""

from collections.abc import Sequence
from typing import NamedTuple

from batcher.decoding.machine import END, Exit, Progress, StateMachine, precedence
from batcher.decoding.trie import RankedExit, Trie
from batcher.models.base import bytes_of, join_bytes


class Match(NamedTuple):
    """An exit whose pattern was completed by a token, so that its state was left.

    end: how many bytes of the token were read until then, those of the prompt not counted.
    """

    exit: Exit
    end: int
    size: int


class Reading(NamedTuple):
    """What a token led to: through `matches`, in order, to `progress`, None at the end."""

    progress: Progress | None
    matches: list[Match]


class MachineReader:
    """A machine made ready to read tokens.

    tries: of each state, (ids, text).
    """

    def __init__(self, machine: StateMachine, token_bytes: Sequence[bytes]) -> None:
        self.machine = machine
        self._token_bytes = token_bytes
        self.tries = [self._tries(exits) for exits in machine.exits]

    def _tries(self, exits: tuple[Exit, ...]) -> tuple[Trie, Trie]:
        ids: list[RankedExit] = []
        texts: list[RankedExit] = []
        for place, way in enumerate(exits):
            if isinstance(way.pattern, bytes):
                size = len(way.pattern)
                texts.append(RankedExit(precedence(way, size, place), way, size))
            else:
                size = len(join_bytes(way.pattern, self._token_bytes))
                ids.append(RankedExit(precedence(way, size, place), way, size))
        return Trie(ids), Trie(texts)

    def bytes_of(self, token_id: int) -> bytes:
        """Return what a token shows as."""
        return bytes_of(token_id, self._token_bytes)

    def read(self, progress: Progress, token_id: int) -> Reading:
        """Return what `token_id` leads to from `progress`."""
        state, id_node, text_node, skip = progress
        token = self.bytes_of(token_id)
        if skip:
            if len(token) <= skip:  # it is the prompt's
                return Reading(progress._replace(skip=skip - len(token)), [])
            token, skip = token[skip:], 0
        ids, texts = self.tries[state]
        id_node = ids.step(id_node, token_id)
        by_ids = ids.best[id_node]
        matches: list[Match] = []
        for end, byte in enumerate(token, 1):
            text_node = texts.step(text_node, byte)
            by_text = texts.best[text_node]
            if by_text is None or (by_ids is not None and end == len(token) and by_ids < by_text):
                continue
            matches.append(Match(by_text.exit, end, by_text.size))
            state = by_text.exit.target
            if state == END:
                return Reading(None, matches)
            (ids, texts), id_node, text_node, by_ids = self.tries[state], 0, 0, None
        if by_ids is not None:
            matches.append(Match(by_ids.exit, len(token), by_ids.size))
            if by_ids.exit.target == END:
                return Reading(None, matches)
            return Reading(Progress(by_ids.exit.target), matches)
        return Reading(Progress(state, ids.settled[id_node], texts.settled[text_node]), matches)
