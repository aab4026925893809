"""Compiles constraints for one tokenizer, each distinct one once.

llguidance is an optional dependency (`pip install 'batchdecode[grammar]'`), imported when the first
constraint is compiled.
"""

import json
from collections import OrderedDict
from functools import cached_property, partial
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING

from msgspec import Struct

from batcher.decoding.grammars import (
    ConstraintSource,
    compile_source,
    constraint_source,
    parts_of,
    stated_source,
    with_large_stack,
)
from batcher.decoding.healing import VocabularyIndex
from batcher.decoding.loosening import TRIALS
from batcher.decoding.verification import Verifier
from batcher.errors import BatchdecodeError, GrammarError
from batcher.models.base import Tokenizer
from batcher.request import ConstraintField, Request
from batcher.settings import GRAMMAR_TIMEOUT

if TYPE_CHECKING:
    from llguidance import LLTokenizer
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batcher.decoding.healing import HealingRow
from batcher.errors import InvariantError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# A constraint follows the output token by token and says which tokens may come next.  What
# llguidance finds out about an output is kept as a GrammarState for all rows that begin alike.
# What a grammar forces is known as a whole, so that a row takes any number of tokens at once.

MAX_KEPT_BYTES = 1 << 21  # of the states of one grammar
MAX_RUN = 256  # tokens of a run, since some grammars have no end
STATE_BYTES = 512  # of a state, or of a mask beside its bits
EDGE_BYTES = 128  # of what leads from one state to another


class Mask(Struct, frozen=True):
    """Tokens that are allowed next: bit i % 8 of byte i // 8 is token i; none beyond the end.

    forced: the only one of them; None if there are several, or it is EOS.
    """

    bits: bytes
    forced: int | None = None


NO_MASK = Mask(b"")


