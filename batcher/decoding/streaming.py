"""Text while it is generated: as soon as it can no longer be taken back, and not before.

Kept back is what a pattern that has begun can still take away, and what has come of a character.
"""

from codecs import getincrementaldecoder
from typing import NamedTuple

from batcher.decoding.stops import Match, Pattern, StopAutomaton, StopProgress, StopReader
from batcher.errors import InvariantError
from batcher.models.base import Tokenizer

BAD_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class TextPiece(NamedTuple):
    """Text of one segment.

    state: that it was generated in, None if there are no named states.
    segment: its number, from 0, so that two of one state can be told apart.
    """

    state: str | None
    text: str
    segment: int


class TextStream:
    """The text of one output as pieces that are certain; joined, those of a segment are its text.

    An output without named states is one segment, and an empty one has no pieces.

    skip: how many of the first bytes belong to the prompt, and are no text.
    min_tokens: the number, from 1, of the first token that may end the output.
    keeps_stop: whether the text ends with the stop, not before it; not where there are states.
    """

    def __init__(
        self,
        automaton: StopAutomaton,
        tokenizer: Tokenizer,
        *,
        skip: int = 0,
        min_tokens: int = 0,
        keeps_stop: bool = False,
    ) -> None:
        self._names = automaton.names
        self._keeps = keeps_stop and not automaton.names
        self._ending = self._endless = StopReader(automaton, tokenizer.token_bytes)
        self._num_endless = max(0, min_tokens - 1)  # tokens to come that may not end it
        if self._num_endless:
            self._endless = StopReader(automaton.endless, tokenizer.token_bytes)
        self._progress: StopProgress | None = StopProgress(skip=skip)
        self._characters = _Characters()
        self._held = b""
        self._state = self._segment = 0

    def push(self, token_id: int) -> list[TextPiece]:
        """Return the text that is certain now that `token_id` was generated."""
        if self._progress is None:
            raise InvariantError("a token after the end of the automaton")
        reader = self._endless if self._num_endless else self._ending
        text = self._held + reader.bytes_of(token_id)[self._progress.skip :]
        num_before, begin = len(self._held), 0
        self._progress, matches = reader.read(self._progress, token_id)
        self._num_endless = max(0, self._num_endless - 1)
        told: list[TextPiece] = []
        for match in matches:
            end = num_before + match.end
            cut = end if self._keeps else end - match.size
            self._held = text[begin : max(begin, cut)]
            told += self.finish()
            self._state, self._segment, begin = match.exit.target, self._segment + 1, end
        if self._progress is None:
            return told
        num_certain = max(begin, len(text) - self._num_in_doubt(self._progress))
        self._held = text[num_certain:]
        told += self._piece(self._characters.push(text[begin:num_certain], self._held))
        return told

    def finish(self) -> list[TextPiece]:
        """Return the text that was kept back, when nothing more is generated."""
        text, self._held = self._held, b""
        return self._piece(self._characters.push(text, b"") + self._characters.finish())

    def _piece(self, text: str) -> list[TextPiece]:
        state = self._names[self._state] if self._names else None
        return [TextPiece(state, text, self._segment)] if text else []

    def _num_in_doubt(self, progress: StopProgress) -> int:
        if self._keeps or not (progress.id_node or progress.text_node):
            return 0
        ids, texts = self._ending.tries[progress.state]
        most = 0
        for pattern, num_there in ids.begun(progress.id_node):
            if sum(len(self._ending.bytes_of(i)) for i in pattern[:num_there]) <= most:
                break  # those that follow have even less to cut
            most = max(most, self._cut_by_ids(progress, pattern[num_there:]))
        for pattern, num_there in texts.begun(progress.text_node):
            if num_there <= most:
                break
            most = max(most, self._cut_by_text(progress, pattern[num_there:]))
        return most

    def _cut_by_ids(self, progress: StopProgress, ids: Pattern) -> int:
        position = 0
        for number, token_id in enumerate(ids):
            reader = self._endless if number < self._num_endless else self._ending
            then, matches = reader.read(progress, token_id)
            if matches:
                return self._cut(matches[0], position + matches[0].end)
            if then is None:
                raise InvariantError("the end of the automaton without a match")
            progress, position = then, position + len(reader.bytes_of(token_id))
        return 0

    def _cut_by_text(self, progress: StopProgress, text: Pattern) -> int:
        """Return how much is cut if what comes next is `text`, in whatever tokens.

        While the output may not end, all but the last byte come before it may: a vocabulary may
        have tokens without bytes, so there is time.
        """
        node = progress.text_node
        for position, byte in enumerate(text, 1):
            is_last = position == len(text)
            reader = self._endless if self._num_endless and not is_last else self._ending
            _, texts = reader.tries[progress.state]
            node = texts.step(node, byte)
            way = texts.best[node]
            if way is not None:
                return self._cut(Match(way.exit, position, way.size), position)
        return 0

    def _cut(self, match: Match, num_new: int) -> int:
        return max(0, match.size - num_new)


class _Characters:
    """Decodes UTF-8 that comes in parts, as all of it at once with errors="replace"."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._has_told_bad = False  # the decoder has yet to yield a bad character told already

    def push(self, certain: bytes, held: bytes) -> str:
        """Return the characters of `certain`, whether or not `held` follows it."""
        text = self._untold(self._decoder.decode(certain))
        begun, _ = self._decoder.getstate()
        if begun and held and not self._has_told_bad:
            going_on = getincrementaldecoder("utf-8")("replace").decode(begun + held)
            if going_on.startswith(BAD_CHARACTER):  # it is bad either way
                self._has_told_bad = True
                text += BAD_CHARACTER
        return text

    def finish(self) -> str:
        """Return what is left at the end; a new text may begin after it."""
        return self._untold(self._decoder.decode(b"", final=True))

    def _untold(self, text: str) -> str:
        if self._has_told_bad and text:
            self._has_told_bad = False
            return text[1:]
        return text
