"""Stops and states of running rows, matched in one table: an add, a gather and a compare per step.

The state of a row is one number: where the line of its StopProgress begins in the flattened table.
A StopReader fills lines and entries when a row first needs them; rows with equal automata share
them. So no product of states is laid out, as in the lazy automata of Cox, "Regular Expression
Matching in the Wild" (2010).

The table only shows that a row has ended. `read_output` finds the reason once, from the tokens.
"""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from batcher.decoding.stops import (
    END,
    NO_ID,
    Exit,
    StopAutomaton,
    StopProgress,
    StopReader,
    precedence,
)
from batcher.errors import InvariantError
from batcher.models.base import REPLACEMENT, IntArray, Tokenizer, bytes_of, join_bytes
from batcher.result import StopReason

FREE_LINE = 0  # of rows without stops: every token leads back to it
FIRST_LINE = 1
ENDED = -1  # the entry of a token that ends generation
UNKNOWN = -2  # the entry of a token that no row has read there yet, or that is always read
MAX_BEYOND = 2**16  # ids beyond the tokenizer's with columns of their own
MAX_ENTRIES = 1 << 22  # of 8 bytes; memory is used as lines are made
START = StopProgress()


class AutomatonPlace(NamedTuple):
    """An automaton, and the progress of a row in it."""

    automaton: StopAutomaton
    progress: StopProgress