class GrammarState(Struct, eq=False):
    """Where a grammar is after certain tokens.

    mask: the tokens allowed next, unless there is a run; failure: why none is.
    run: the tokens that come next whatever is chosen, end: the state after them; () and None where
    there is a choice, or is_cut.
    is_cut: whether there is no choice either, but a run has been cut here for being too long.
    next: token -> the state after it, of those that rows have come to, unless there is a run.
    """

    mask: Mask
    failure: str | None = None
    run: tuple[int, ...] = ()
    end: "GrammarState | None" = None
    is_cut: bool = False
    next: dict[int, "GrammarState"] = {}

    def packed_mask(self) -> bytes:
        """Return the tokens allowed next, one bit each."""
        if self.end is None:
            return self.mask.bits
        size = max(len(self.end.mask.bits), self.run[0] // 8 + 1)
        return (1 << self.run[0]).to_bytes(size, "little")

    def allows(self, token: int) -> bool:
        """Return whether `token` may come next."""
        mask = self.packed_mask()
        return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


class GrammarStates:
    """The states of one grammar that outputs have come to, as many as there is room for.

    start: that of an output that has not begun.
    vocabulary: of the tokens that the matcher knows.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        vocabulary: VocabularyIndex,
        eos_token_ids: Sequence[int],
    ) -> None:
        """matcher: at the start of an output; only copies of it move."""
        self.eos_token_ids = frozenset(eos_token_ids)
        self._matcher, self._vocabulary = matcher, vocabulary
        self._begin()

    def _begin(self) -> None:
        """Know of no state but the first."""
        self._num_bytes = 0
        self._masks: dict[bytes, Mask] = {}  # those that states have
        self.start, _ = self._state_of(self.new_matcher())

    def new_matcher(self) -> "LLMatcher":
        """Return a matcher at the start of an output."""
        return self._matcher.deep_copy()

    def after(
        self, before: GrammarState, token: int, matcher: "LLMatcher"
    ) -> tuple[GrammarState, int]:
        """Return the state that `token`, which is allowed, leads to from `before`, and keep it.

        matcher: of an output that ends with `token`.  Also returns how many forced tokens it has
        read since.

        If there is no room for another state, those of all outputs are forgotten but for those that
        rows are in.
        """
        after, num_read = self._state_of(matcher)
        before.next[token] = after
        self._num_bytes += EDGE_BYTES
        if self._num_bytes > MAX_KEPT_BYTES:
            self._begin()
        return after, num_read

    def grow(self, cut: GrammarState, matcher: "LLMatcher") -> int:
        """Let `cut`, in which `matcher` is, have the run that was cut there; return its length."""
        after, num_read = self._state_of(matcher)
        cut.run, cut.end, cut.is_cut = after.run, after.end, False
        return num_read

    def _state_of(self, matcher: "LLMatcher") -> tuple[GrammarState, int]:
        """Return the state that `matcher` is in, and how many forced tokens it has read since."""
        run: list[int] = []
        while True:
            text = matcher.compute_ff_bytes()
            if text:
                self._read_forced(matcher, text, run)
            end = self._end_of(matcher)
            token = end.mask.forced
            if token is None:
                break
            if len(run) >= MAX_RUN:
                end.is_cut = True
                break
            matcher.consume_token(token)
            run.append(token)
        self._num_bytes += STATE_BYTES + 8 * len(run)
        state = GrammarState(NO_MASK, run=tuple(run), end=end) if run else end
        return state, len(run)

    def _read_forced(self, matcher: "LLMatcher", text: bytes, run: list[int]) -> None:
        """Let `matcher` read, and add to `run`, what bytes alone show to be forced: `text`.

        Where the text goes on in one way, a mask holds the tokens that begin it, unless there are
        some that begin with all of it.
        """
        only_beginning, size = self._vocabulary.only_beginning, self._vocabulary.max_length
        while text:
            begin = 0
            while (token := only_beginning(text[begin : begin + size])) is not None:
                run.append(token)
                if not matcher.consume_token(token) or len(run) >= MAX_RUN:
                    return
                begin += len(self._vocabulary.bytes_of(token))
            if begin < len(text):
                return
            text = matcher.compute_ff_bytes()

    def _end_of(self, matcher: "LLMatcher") -> GrammarState:
        """Return the state that `matcher` is in, whatever is forced from there on."""
        bits = matcher.compute_bitmask()
        if not matcher.is_error():
            return GrammarState(self._masks.get(bits) or self._keep(bits))
        failure = matcher.get_error().partition("\n")[0]  # it never raises, and the mask holds EOS
        is_usual = failure.startswith("NoExtension")
        return GrammarState(NO_MASK, "the grammar allows nothing here" if is_usual else failure)

    def _keep(self, bits: bytes) -> Mask:
        """Return a mask that no state has had, for all that will have it."""
        tokens = int.from_bytes(bits, "little")  # bit i is token i
        token_id = tokens.bit_length() - 1
        is_one = tokens and not tokens & (tokens - 1) and token_id not in self.eos_token_ids
        mask = self._masks[bits] = Mask(bits, token_id if is_one else None)
        self._num_bytes += STATE_BYTES + len(bits)
        return mask

    def accepts(self, tokens: list[int]) -> bool:
        """Return whether `tokens` are a whole."""
        state, num_read = self.start, 0
        while num_read < len(tokens):
            if state.end is not None:
                if state.run != tuple(tokens[num_read : num_read + len(state.run)]):
                    return False
                num_read, state = num_read + len(state.run), state.end
                continue
            after = state.next.get(tokens[num_read])
            if after is None:  # no row has been there
                matcher = self.new_matcher()
                return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            num_read, state = num_read + 1, after
        return any(map(state.allows, self.eos_token_ids))


class GrammarRow:
    """What a compiled grammar allows a row, at the place that its output has reached.

    Its matcher is made and moved only where no row has been before.  Where tokens are forced it may
    be ahead of the row, which can go on in no other way.
    """

    __slots__ = ("_ahead", "_behind", "_matcher", "_state", "_states")

    is_active = True

    def __init__(self, states: GrammarStates) -> None:
        self._states, self._state = states, states.start
        self._matcher: LLMatcher | None = None
        self._behind: list[int] = []  # tokens of the row that the matcher has not read
        self._ahead = 0  # how many it has read that the row does not have

    @property
    def may_force(self) -> bool:
        """Whether `forced_tokens` may return any, or `is_active` have changed."""
        return self._state.end is not None

    @property
    def failure(self) -> str | None:
        """Why the grammar cannot be followed any further, if it cannot."""
        return self._state.failure

    def packed_mask(self) -> bytes:
        """Return the tokens allowed next: bit i % 8 of byte i // 8 is token i; 0 beyond the end.

        EOS is among them exactly if the output so far is a whole.
        """
        state = self._state
        return state.mask.bits if state.end is None else state.packed_mask()

    def forced_tokens(self, most: int) -> Sequence[int]:
        """Return the tokens that come next whatever is chosen, at most so many; EOS is none.

        Each is the only one allowed after those before it, so that appending them without asking
        the model changes no output.
        """
        return self._state.run[:most]

    def advance(self, token: int) -> None:
        """Follow the output by `token`; if that reaches a limit of llguidance, the row fails.

        Raises:
            InvariantError: the token was not allowed, or it is EOS.
        """
        state = self._state
        after = state.next.get(token)
        if after is not None:
            self._behind.append(token)
            self._state = after
        # EOS is never fed: llguidance would take it, and count it in what it undoes
        elif token in self._states.eos_token_ids or not state.allows(token):
            raise InvariantError(f"token {token} is not one that the grammar allows")
        elif state.end is not None:
            self.advance_forced(1)
        else:
            self._behind.append(token)
            self._state, self._ahead = self._states.after(state, token, self._caught_up())

    def advance_forced(self, num_tokens: int) -> None:
        """Follow the output by the first `num_tokens` of its `forced_tokens`."""
        run, end = self._state.run, self._state.end
        if end is None:
            raise InvariantError("nothing is forced")
        self._behind += run[self._ahead : num_tokens]
        self._ahead = max(0, self._ahead - num_tokens)
        self._state = end
        if num_tokens < len(run):
            self._state = GrammarState(NO_MASK, run=run[num_tokens:], end=end)
        elif end.is_cut:
            self._ahead = self._states.grow(end, self._caught_up())

    def fork(self) -> "GrammarRow":
        """Return a row of the same state that moves on by itself."""
        copy = GrammarRow(self._states)
        copy._state, copy._ahead, copy._behind = self._state, self._ahead, self._behind.copy()
        copy._matcher = None if self._matcher is None else self._matcher.deep_copy()
        return copy

    def _caught_up(self) -> "LLMatcher":
        """Return the matcher after it has read what it is behind with."""
        if self._matcher is None:
            self._matcher = self._states.new_matcher()
        matcher, unread = self._matcher, self._behind
        if not matcher.consume_tokens(unread) and not matcher.is_error():
            raise InvariantError(f"tokens {unread} are allowed, but cannot be followed")
        unread.clear()
        return matcher


RowConstraint = GrammarRow | HealingRow


def allowed_tokens(rows: Sequence[RowConstraint], vocab_size: int) -> NDArray[np.bool_]:
    """Return the tokens each of `rows` allows: [rows, vocab], C-contiguous.

    A row without any True is at its end (without an EOS token) or has failed.
    """
    width = (vocab_size + 7) // 8
    masks = [row.packed_mask() for row in rows]
    sizes = {*map(len, masks)}
    if len(sizes) == 1 and min(sizes) >= width:  # nearly always
        width = sizes.pop()
    else:
        masks = [mask[:width].ljust(width, b"\0") for mask in masks]
    bits = np.frombuffer(b"".join(masks), np.uint8).reshape(len(rows), width)
    return np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little").view(np.bool_)


_NEEDED_MODULES = ("llguidance", "jsonschema", "re2", "regex")
WORDS = ["[a-z]{1,20}", " [a-z]{1,20}"]  # as patterns; what JSON is quick with is the default
MAX_CACHED = 256
MAX_CACHED_CHARS = 8 * 1024 * 1024  # compiled, a text takes some 20 times its size


class MissingGrammarError(BatchdecodeError):
    """Constraints need packages that are not installed."""

    def __init__(self) -> None:
        super().__init__(
            "constraints need llguidance, jsonschema, google-re2 and regex: "
            "install them with `pip install 'batchdecode[grammar]'`"
        )


def need_grammar_packages() -> None:
    """Make sure that constraints can be compiled and checked.

    Raises:
        MissingGrammarError: a package is missing.
    """
    if any(find_spec(name) is None for name in _NEEDED_MODULES):
        raise MissingGrammarError


class CompiledConstraint:
    """A constraint ready for any number of rows.

    verifier: checks finished outputs by other means than the rows were made by.
    states: where outputs have come to.  unenforced: keywords that only the verifier decides.
    """

    def __init__(
        self, source: ConstraintSource, states: GrammarStates, unenforced: tuple[str, ...] = ()
    ) -> None:
        self.source, self.verifier, self.states = source, Verifier(source), states
        self.unenforced = unenforced

    def new_row(self) -> GrammarRow:
        """Return the constraint of an output that has not begun."""
        return GrammarRow(self.states)


class ConstraintTimes(Struct):
    """What constraints took on the wall, in seconds; so it is no number of results or traces.

    compile: all that were compiled.  longest_compile: one of them.  masks: what `num_masks` tokens
    were chosen from.
    """

    compile: float = 0.0
    longest_compile: float = 0.0
    masks: float = 0.0
    num_masks: int = 0


class ConstraintCompiler:
    """Compiles constraints for one tokenizer, and keeps those that were used last.

    times: what that, and the use of them, has taken.
    num_misses: how often one was compiled; what cannot be compiled is remembered as well.
    timeout: seconds of processor time for one.
    is_strict: whether a schema is refused of which a part could only be checked afterwards.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        timeout: float = GRAMMAR_TIMEOUT,
        *,
        is_strict: bool = False,
    ) -> None:
        self.num_misses = self._num_rows = self._num_cached_chars = 0
        self.times = ConstraintTimes()
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids, self._timeout, self._is_strict = eos_token_ids, timeout, is_strict
        self._known: OrderedDict[ConstraintSource, CompiledConstraint | GrammarError] = (
            OrderedDict()
        )

    @property
    def counts(self) -> tuple[int, int]:
        """How many constraints were compiled, and for how many rows one was there already."""
        return self.num_misses, max(0, self._num_rows - self.num_misses)

    @cached_property
    def vocabulary(self) -> VocabularyIndex:
        """The tokens by their bytes."""
        token_bytes = self._tokenizer.token_bytes
        return VocabularyIndex(token_bytes, self._vocab_size, self._eos_token_ids)

    def check(self, field: ConstraintField, value: object) -> None:
        """Make sure that the constraint which `field` of a request states can be compiled.

        Raises:
            GrammarError, MissingGrammarError: it cannot.
        """
        self.compile(stated_source(field, value))

    def of_row(self, request: Request) -> CompiledConstraint | None:
        """Return the constraint of a row of `request`, None if it has none.

        Raises:
            GrammarError, MissingGrammarError: it cannot be compiled.
        """
        source = constraint_source(request)
        if source is None:
            return None
        self._num_rows += 1
        return self.compile(source)

    def compile(self, source: ConstraintSource) -> CompiledConstraint:
        """Return `source`, compiled.

        Raises:
            GrammarError: it cannot be compiled, or no output could keep it.
            MissingGrammarError: llguidance is not installed.
        """
        known = self._known.pop(source, None)  # put back last: a thread that reads requests may ask
        if known is None:
            began = perf_counter()
            known = self._compile(source)
            took = perf_counter() - began
            self.times.compile += took
            self.times.longest_compile = max(took, self.times.longest_compile)
            self.num_misses += 1
        else:
            self._num_cached_chars -= len(source.text)
        if source not in self._known:  # another thread may have been sooner
            self._num_cached_chars += len(source.text)
        self._known[source] = known
        while len(self._known) > 1 and (
            len(self._known) > MAX_CACHED or self._num_cached_chars > MAX_CACHED_CHARS
        ):  # what was used longest ago is forgotten
            forgotten, _ = self._known.popitem(last=False)
            self._num_cached_chars -= len(forgotten.text)
        if isinstance(known, GrammarError):
            raise known.with_traceback(None)
        return known

    def _compile(self, source: ConstraintSource) -> CompiledConstraint | GrammarError:
        tokenizer = self._llguidance_tokenizer
        found = TRIALS.make(source, self._timeout)
        if isinstance(found, GrammarError):
            return found
        if found.unenforced and self._is_strict:
            return _not_enforced(source, found.unenforced)
        if source.kind == "regex":
            tokenizer = self._tokenizer_of_words
        matcher = with_large_stack(partial(compile_source, tokenizer, found.source))
        if isinstance(matcher, GrammarError):
            return matcher
        states = GrammarStates(matcher, self.vocabulary, tokenizer.eos_tokens)
        if failure := states.start.failure:
            return GrammarError((source.kind,), f"no output can keep it: {failure}")
        return CompiledConstraint(source, states, found.unenforced)

    @cached_property
    def _tokenizer_of_words(self) -> "LLTokenizer":
        """The same, quicker with masks that hold all words: half of what a regex's mask takes."""
        return self._llguidance_tokenizer.with_slices(WORDS)

    @cached_property
    def _llguidance_tokenizer(self) -> "LLTokenizer":
        """The tokenizer as llguidance knows it."""
        need_grammar_packages()
        from llguidance import LLTokenizer  # noqa: PLC0415 - an optional dependency

        ends = self._eos_token_ids
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, ends)
        return LLTokenizer(
            vocabulary,  # type: ignore[arg-type] # it asks for no more
            eos_token=[*ends] or None,
        )


def _not_enforced(source: ConstraintSource, keywords: tuple[str, ...]) -> GrammarError:
    """Return the error of a schema that --strict-constraints refuses, at the first such keyword."""
    parts = parts_of(json.loads(source.text))
    path = next(path for path, part in parts if not part.keys().isdisjoint(keywords))
    message = f"not enforced while decoding: {', '.join(keywords)}"
    return GrammarError(
        ("json_schema", *path),
        f"{message}; --strict-constraints refuses what is only checked after",
    )


class _Vocabulary:
    """What llguidance reads of a tokenizer.

    Only ids with text are ever allowed: not the special ones, not those the model alone knows.
    EOS ends an output and has no text, whatever the tokenizer says.
    """

    is_tokenizer_wrapper = True  # what llguidance goes by
    bos_token_id = None
    special_token_ids = ()  # those without text are anyway

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        tokens = list(tokenizer.token_bytes[:vocab_size])
        tokens += [b""] * (vocab_size - len(tokens))
        for token_id in eos_token_ids:
            tokens[token_id] = b""
        self.tokens = tokens
        # if None, llguidance adds an id after the last
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None

    def __call__(self, text: str) -> list[int]:
        """Refuse to tokenize: masks that force nothing never ask."""
        raise NotImplementedError
