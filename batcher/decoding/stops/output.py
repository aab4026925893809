"""What a sequence that has ended is told of its output, exactly, from its tokens.

This is the definition.  The engine only learns from a table (matcher.py) that a row has come
to the end of its automaton, and asks here, once per sequence, how.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

from batcher.decoding.stops import StopReader
from batcher.decoding.stops.automaton import END, Exit, StopAutomaton, StopProgress, precedence
from batcher.errors import InvariantError
from batcher.models.base import Tokenizer, bytes_of, join_bytes
from batcher.result import StopReason


class StateText(NamedTuple):
    """The text of one segment, which a state has generated, without the pattern that ended it.

    tokens: those with a byte in `text`, and those without bytes that stand before its end.
    """

    state: str
    text: bytes
    tokens: list[int]


class Output(Struct, frozen=True, gc=False):
    """The text before the stop, what stopped it, and, if there are named states, text by state.

    segments: in order, those that are empty left out; if all are, the one in which it ended.
    """

    text: bytes
    stop_reason: StopReason = None
    segments: list[StateText] | None = None


class _SegmentSpan(NamedTuple):
    """Where in the output a segment is: a part that one state has generated.

    begin, end: its bytes.  first, last: its tokens are in range(first, last).
    way: how it ended; None for the segment that an output breaks off in.
    """

    state: int
    begin: int
    end: int
    first: int
    last: int
    way: Exit | None


def read_output(
    automaton: StopAutomaton,
    tokens: list[int],
    tokenizer: Tokenizer,
    *,
    has_stopped: bool,
    skip: int = 0,
    keeps_stop: bool = False,
) -> Output:
    """Return what `tokens` are an output of.

    has_stopped: whether the last token brought the automaton to its end, if it could; a stop that
    was completed before that token, or in spite of it, is text.
    skip: how many of the first bytes belong to the prompt; so do tokens with no byte after them.
    keeps_stop: whether the text ends with the stop, not before it; not where there are states.
    """
    text = join_bytes(tokens, tokenizer.token_bytes)
    if skip:
        text = text[skip:]
        tokens, skip = _without_the_prompts(tokens, tokenizer, skip)
    has_stopped = has_stopped and bool(tokens)
    if automaton.names:
        return _with_segments(automaton, tokens, text, tokenizer, skip, has_stopped=has_stopped)
    if not has_stopped:
        return Output(text)
    begin, end, stop_reason = _final_stop(automaton, tokens, text, tokenizer)
    return Output(text[: end if keeps_stop else begin], stop_reason)


def _without_the_prompts(
    tokens: list[int], tokenizer: Tokenizer, skip: int
) -> tuple[list[int], int]:
    """Return the tokens that have a byte after the first `skip`, and what the first one skips."""
    for number, token_id in enumerate(tokens):
        size = len(join_bytes([token_id], tokenizer.token_bytes))
        if size > skip or not skip:
            return tokens[number:], skip
        skip -= size
    return [], skip


def _final_stop(
    automaton: StopAutomaton, tokens: list[int], text: bytes, tokenizer: Tokenizer
) -> tuple[int, int, StopReason]:
    """Return where in the text the stop is that the last of `tokens` completes, and what it is.

    Where none is completed, which a table cannot tell of, it is at the end.  Only for an automaton
    with one state: there, nothing but the last token has to be looked at.
    """
    token_bytes, num_text, last = tokenizer.token_bytes, len(text), tokens[-1]
    by_last_id, texts = _ways_to_end(automaton)
    found: list[_Completion] = []
    for ids, place, way in by_last_id.get(last, ()):
        if tokens[-len(ids) :] == ids:
            size = len(join_bytes(ids, token_bytes))
            begin = max(0, num_text - size)  # ids may reach back over bytes of the prompt
            found.append(_Completion(num_text, size, place, begin, way))
    num_before = num_text - len(bytes_of(last, token_bytes)) if texts else num_text
    for pattern, place, way in texts:
        size = len(pattern)
        begin = text.find(pattern, max(0, num_before + 1 - size))
        if begin >= 0:
            found.append(_Completion(begin + size, size, place, begin, way))
    if not found:
        return num_text, num_text, None
    final = found[0] if len(found) == 1 else min(found, key=_Completion.rank)
    return final.begin, final.end, final.exit.stop_reason


class _WaysToEnd(NamedTuple):
    """The exits of an automaton of one state that end generation, each with its pattern and place.

    by_last_id: those of ids, by the last of them.
    """

    by_last_id: dict[int, list[tuple[list[int], int, Exit]]]
    texts: list[tuple[bytes, int, Exit]]


@lru_cache(1024)
def _ways_to_end(automaton: StopAutomaton) -> _WaysToEnd:
    ways = _WaysToEnd({}, [])
    for place, way in enumerate(automaton.exits[0]):
        if way.target != END:
            continue
        if isinstance(way.pattern, bytes):
            ways.texts.append((way.pattern, place, way))
        else:
            same = ways.by_last_id.setdefault(way.pattern[-1], [])
            same.append(([*way.pattern], place, way))
    return ways


class _Completion(NamedTuple):
    """A pattern of `size` bytes, from `begin` to `end`, of the exit that stands at `place`."""

    end: int
    size: int
    place: int
    begin: int
    exit: Exit

    def rank(self) -> tuple[int, tuple[int, int, int]]:
        """Return what sorts completions by one token, the one that counts first."""
        return self.end, precedence(self.exit, self.size, self.place)


def _read_segments(
    tokens: list[int], readers: Sequence[StopReader], skip: int
) -> tuple[list[_SegmentSpan], list[tuple[int, int]]]:
    """Return the segments that `tokens` lead through, and where each token's text is.

    readers: what reads each token.
    """
    ended: list[_SegmentSpan] = []
    spans: list[tuple[int, int]] = []
    state = begin = first = position = 0
    progress: StopProgress | None = StopProgress(skip=skip)
    for number, (token_id, reader) in enumerate(zip(tokens, readers, strict=True)):
        if progress is None:
            raise InvariantError("tokens after the end of the automaton")
        size = len(reader.bytes_of(token_id)[progress.skip :])
        spans.append((position, position + size))
        progress, matches = reader.read(progress, token_id)
        for way, num_read, num_cut in matches:
            end = position + num_read
            num_ids = 0 if isinstance(way.pattern, bytes) else len(way.pattern)
            cut = max(begin, end - num_cut)  # ids may reach back over bytes of the prompt
            ended.append(_SegmentSpan(state, begin, cut, first, number + 1 - num_ids, way))
            state, begin, first = way.target, end, number + (num_ids > 0)
        position += size
    if progress is not None:
        ended.append(_SegmentSpan(state, begin, position, first, len(tokens), None))
    return ended, spans


def _with_segments(
    automaton: StopAutomaton,
    tokens: list[int],
    text: bytes,
    tokenizer: Tokenizer,
    skip: int,
    *,
    has_stopped: bool,
) -> Output:
    """Return the output of an automaton with named states."""
    readers = [StopReader(automaton.endless, tokenizer.token_bytes)] * len(tokens)
    if has_stopped:
        readers[-1] = StopReader(automaton, tokenizer.token_bytes)
    spans, token_spans = _read_segments(tokens, readers, skip)
    segments = [
        StateText(
            automaton.names[span.state],
            text[span.begin : span.end],
            [tokens[n] for n in range(span.first, span.last) if _is_in(span, *token_spans[n])],
        )
        for span in spans
    ]
    kept = [segment for segment in segments if segment.text or segment.tokens] or segments[-1:]
    last = spans[-1]
    if last.way is None:
        return Output(text, None, kept)
    return Output(text[: last.end], last.way.stop_reason, kept)


def _is_in(span: _SegmentSpan, begin: int, end: int) -> bool:
    """Return whether a token with these bytes belongs to a segment during which it was read."""
    if begin == end:
        return begin <= span.end
    return max(begin, span.begin) < min(end, span.end)
