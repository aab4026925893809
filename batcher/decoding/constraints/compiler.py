"""Compiles constraints for one tokenizer, each distinct one once."""

from collections import OrderedDict
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from batcher.decoding.constraints.matchers import compile_source, with_large_stack
from batcher.decoding.constraints.rows import GrammarRow, GrammarStates
from batcher.decoding.constraints.source import ConstraintSource
from batcher.decoding.constraints.trials import TRIALS
from batcher.decoding.constraints.verification import Verifier
from batcher.decoding.healing import VocabularyIndex
from batcher.errors import BatchdecodeError, GrammarError
from batcher.models.base import Tokenizer
from batcher.settings import GRAMMAR_TIMEOUT

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_NEEDED_MODULES = ("llguidance", "jsonschema", "re2")
WORDS = ["[a-z]{1,20}", " [a-z]{1,20}"]  # as patterns; what JSON is quick with is the default
MAX_CACHED = 256
MAX_CACHED_CHARS = 8 * 1024 * 1024  # compiled, a text takes some 20 times its size


class MissingGrammarError(BatchdecodeError):
    """Constraints need packages that are not installed."""

    def __init__(self) -> None:
        super().__init__(
            "constraints need llguidance, jsonschema and google-re2: "
            "install them with `pip install 'batchdecode[grammar]'`"
        )


class CompiledConstraint:
    """A constraint ready for any number of rows.

    verifier: checks finished outputs by other means than the rows were made by.
    states: where outputs have come to.
    """

    def __init__(self, source: ConstraintSource, states: GrammarStates) -> None:
        self.source, self.verifier, self.states = source, Verifier(source), states

    def new_row(self) -> GrammarRow:
        """Return the constraint of an output that has not begun."""
        return GrammarRow(self.states)


class ConstraintCompiler:
    """Compiles constraints for one tokenizer, and keeps those that were used last.

    num_hits, num_misses: how often a constraint was there already, and how often it was compiled;
    one that cannot be compiled is remembered as well.
    timeout: seconds of processor time for one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_id: int | None,
        timeout: float = GRAMMAR_TIMEOUT,
        max_cached: int = MAX_CACHED,
        max_cached_chars: int = MAX_CACHED_CHARS,
    ) -> None:
        self.num_hits = self.num_misses = 0
        self._timeout = timeout
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_id, self._max_cached = eos_token_id, max_cached
        self._max_cached_chars, self._num_cached_chars = max_cached_chars, 0
        self._bridge: LLTokenizer | None = None
        self._known: OrderedDict[ConstraintSource, CompiledConstraint | GrammarError] = (
            OrderedDict()
        )

    def compile(self, source: ConstraintSource) -> CompiledConstraint:
        """Return `source`, compiled.

        Raises:
            GrammarError: it cannot be compiled, or no output could keep it.
            MissingGrammarError: llguidance is not installed.
        """
        known = self._known.pop(source, None)  # put back last: a thread that reads requests may ask
        if known is None:
            known = self._compile(source)
            self.num_misses += 1
        else:
            self.num_hits += 1
            self._num_cached_chars -= len(source.text)
        self._keep(source, known)
        if isinstance(known, GrammarError):
            raise known.with_traceback(None)
        return known

    def _keep(self, source: ConstraintSource, known: CompiledConstraint | GrammarError) -> None:
        """Remember `known`, and forget what was used longest ago beyond the limits."""
        if source not in self._known:  # another thread may have been sooner
            self._num_cached_chars += len(source.text)
        self._known[source] = known
        while len(self._known) > 1 and (
            len(self._known) > self._max_cached or self._num_cached_chars > self._max_cached_chars
        ):
            forgotten, _ = self._known.popitem(last=False)
            self._num_cached_chars -= len(forgotten.text)

    def _compile(self, source: ConstraintSource) -> CompiledConstraint | GrammarError:
        tokenizer = self._llguidance_tokenizer()
        error = TRIALS.make(source, self._timeout)
        if error is not None:
            return error
        if source.kind == "regex":
            tokenizer = self._tokenizer_of_words
        matcher = with_large_stack(partial(compile_source, tokenizer, source))
        if isinstance(matcher, GrammarError):
            return matcher
        states = GrammarStates(matcher, self._vocabulary, tokenizer.eos_token)
        constraint = CompiledConstraint(source, states)
        first = constraint.new_row()
        if failure := first.failure:
            return GrammarError((source.kind,), f"no output can keep it: {failure}")
        return constraint

    @cached_property
    def _vocabulary(self) -> VocabularyIndex:
        token_bytes = self._tokenizer.token_bytes
        return VocabularyIndex(token_bytes, self._vocab_size, self._eos_token_id)

    @cached_property
    def _tokenizer_of_words(self) -> "LLTokenizer":
        """The same, quicker with masks that hold all words: half of what a regex's mask takes."""
        return self._llguidance_tokenizer().with_slices(WORDS)

    def _llguidance_tokenizer(self) -> "LLTokenizer":
        """Return the tokenizer as llguidance knows it, made when it is first needed."""
        if self._bridge is None:
            if any(find_spec(name) is None for name in _NEEDED_MODULES):
                raise MissingGrammarError
            from llguidance import LLTokenizer  # noqa: PLC0415 - an optional dependency

            vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_id)
            self._bridge = LLTokenizer(vocabulary)  # type: ignore[arg-type] # it asks for no more
        return self._bridge


class _Vocabulary:
    """What llguidance reads of a tokenizer.

    Only ids with text are ever allowed: not the special ones, not those the model alone knows.
    EOS ends an output and has no text, whatever the tokenizer says.
    """

    is_tokenizer_wrapper = True  # what llguidance goes by
    bos_token_id = None
    special_token_ids = ()  # those without text are anyway

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int | None) -> None:
        tokens = list(tokenizer.token_bytes[:vocab_size])
        tokens += [b""] * (vocab_size - len(tokens))
        if eos_token_id is not None:
            tokens[eos_token_id] = b""
        self.tokens = tokens
        self.eos_token_id = eos_token_id  # if None, llguidance adds an id after the last

    def __call__(self, text: str) -> list[int]:
        """Refuse to tokenize: masks that force nothing never ask."""
        raise NotImplementedError
