"""Constraints of rows: the tokens allowed next, by llguidance's grammars, and their compiler.

A grammar follows the output token by token. Forced tokens are found ahead, so that a row takes any
number of them in one step. llguidance is optional (`pip install 'batchdecode[grammar]'`) and
imported with the first constraint.
"""

import json
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from functools import cache, cached_property, partial
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from batcher.decoding.grammars import (
    ConstraintSource,
    compile_source,
    constraint_source,
    parts_of,
    stated_source,
    with_large_stack,
)
from batcher.decoding.verification import TRIALS, Verifier
from batcher.errors import BatchdecodeError, GrammarError, InvariantError
from batcher.models.base import IntArray, Tokenizer
from batcher.request import ConstraintField, Request
from batcher.settings import GRAMMAR_TIMEOUT

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

# -- healing ---------------------------------------------------------------------------------------
#
# A prompt that ends in `http:` cuts `:` off the token `://`, and a model that knows `://` stumbles.
# So the last tokens are removed, and the output has to begin with their bytes, in any tokens
# (S. Lundberg, "The Art of Prompt Design: Prompt Boundaries and Token Healing",
# 2023).


class VocabularyIndex:
    """The tokens of a vocabulary by their bytes, without EOS and tokens without bytes.

    llguidance reads it as a tokenizer.  Only ids with text are ever allowed: EOS ends an output and
    never has text here.

    tokens: [vocab_size] the bytes of each id.
    """

    is_tokenizer_wrapper = True  # tells llguidance to read the attributes
    bos_token_id = None
    special_token_ids = ()  # tokens without text count as special anyway

    def __init__(
        self, token_bytes: Sequence[bytes], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.vocab_size = vocab_size
        self.tokens = list(token_bytes[:vocab_size])
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        # if None, llguidance adds an id after the last
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None
        for token_id in eos_token_ids:
            if token_id < vocab_size:
                self.tokens[token_id] = b""
        ids = [token_id for token_id, text in enumerate(self.tokens) if text]
        ids.sort(key=self.tokens.__getitem__)
        self._sorted = [self.tokens[token_id] for token_id in ids]
        self._ids = np.array(ids, np.int64)
        self.max_length = max(map(len, self._sorted), default=0)  # bytes of the longest token

    def __call__(self, text: str) -> list[int]:
        """Refuse to tokenize: masks that force nothing never need it."""
        raise NotImplementedError

    def bytes_of(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < self.vocab_size else b""

    def next_tokens(self, text: bytes) -> IntArray:
        """Return the tokens that an output starting with `text` can begin with.

        A token that covers only a part of `text` counts if the vocabulary can write the rest.
        """
        size = len(text)
        can_write = [True] * size
        for begin in reversed(range(1, size)):
            can_write[begin] = bool(self._starting_with(text[begin:])) or any(
                can_write[end] and self._equal_to(text[begin:end]) for end in range(begin + 1, size)
            )
        found = [self._starting_with(text)]
        found += [self._equal_to(text[:size]) for size in range(1, len(text)) if can_write[size]]
        return np.concatenate([self._ids[places.start : places.stop] for places in found])

    def heal(self, prompt_tokens: Sequence[int]) -> tuple[list[int], bytes]:
        """Return the prompt tokens to keep, and the bytes that the output has to begin with.

        Backs up to the earliest token from which the prompt is a proper prefix of some token.
        Special tokens and the first token are never removed. Returns the whole prompt and b"" if no
        token is longer.
        """
        num_kept, forced, tail = len(prompt_tokens), b"", b""
        for place in range(len(prompt_tokens) - 1, 0, -1):
            text = self.bytes_of(prompt_tokens[place])
            tail = text + tail
            if not text or len(tail) >= self.max_length:
                break
            if self._starting_with(tail).stop > self._equal_to(tail).stop:  # a longer token
                num_kept, forced = place, tail
        return list(prompt_tokens[:num_kept]), forced

    def _starting_with(self, prefix: bytes) -> range:
        size = len(prefix)
        begin = bisect_left(self._sorted, prefix)
        return range(begin, bisect_right(self._sorted, prefix, begin, key=lambda t: t[:size]))

    def _equal_to(self, text: bytes) -> range:
        begin = bisect_left(self._sorted, text)
        return range(begin, bisect_right(self._sorted, text, begin))


class HealingRow:
    """A row whose output begins with the bytes `remaining`; it has the methods of a GrammarRow."""

    __slots__ = ("_index", "remaining")

    may_force = True

    def __init__(self, index: VocabularyIndex, remaining: bytes) -> None:
        self._index, self.remaining = index, remaining

    @property
    def is_active(self) -> bool:
        return bool(self.remaining)

    @property
    def failure(self) -> str | None:
        if self.remaining and not len(self._index.next_tokens(self.remaining)):
            return f"no token begins like the end of the prompt, {self.remaining!r}"
        return None

    def packed_mask(self) -> bytes:
        """Return the tokens allowed next, one bit each: all of them when nothing remains."""
        is_allowed = np.full(self._index.vocab_size, not self.remaining)
        is_allowed[self._index.next_tokens(self.remaining)] = True
        return np.packbits(is_allowed, bitorder="little").tobytes()

    def forced_tokens(self, most: int) -> Sequence[int]:
        """Return at most `most` forced tokens."""
        forced: list[int] = []
        remaining = self.remaining
        while remaining and len(forced) < most:
            tokens = self._index.next_tokens(remaining)
            if len(tokens) != 1:
                break
            forced.append(int(tokens[0]))
            remaining = remaining[len(self._index.bytes_of(forced[-1])) :]
        return forced

    def advance(self, token: int) -> None:
        if not self.remaining:
            return
        if token not in self._index.next_tokens(self.remaining):
            raise InvariantError(f"token {token} does not continue {self.remaining!r}")
        self.remaining = self.remaining[len(self._index.bytes_of(token)) :]

    def advance_forced(self, num_tokens: int) -> None:
        for token in self.forced_tokens(num_tokens):
            self.advance(token)

    def fork(self) -> "HealingRow":
        return HealingRow(self._index, self.remaining)


# -- grammars --------------------------------------------------------------------------------------

MIN_POOLED_VOCABULARY = 1 << 15  # tokens: smaller masks take less time than handing them over
MAX_RUN = 256  # forced tokens found ahead: some grammars force tokens forever
MAX_CACHED = 256  # constraints
MAX_CACHED_CHARS = 8 * 1024 * 1024  # a compiled text takes about 20 times its size
WORDS = ["[a-z]{1,20}", " [a-z]{1,20}"]  # slices for regexes; the default slices suit JSON
_NEEDED_MODULES = ("llguidance", "jsonschema", "regex")


class GrammarRow:
    """The tokens that a compiled grammar allows at the current place of an output.

    run: forced tokens, which the matcher has read already.
    mask: the tokens allowed after them, token i as bit i % 8 of byte i // 8; None until computed.
    is_cut: the mask allows one token as well, but the run reached its maximum length.
    """

    __slots__ = ("_failure", "_is_cut", "_run", "eos_token_ids", "mask", "matcher", "vocabulary")

    is_active = True

    def __init__(
        self, matcher: "LLMatcher", vocabulary: VocabularyIndex, eos_token_ids: Collection[int]
    ) -> None:
        """matcher: at the start of an output; owned by this row."""
        self.matcher, self.vocabulary = matcher, vocabulary
        self.eos_token_ids = frozenset(eos_token_ids)
        self._run: list[int] = []
        self.mask: bytes | None = None
        self._is_cut = False
        self._failure: str | None = None

    @property
    def may_force(self) -> bool:
        """Whether `forced_tokens` may return any, or `is_active` has changed."""
        find_masks([self])
        return bool(self._run)

    @property
    def failure(self) -> str | None:
        find_masks([self])
        return None if self._run else self._failure

    def packed_mask(self) -> bytes:
        """Return the allowed tokens, token i as bit i % 8 of byte i // 8; EOS at the end."""
        find_masks([self])
        mask = self.mask or b""
        if not self._run:
            return mask
        return (1 << self._run[0]).to_bytes(max(len(mask), self._run[0] // 8 + 1), "little")

    def allows(self, token: int) -> bool:
        mask = self.packed_mask()
        return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)

    def forced_tokens(self, most: int) -> Sequence[int]:
        """Return at most `most` forced tokens, never EOS.

        Each is the only token allowed after those before it, so that appending them without asking
        the model changes no output.
        """
        find_masks([self])
        return self._run[:most]

    def advance(self, token: int) -> None:
        """Append `token`, which is allowed and not EOS; at a limit of llguidance the row fails."""
        # llguidance would accept EOS, and count it as a token to undo
        if token in self.eos_token_ids or not self.allows(token):
            raise InvariantError(f"the grammar does not allow token {token}")
        if self._run:
            self.advance_forced(1)
            return
        if not self.matcher.consume_token(token) and not self.matcher.is_error():
            raise InvariantError(f"the matcher rejects the allowed token {token}")
        self.mask = None

    def advance_forced(self, num_tokens: int) -> None:
        if not self._run:
            raise InvariantError("nothing is forced")
        del self._run[:num_tokens]
        if self._is_cut and not self._run:
            self._is_cut, self.mask = False, None

    def fork(self) -> "GrammarRow":
        fork = GrammarRow(self.matcher.deep_copy(), self.vocabulary, self.eos_token_ids)
        fork._run, fork.mask = self._run.copy(), self.mask
        fork._is_cut, fork._failure = self._is_cut, self._failure
        return fork

    def take_mask(self, mask: bytes) -> bool:
        """Store the matcher's mask; return whether it forces a token, which is then read."""
        if self.matcher.is_error():  # it never raises, and the mask holds EOS
            failure = self.matcher.get_error().partition("\n")[0]
            is_usual = failure.startswith("NoExtension")
            self._failure = "the grammar allows nothing here" if is_usual else failure
            self.mask = b""
            return False
        bits = int.from_bytes(mask, "little")  # bit i is token i
        token = bits.bit_length() - 1
        is_forced = bits and not bits & (bits - 1) and token not in self.eos_token_ids
        if not is_forced or len(self._run) >= MAX_RUN:
            self.mask, self._is_cut = mask, bool(is_forced)
            return False
        self.matcher.consume_token(token)
        self._run.append(token)
        return True


RowConstraint = GrammarRow | HealingRow


@cache
def _thread_pool() -> "LLExecutor":
    from llguidance import LLExecutor  # noqa: PLC0415 - an optional dependency

    return LLExecutor()


def find_masks(rows: Iterable[RowConstraint]) -> None:
    """Compute the masks of rows that have moved, in llguidance's threads for a large vocabulary."""
    waiting = [row for row in rows if isinstance(row, GrammarRow) and row.mask is None]
    while waiting:
        matchers = [row.matcher for row in waiting]
        if len(waiting) == 1 or waiting[0].vocabulary.vocab_size < MIN_POOLED_VOCABULARY:
            masks = [matcher.compute_bitmask() for matcher in matchers]
        else:
            from llguidance.numpy import (  # noqa: PLC0415 - an optional dependency
                allocate_token_bitmask,
                fill_next_token_bitmask_par,
            )

            bits = allocate_token_bitmask(len(waiting), waiting[0].vocabulary.vocab_size)
            places = [(matcher, place) for place, matcher in enumerate(matchers)]
            fill_next_token_bitmask_par(_thread_pool(), places, bits)
            masks = [own.tobytes() for own in bits]
        pairs = zip(waiting, masks, strict=True)
        waiting = [row for row, mask in pairs if row.take_mask(mask)]


def allowed_tokens(rows: Sequence[RowConstraint], vocab_size: int) -> NDArray[np.bool_]:
    """Return the tokens that each of `rows` allows: [rows, vocab], C-contiguous.

    A row without any True is complete (and has no EOS token) or has failed.
    """
    find_masks(rows)
    width = (vocab_size + 7) // 8
    masks = [row.packed_mask() for row in rows]
    sizes = {*map(len, masks)}
    if len(sizes) == 1 and min(sizes) >= width:  # nearly always
        width = sizes.pop()
    else:
        masks = [mask[:width].ljust(width, b"\0") for mask in masks]
    bits = np.frombuffer(b"".join(masks), np.uint8).reshape(len(rows), width)
    return np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little").view(np.bool_)


class CompiledConstraint:
    """A compiled constraint for any number of rows; only copies of its matcher move."""

    def __init__(
        self,
        source: ConstraintSource,
        matcher: "LLMatcher",
        vocabulary: VocabularyIndex,
        eos_token_ids: Sequence[int],
        unenforced: tuple[str, ...],
    ) -> None:
        self.source, self.matcher, self.verifier = source, matcher, Verifier(source)
        self.unenforced = unenforced
        self.start = GrammarRow(matcher.deep_copy(), vocabulary, eos_token_ids)

    def new_row(self) -> GrammarRow:
        return self.start.fork()

    def accepts(self, tokens: list[int]) -> bool:
        matcher = self.matcher.deep_copy()
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


# -- compiling -------------------------------------------------------------------------------------


def need_grammar_packages() -> None:
    if any(find_spec(name) is None for name in _NEEDED_MODULES):
        raise BatchdecodeError(
            "constraints need llguidance, jsonschema and regex: "
            "install them with `pip install 'batchdecode[grammar]'`"
        )


class ConstraintTimes(Struct):
    """Wall-clock seconds spent on constraints; never part of results or traces.

    compile: of all compilations; longest_compile: of one. masks: of `num_masks` tokens.
    """

    compile: float = 0.0
    longest_compile: float = 0.0
    masks: float = 0.0
    num_masks: int = 0


class ConstraintCompiler:
    """Compiles each distinct constraint once for one tokenizer, and caches the latest.

    num_misses: compilations, failed ones included.
    timeout: seconds of processor time for one.
    is_strict: refuse a schema that is only partly enforced while decoding.
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
        self.num_misses = self._num_rows = 0
        self.times = ConstraintTimes()
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids, self._timeout, self._is_strict = eos_token_ids, timeout, is_strict
        self._known = OrderedDict[ConstraintSource, CompiledConstraint | GrammarError]()

    @property
    def counts(self) -> tuple[int, int]:
        """The number of compilations, and of rows that found theirs compiled."""
        return self.num_misses, max(0, self._num_rows - self.num_misses)

    @cached_property
    def vocabulary(self) -> VocabularyIndex:
        token_bytes = self._tokenizer.token_bytes
        return VocabularyIndex(token_bytes, self._vocab_size, self._eos_token_ids)

    def check(self, field: ConstraintField, value: object) -> None:
        self.compile(stated_source(field, value))

    def of_row(self, request: Request) -> CompiledConstraint | None:
        """Return the compiled constraint of a row of `request`, or None."""
        source = constraint_source(request)
        if source is None:
            return None
        self._num_rows += 1
        return self.compile(source)

    def compile(self, source: ConstraintSource) -> CompiledConstraint:
        """Return the compiled `source`; raise a GrammarError if it is invalid or has no output."""
        known = self._known.pop(source, None)  # put back last, as the latest; threads may race
        if known is None:
            began = perf_counter()
            try:
                known = self._compile(source)
            except GrammarError as error:
                known = error.with_traceback(None)
            took = perf_counter() - began
            self.times.compile += took
            self.times.longest_compile = max(took, self.times.longest_compile)
            self.num_misses += 1
        self._known[source] = known
        num_chars = sum(len(each.text) for each in [*self._known])
        while len(self._known) > 1 and (
            len(self._known) > MAX_CACHED or num_chars > MAX_CACHED_CHARS
        ):  # drop the least recently used
            forgotten, _ = self._known.popitem(last=False)
            num_chars -= len(forgotten.text)
        if isinstance(known, GrammarError):
            raise known.with_traceback(None)
        return known

    def _compile(self, source: ConstraintSource) -> CompiledConstraint:
        tokenizer = self._llguidance_tokenizer
        found = TRIALS.make(source, self._timeout)
        if found.unenforced and self._is_strict:
            parts = parts_of(json.loads(source.text))
            path = next(
                path for path, part in parts if not part.keys().isdisjoint(found.unenforced)
            )
            raise GrammarError(
                ("json_schema", *path),
                f"not enforced while decoding: {', '.join(found.unenforced)}; --strict-constraints "
                "refuses constraints that are checked only afterwards",
            )
        if source.kind == "regex":
            tokenizer = self._tokenizer_of_words
        matcher = with_large_stack(partial(compile_source, tokenizer, found.source))
        compiled = CompiledConstraint(
            source, matcher, self.vocabulary, tokenizer.eos_tokens, found.unenforced
        )
        if failure := compiled.start.failure:
            raise GrammarError((source.kind,), f"no output can satisfy the constraint: {failure}")
        return compiled

    @cached_property
    def _tokenizer_of_words(self) -> "LLTokenizer":
        # masks that hold all words take half the time
        return self._llguidance_tokenizer.with_slices(WORDS)

    @cached_property
    def _llguidance_tokenizer(self) -> "LLTokenizer":
        need_grammar_packages()
        from llguidance import LLTokenizer  # noqa: PLC0415 - an optional dependency

        return LLTokenizer(
            self.vocabulary,  # type: ignore[arg-type]  # all that the grammar reads
            eos_token=[*self._eos_token_ids] or None,
        )
