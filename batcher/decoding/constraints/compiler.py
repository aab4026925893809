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

from batcher.decoding.constraints import GrammarRow, GrammarStates
from batcher.decoding.constraints.matchers import compile_source, with_large_stack
from batcher.decoding.constraints.trials import TRIALS
from batcher.decoding.grammars import ConstraintSource, constraint_source, parts_of, stated_source
from batcher.decoding.healing import VocabularyIndex
from batcher.decoding.verification import Verifier
from batcher.errors import BatchdecodeError, GrammarError
from batcher.models.base import Tokenizer
from batcher.request import ConstraintField, Request
from batcher.settings import GRAMMAR_TIMEOUT

if TYPE_CHECKING:
    from llguidance import LLTokenizer

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
