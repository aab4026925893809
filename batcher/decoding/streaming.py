"""Text while it is generated: as soon as it can no longer be taken back, and not before.

Held back is what a pattern that has begun can still take away, and what has come of a character.
"""

from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import NamedTuple

from batcher.decoding.stops.automaton import END, Exit, Pattern, StopAutomaton, StopProgress
from batcher.decoding.stops.reader import Match, StopReader
from batcher.errors import InvariantError
from batcher.models.base import Tokenizer

BAD_CHARACTER = "\N{REPLACEMENT CHARACTER}"

Cuts = Callable[[Exit], bool]  # whether the pattern of an exit is cut out of what is told


class TextPiece(NamedTuple):
    """Text of one segment.

    segment: its number, from 0, so that two of one state can be told apart.
    """

    state: str
    text: str
    segment: int


class TextStream:
    """The text of one output, piece by piece; joined, the pieces are the text of its result.

    skip: how many of the first bytes belong to the prompt, and are no text.
    min_tokens: the number, from 1, of the first token that may end the output.
    keeps_stop: whether the text ends with the stop, not before it.
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
        outlook = _Outlook(
            automaton, tokenizer, lambda way: way.target == END, skip, min_tokens, keeps=keeps_stop
        )
        self._pieces = _Pieces(("",), outlook)

    def push(self, token_id: int) -> str:
        """Return the text that is certain now that `token_id` was generated."""
        return "".join(piece.text for piece in self._pieces.push(token_id))

    def finish(self) -> str:
        """Return the text that was kept back, when nothing more is generated."""
        return "".join(piece.text for piece in self._pieces.finish())


class SegmentStream:
    """The segments of one output, piece by piece; the parameters are those of TextStream.

    The pieces of a segment, joined, are its text; an empty one has none.
    """

    def __init__(
        self, automaton: StopAutomaton, tokenizer: Tokenizer, *, skip: int = 0, min_tokens: int = 0
    ) -> None:
        outlook = _Outlook(automaton, tokenizer, lambda _: True, skip, min_tokens)
        self._pieces = _Pieces(automaton.names, outlook)

    def push(self, token_id: int) -> list[TextPiece]:
        """Return the text that is certain now that `token_id` was generated."""
        return self._pieces.push(token_id)

    def finish(self) -> list[TextPiece]:
        """Return the text that was kept back, when nothing more is generated."""
        return self._pieces.finish()


class _Outlook:
    """Reads the tokens of one output, and knows what may yet be cut out of its text.

    keeps: the pattern of an exit that `cuts` names is not cut out itself, only what is behind it.
    """

    def __init__(
        self,
        automaton: StopAutomaton,
        tokenizer: Tokenizer,
        cuts: Cuts,
        skip: int,
        min_tokens: int,
        *,
        keeps: bool = False,
    ) -> None:
        self._cuts, self._keeps = cuts, keeps
        self._ending = StopReader(automaton, tokenizer.token_bytes)
        self._endless = self._ending
        self._num_endless = max(0, min_tokens - 1)  # tokens to come that may not end it
        if self._num_endless:
            self._endless = StopReader(automaton.endless, tokenizer.token_bytes)
        self._progress: StopProgress | None = StopProgress(skip=skip)

    @property
    def has_ended(self) -> bool:
        """Whether the automaton has come to its end."""
        return self._progress is None

    def read(self, token_id: int) -> tuple[bytes, list[Match]]:
        """Return the text of the next token, and those of its matches that are cut out."""
        if self._progress is None:
            raise InvariantError("a token after the end of the automaton")
        reader = self._endless if self._num_endless else self._ending
        token = reader.bytes_of(token_id)[self._progress.skip :]
        self._progress, matches = reader.read(self._progress, token_id)
        self._num_endless = max(0, self._num_endless - 1)
        cut = [match for match in matches if self._cuts(match.exit)]
        return token, [match._replace(size=0) for match in cut] if self._keeps else cut

    @property
    def num_in_doubt(self) -> int:
        """How many of the last bytes of the text a pattern that has begun can still cut out."""
        progress = self._progress
        if self._keeps or progress is None or not (progress.id_node or progress.text_node):
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
        """Return how much is cut if the tokens that come next are `ids`."""
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
        return max(0, match.size - num_new) if self._cuts(match.exit) else 0


class _Pieces:
    """The text of an output, cut where its outlook says, as pieces that are certain."""

    def __init__(self, names: tuple[str, ...], outlook: _Outlook) -> None:
        self._names = names
        self._outlook = outlook
        self._characters = _Characters()
        self._held = b""
        self._state = self._segment = 0

    def push(self, token_id: int) -> list[TextPiece]:
        token, cuts = self._outlook.read(token_id)
        text, num_before, begin = self._held + token, len(self._held), 0
        told: list[TextPiece] = []
        for match in cuts:
            end = num_before + match.end
            self._held = text[begin : max(begin, end - match.size)]
            told += self.finish()
            self._state, self._segment, begin = match.exit.target, self._segment + 1, end
        if self._outlook.has_ended:
            return told
        num_certain = max(begin, len(text) - self._outlook.num_in_doubt)
        self._held = text[num_certain:]
        told += self._piece(self._characters.push(text[begin:num_certain], self._held))
        return told

    def finish(self) -> list[TextPiece]:
        text, self._held = self._held, b""
        return self._piece(self._characters.push(text, b"") + self._characters.finish())

    def _piece(self, text: str) -> list[TextPiece]:
        return [TextPiece(self._names[self._state], text, self._segment)] if text else []


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
        """Return `text` without the bad character that was told before all of it had come."""
        if self._has_told_bad and text:
            self._has_told_bad = False
            return text[1:]
        return text