class StopMatcher:
    """Finds the rows that have just reached the end of their automaton.

    Every id has its own column, unless the model takes any id, or many more than the tokenizer
    knows. Then ids beyond the tokenizer's share the last column, which is read token by token for
    automata with such ids.

    vocab_size: None for a model that takes any id.

    The ModelRunner opens and closes plain rows itself, by these:
    starts: automaton -> the initial state of its rows, if it has a line.
    states: [num_slots] of every row; FREE_LINE without stops.
    watched: the slots of rows that have not ended, or are not closed yet.
    """

    def __init__(self, num_slots: int, vocab_size: int | None, tokenizer: Tokenizer) -> None:
        self.starts: dict[StopAutomaton, int] = {}
        self.states: IntArray = np.zeros(num_slots, np.int64)
        self.watched: set[int] = set()
        self._token_bytes = tokenizer.token_bytes
        num_known = len(self._token_bytes[:vocab_size])
        self._shared: int | None = None  # the column of all other ids
        if vocab_size is None or vocab_size - num_known > MAX_BEYOND:
            self._shared = num_known
            self._width = num_known + 1
        else:
            self._width = vocab_size
        self._index = np.zeros(num_slots, np.int64)
        self._zeros = np.zeros(num_slots, np.int64)  # numpy is slower with a scalar
        # 1 where a row needs a look; faster to search than an array
        self._flags = bytearray(num_slots)
        self._is_special = np.frombuffer(self._flags, np.bool_)
        self._reader_of = cache(partial(StopReader, token_bytes=self._token_bytes))
        self._lines: dict[AutomatonPlace, int] = {}
        self._places: list[AutomatonPlace] = []  # of each line
        # twice as many lines as all rows can need at once
        num_lines = max(FIRST_LINE + 4 * num_slots, MAX_ENTRIES // self._width)
        self._table: IntArray = np.empty((num_lines, self._width), np.int64)
        self._table[FREE_LINE] = FREE_LINE
        self._flat = self._table.reshape(-1)

    # -- rows ------------------------------------------------------------------------------------

    def open(self, slot: int, automaton: StopAutomaton, progress: StopProgress = START) -> None:
        """Begin a row in `slot` at `progress` in `automaton`; an earlier row is forgotten."""
        if not any(automaton.exits):
            return
        if self._is_full:
            self._clear()
        state = self._state_of(AutomatonPlace(automaton, progress))
        self.watched.add(slot)
        self.states[slot] = state
        if progress == START:
            self.starts[automaton] = state

    def close(self, slot: int) -> None:
        self.watched.discard(slot)
        self.states[slot] = FREE_LINE

    def suspend(self, slot: int) -> AutomatonPlace | None:
        """Forget the row in `slot`; return its place, None if it has no stops."""
        is_standing = slot in self.watched and self.states.item(slot) != FREE_LINE
        place = self._place_of(slot) if is_standing else None
        self.close(slot)
        return place

    def resume(self, slot: int, place: AutomatonPlace | None) -> None:
        if place is not None:
            self.open(slot, *place)

    def fork(self, source: int, target: int) -> None:
        if source in self.watched:
            self.watched.add(target)
            self.states[target] = self.states[source]
        else:
            self.close(target)

    def switch(self, slot: int, automaton: StopAutomaton) -> None:
        """Continue the row in `slot` in `automaton`, the endless one of its own or the reverse."""
        if slot in self.watched:
            self.open(slot, automaton, self._place_of(slot).progress)

    # -- tokens ----------------------------------------------------------------------------------

    def advance(self, tokens: IntArray) -> list[int]:
        """Let every row read its token, tokens: [num_slots]; return the slots that have ended."""
        if not self.watched:
            return []
        columns = tokens if self._shared is None else np.minimum(tokens, self._shared)
        states, index, flags = self.states, self._index, self._flags
        np.add(states, columns, index)
        self._flat.take(index, None, states, "clip")
        np.less(states, self._zeros, self._is_special)
        slot = flags.find(1)
        if slot < 0:
            return []
        ended, unknown = [], []
        while slot >= 0:  # one by one: there are few
            if states.item(slot) == ENDED and slot in self.watched:
                states[slot] = FREE_LINE
                ended.append(slot)
            else:
                entry = index.item(slot)
                states[slot] = entry - entry % self._width
                unknown.append(slot)
            slot = flags.find(1, slot + 1)
        if unknown:
            ended += self.advance_some(unknown, tokens)
            ended.sort()
        return ended

    def advance_some(self, slots: Iterable[int], tokens: IntArray) -> list[int]:
        """Let the rows in `slots` read their tokens [num_slots]; return those that have ended."""
        ended = []
        for slot in slots:
            state = self._state_after(slot, tokens.item(slot))
            self.states[slot] = FREE_LINE if state == ENDED else state
            if state == ENDED:
                ended.append(slot)
        return ended

    def advance_row(self, slot: int, token_ids: Sequence[int]) -> int:
        """Let one row read tokens up to one that would end it; return how many it has read."""
        for number, token_id in enumerate(token_ids):
            state = self._state_after(slot, token_id)
            if state == ENDED:
                return number
            self.states[slot] = state
        return len(token_ids)

    def would_end(self, slot: int, token_id: int) -> bool:
        return self._state_after(slot, token_id) == ENDED

    def _state_after(self, slot: int, token_id: int) -> int:
        if slot not in self.watched:
            return FREE_LINE
        state = self.states.item(slot)
        column = token_id if self._shared is None else min(token_id, self._shared)
        after = self._flat.item(state + column)
        if after != UNKNOWN:
            return after
        if self._is_full:
            self._clear()
            state = self.states.item(slot)
        automaton, progress = self._place_of(slot)
        then = self._reader_of(automaton).read(progress, token_id).progress
        after = ENDED if then is None else self._state_of(AutomatonPlace(automaton, then))
        if column != self._shared or not self._is_always_read(automaton):
            self._flat[state + column] = after
        return after

    # -- lines -----------------------------------------------------------------------------------

    def _place_of(self, slot: int) -> AutomatonPlace:
        return self._places[self.states.item(slot) // self._width - FIRST_LINE]

    @property
    def _is_full(self) -> bool:
        return FIRST_LINE + len(self._places) + 2 > len(self._table)

    def _clear(self) -> None:
        slots = [slot for slot in sorted(self.watched) if self.states.item(slot) != FREE_LINE]
        places = [self._place_of(slot) for slot in slots]
        for kept in (self._lines, self.starts, self._places):
            kept.clear()
        self._reader_of.cache_clear()
        for slot, place in zip(slots, places, strict=True):
            self.states[slot] = self._state_of(place)

    def _state_of(self, place: AutomatonPlace) -> int:
        """Return the state of a row at `place`, whose line is made if needed.

        At the root of an automaton's state most tokens lead back to it.
        """
        line = self._lines.get(place)
        if line is not None:
            return line * self._width
        automaton, progress = place
        line = self._lines[place] = FIRST_LINE + len(self._places)
        self._places.append(place)
        is_root = progress == StopProgress(progress.state)
        self._table[line] = line * self._width if is_root else UNKNOWN
        if is_root:
            if self._shared is not None and self._is_always_read(automaton):
                self._table[line, self._shared] = UNKNOWN
            for way in automaton.exits[progress.state]:
                if isinstance(way.pattern, bytes):
                    self._table[line, self._having[way.pattern[0]]] = UNKNOWN
                else:
                    self._table[line, min(way.pattern[0], self._width - 1)] = UNKNOWN
        return line * self._width

    def _is_always_read(self, automaton: StopAutomaton) -> bool:
        return any(
            self._shared is not None and max(way.pattern) >= self._shared
            for exits in automaton.exits
            for way in exits
            if isinstance(way.pattern, tuple)
        )

    @cached_property
    def _having(self) -> list[IntArray]:
        """For each byte, the columns of tokens that have it."""
        known = self._token_bytes[: self._width if self._shared is None else self._shared]
        texts = [*known, *[REPLACEMENT] * (self._width - len(known))]
        joined = np.frombuffer(b"".join(texts), np.uint8)
        owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        ends = np.bincount(joined, minlength=256).cumsum()
        return np.split(owners[joined.argsort(kind="stable")], ends[:-1])


# -- outputs ---------------------------------------------------------------------------------------


class StateText(NamedTuple):
    """The text that one state has generated, without the pattern that ended it.

    tokens: those with a byte in `text`, and those without bytes before its end.
    """

    state: str
    text: bytes
    tokens: list[int]


class Output(Struct, frozen=True, gc=False):
    """The text before the stop, the stop, and the text by named state.

    segments: in order, without empty ones; if all are empty, the last one.
    """

    text: bytes
    stop_reason: StopReason = None
    segments: list[StateText] | None = None


def read_output(
    automaton: StopAutomaton,
    tokens: list[int],
    tokenizer: Tokenizer,
    *,
    has_stopped: bool,
    skip: int = 0,
    keeps_stop: bool = False,
) -> Output:
    """Return the output of `tokens`.

    has_stopped: whether the last token brought the automaton to its end; an earlier or overridden
    stop is text.
    skip: how many of the first bytes belong to the prompt, with tokens that have no byte after
    them.
    keeps_stop: whether the text includes the stop; ignored if there are states.
    """
    text = join_bytes(tokens, tokenizer.token_bytes)
    if skip:
        text = text[skip:]
        while tokens and skip:  # skip tokens without a byte after the prompt
            size = len(bytes_of(tokens[0], tokenizer.token_bytes))
            if size > skip:
                break
            tokens, skip = tokens[1:], skip - size
    has_stopped = has_stopped and bool(tokens)
    if automaton.names:
        return _with_segments(automaton, tokens, text, tokenizer, skip, has_stopped=has_stopped)
    if not has_stopped:
        return Output(text)
    begin, end, stop_reason = _final_stop(automaton, tokens, text, tokenizer)
    return Output(text[: end if keeps_stop else begin], stop_reason)


def _final_stop(
    automaton: StopAutomaton, tokens: list[int], text: bytes, tokenizer: Tokenizer
) -> tuple[int, int, StopReason]:
    """Return begin and end in the text of the stop that the last token completes, and its reason.

    Without one both are the end of the text. Only for an automaton with one state: there only the
    last token matters.
    """
    token_bytes, num_text, last = tokenizer.token_bytes, len(text), tokens[-1]
    num_before = num_text - len(bytes_of(last, token_bytes))
    found: list[tuple[int, tuple[int, int, int], int, Exit]] = []  # end, precedence, begin, exit
    for place, way in enumerate(automaton.exits[0]):
        pattern = way.pattern
        if way.target != END:
            continue
        if isinstance(pattern, bytes):
            size = len(pattern)
            begin = text.find(pattern, max(0, num_before + 1 - size))
            if begin >= 0:
                found.append((begin + size, precedence(way, size, place), begin, way))
        elif pattern[-1] == last and tuple(tokens[-len(pattern) :]) == pattern:
            size = len(join_bytes(pattern, token_bytes))
            begin = max(0, num_text - size)  # ids may reach back over bytes of the prompt
            found.append((num_text, precedence(way, size, place), begin, way))
    if not found:
        return num_text, num_text, None
    end, _, begin, way = min(found, key=itemgetter(0, 1))
    return begin, end, way.stop_reason


def _with_segments(
    automaton: StopAutomaton,
    tokens: list[int],
    text: bytes,
    tokenizer: Tokenizer,
    skip: int,
    *,
    has_stopped: bool,
) -> Output:
    reader = StopReader(automaton.endless, tokenizer.token_bytes)
    segments: list[StateText] = []
    places: list[tuple[int, int]] = []  # of the bytes of each token
    state = begin = first = position = 0

    def leave(end: int, last: int) -> None:
        own = [
            tokens[number]
            for number, (start, stop) in enumerate(places[first:last], first)
            if (max(start, begin) < min(stop, end) if start < stop else start <= end)
        ]
        segments.append(StateText(automaton.names[state], text[begin:end], own))

    stop_reason: StopReason = None
    progress: StopProgress | None = StopProgress(skip=skip)
    for number, token_id in enumerate(tokens):
        if progress is None:
            raise InvariantError("tokens after the end of the automaton")
        if has_stopped and number == len(tokens) - 1:
            reader = StopReader(automaton, tokenizer.token_bytes)
        start = position
        position += len(reader.bytes_of(token_id)[progress.skip :])
        places.append((start, position))
        progress, matches = reader.read(progress, token_id)
        for way, num_read, num_cut in matches:
            num_ids = 0 if isinstance(way.pattern, bytes) else len(way.pattern)
            end = start + num_read
            cut = max(begin, end - num_cut)  # ids may reach back over bytes of the prompt
            leave(cut, number + 1 - num_ids)
            if way.target == END:
                text, stop_reason = text[:cut], way.stop_reason
            state, begin, first = way.target, end, number + (num_ids > 0)
    if progress is not None:
        leave(position, len(tokens))
    kept = [segment for segment in segments if segment.text or segment.tokens]
    return Output(text, stop_reason, kept or segments[-1:])


# -- text while it is generated --------------------------------------------------------------------
#
# Text is sent as soon as it is final.  Held back is text that a pattern in progress may still cut,
# and an incomplete character.

BAD_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class TextPiece(NamedTuple):
    """Text of one segment.

    state: its named state, or None.
    segment: its number, from 0.
    """

    state: str | None
    text: str
    segment: int


class TextStream:
    """The text of one output as pieces that are final; joined, those of a segment are its text.

    An output without named states is one segment. An empty segment has no pieces.

    skip: how many of the first bytes belong to the prompt.
    min_tokens: the number, from 1, of the first token that may end the output.
    keeps_stop: whether the text includes the stop; ignored if there are states.
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
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._has_told_bad = False  # the decoder will yield a bad character that was sent already
        self._held = b""
        self._state = self._segment = 0

    def push(self, token_id: int) -> list[TextPiece]:
        """Return the text that is final after `token_id`."""
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
        return told + self._piece(text[begin:num_certain], is_final=False)

    def finish(self) -> list[TextPiece]:
        """Return the held-back text when the output ends."""
        text, self._held = self._held, b""
        return self._piece(text, is_final=True)

    def _piece(self, certain: bytes, *, is_final: bool) -> list[TextPiece]:
        """Return `certain` decoded as a part of all text; is_final: whether a new text follows."""
        text = self._decoder.decode(certain, is_final)
        if self._has_told_bad and text:
            self._has_told_bad, text = False, text[1:]
        begun, _ = self._decoder.getstate()
        if begun and self._held and not self._has_told_bad:
            going_on = getincrementaldecoder("utf-8")("replace").decode(begun + self._held)
            if going_on.startswith(BAD_CHARACTER):  # bad with or without the held text
                self._has_told_bad = True
                text += BAD_CHARACTER
        state = self._names[self._state] if self._names else None
        return [TextPiece(state, text, self._segment)] if text else []

    def _num_in_doubt(self, progress: StopProgress) -> int:
        if self._keeps or not (progress.id_node or progress.text_node):
            return 0
        ids, texts = self._ending.tries[progress.state]
        ending, first, most = self._ending, self._endless, 0  # `first` reads what may not end it
        for pattern, num_there in ids.begun(progress.id_node):
            tokens = [(int(token_id), ending.bytes_of(token_id)) for token_id in pattern]
            if sum(len(text) for _, text in tokens[:num_there]) <= most:
                break  # the following ones cut less
            readers = [first] * min(self._num_endless, len(pattern)) + [ending] * len(pattern)
            most = max(most, _num_cut(progress, tokens[num_there:], readers))
        for pattern, num_there in texts.begun(progress.text_node):
            if num_there <= most:
                break
            # In any tokens.  While the output may not end, all but the last byte are read before
            # that changes: tokens without bytes may follow.
            rest = bytes(pattern[num_there:])
            parts = [(NO_ID, rest[:-1]), (NO_ID, rest[-1:])]
            readers = [first if self._num_endless else ending, ending]
            most = max(most, _num_cut(progress, parts, readers))
        return most


def _num_cut(
    progress: StopProgress, parts: Sequence[tuple[int, bytes]], readers: Sequence[StopReader]
) -> int:
    """Return how many of the held bytes are cut if this comes next; parts: ids and bytes."""
    position = 0
    for (token_id, text), reader in zip(parts, readers, strict=False):
        then, matches = reader.read_text(progress, token_id, text)
        if matches:
            return max(0, matches[0].size - position - matches[0].end)
        if then is None:
            raise InvariantError("the automaton ended without a match")
        progress, position = then, position + len(text)
    return 0
