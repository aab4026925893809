"""What one sample has to tell while it is generated: its tokens, and the text that is certain."""

from batcher.decoding.streaming import SegmentStream, TextPiece, TextStream
from batcher.events import TokenEvent
from batcher.models.base import Tokenizer
from batcher.sequence import Sequence

_Piece = tuple[str, str | None]  # text, and the state it was generated in, if it has a name


class RowStream:
    """Turns the tokens of a sample into events; one for each state, if it names states."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self._id, self._index = sequence.id, sequence.index
        machine, skip = sequence.machine, len(sequence.healing)
        min_tokens = sequence.request.min_tokens
        self._stream: TextStream | SegmentStream
        if machine.names:
            self._stream = SegmentStream(machine, tokenizer, skip=skip, min_tokens=min_tokens)
        else:
            self._stream = TextStream(
                machine,
                tokenizer,
                skip=skip,
                min_tokens=min_tokens,
                keeps_stop=sequence.request.include_stop_str_in_output,
            )

    def push(self, tokens: list[int], step: int) -> list[TokenEvent]:
        """Return the events of the `tokens` a step has given; the first one tells all of them."""
        return self._told(tokens, tokens, step)

    def end(self, tokens: list[int], step: int) -> list[TokenEvent]:
        """Return the events of tokens of which the last is EOS, though no stop acts there yet."""
        return self._told(tokens, tokens[:-1], step)

    def _told(self, tokens: list[int], with_text: list[int], step: int) -> list[TokenEvent]:
        pieces = [piece for token in with_text for piece in self._pieces(self._stream.push(token))]
        return self._events(tokens, _joined(pieces) or [("", None)], step)

    def finish(self, step: int) -> list[TokenEvent]:
        """Return the events of what was held back until nothing more came."""
        return self._events([], self._pieces(self._stream.finish()), step)

    def _pieces(self, told: str | list[TextPiece]) -> list[_Piece]:
        if isinstance(told, str):
            return [(told, None)] if told else []
        return [(piece.text, piece.state) for piece in told]

    def _events(self, tokens: list[int], pieces: list[_Piece], step: int) -> list[TokenEvent]:
        return [
            TokenEvent(step, self._id, self._index, [] if number else tokens, text, state)
            for number, (text, state) in enumerate(pieces)
        ]


def _joined(pieces: list[_Piece]) -> list[_Piece]:
    """Return the pieces with those that follow each other in one state made one."""
    joined: list[_Piece] = []
    for text, state in pieces:
        if joined and joined[-1][1] == state:
            joined[-1] = (joined[-1][0] + text, state)
        else:
            joined.append((text, state))
    return joined
