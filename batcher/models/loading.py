"""Load a model by name: `simulated`, a checkpoint, `hf:NAME`, `package.module:name`.

Adapters of other models are imported only when needed.
"""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from batcher.errors import (
    RUN_ERROR_CODES,
    BatchdecodeError,
    Failure,
    LostModelError,
    ModelError,
    describe,
    writable,
)
from batcher.foreign import (
    RaisedError,
    attribute_of,
    calling,
    child_ends_here,
    has_attribute,
    import_object,
    meant_server,
    note_raised,
    raised,
)
from batcher.models.base import (
    Batch,
    Chunk,
    FloatArray,
    Model,
    ModelOutput,
    OutputKind,
    PagedModel,
    Prefixes,
    Tokenizer,
    TopLogits,
    can_page,
    can_score,
    can_verify,
    can_verify_trees,
    eos_token_ids_of,
    extend_prefixes,
    told,
)
from batcher.models.simulated import SimulatedModel, SimulatedSettings
from batcher.models.tokenizers import checked_tokenizer, shown
from batcher.request import MAX_INT
from batcher.settings import ONE_GROUP, CacheWindows
from batcher.transformer.config import PREFIX, HFSettings, TransformerSettings, is_checkpoint, is_hf

if TYPE_CHECKING:
    from batcher.models.callables import CallSettings, PrefixModel


# A user's Model, whose answers are validated.


class CheckedModel:
    """Passes calls on to `inner`, and fails the rows of invalid answers.

    An exception of `inner` is a ModelError in a step, and a RaisedError elsewhere. Without `fork`,
    `inner` gets the whole prefix of a forked row as a new one. Paged models have nothing to fork.
    """

    def __init__(self, inner: Model) -> None:
        self.inner = inner
        self.gives: OutputKind = attribute_of(inner, "gives", "tokens")
        self.is_paged, self.scores_prompts = can_page(inner), can_score(inner)
        self.verifies_drafts, self.verifies_trees = can_verify(inner), can_verify_trees(inner)
        self.recomputes_drafts = attribute_of(inner, "recomputes_drafts", None) is True
        self._has_fork = callable(attribute_of(inner, "fork", None))
        self._prefixes: Prefixes | None = None
        self._forked: set[int] = set()  # slots whose rows `inner` has not seen
        self.name, self.settings = inner.name, inner.settings
        self.tokenizer: Tokenizer = inner.tokenizer
        self.vocab_size, self.eos_token_id = inner.vocab_size, inner.eos_token_id
        self._num_slots, self._is_paging = 0, False

    def allocate(self, num_slots: int) -> None:
        self._num_slots, self._is_paging = num_slots, False
        self._prefixes = None if self._has_fork else {}
        self._forked.clear()
        with calling(f"{self.name} cannot make room for {num_slots} rows:"):
            self.inner.allocate(num_slots)

    def allocate_pages(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
        self._num_slots, self._prefixes, self._is_paging = num_slots, None, True
        self._forked.clear()
        count = "blocks" if num_blocks is None else f"{num_blocks} blocks"
        room = f"{num_slots} rows in {count} of {block_size} tokens"
        with calling(f"{self.name} cannot make room for {room}:"):
            cast(PagedModel, self.inner).allocate_pages(num_slots, num_blocks, block_size)

    def fork(self, source: int, target: int) -> None:
        if self._prefixes is not None:
            if target in self._prefixes:
                self.release(target)
            self._prefixes[target] = self._prefixes[source].copy()
            self._forked.add(target)
        elif not self._is_paging:
            with calling(f"{self.name} cannot fork slot {source}:"):
                self.inner.fork(source, target)

    def release(self, slot: int) -> None:
        if self._prefixes is not None:
            self._prefixes.pop(slot, None)
            if slot in self._forked:
                self._forked.remove(slot)
                return
        with calling(f"{self.name} cannot release slot {slot}:"):
            self.inner.release(slot)

    def forward(self, batch: Batch) -> ModelOutput:
        """Return the model's answer, with invalid token ids among its failures."""
        # copied, since the model may change the batch
        token_slots, logit_slots, top_slots = batch.slots, batch.logit_slots, batch.top_slots
        computed = {*token_slots.tolist(), *(chunk.slot for chunk in batch.chunks)}
        num_slots, vocab_size = self._num_slots, self.vocab_size
        for others in (logit_slots, top_slots):
            if others.size:
                token_slots = np.setdiff1d(token_slots, others, assume_unique=True)
        if self._prefixes is not None:
            prefixes = self._prefixes
            extend_prefixes(prefixes, batch)
            due = {slot for slot in self._forked if batch.holds(slot)}
            if due:
                by_slot = {chunk.slot: chunk for chunk in batch.chunks}
                by_slot |= {slot: Chunk(slot, prefixes[slot].copy(), 0) for slot in due}
                batch.chunks = [by_slot[slot] for slot in sorted(by_slot)]
                self._forked -= due
        if any(isinstance(chunk.token_ids, array) for chunk in batch.chunks):
            batch.chunks = [replace(chunk, token_ids=[*chunk.token_ids]) for chunk in batch.chunks]
        chunks = list(batch.chunks)  # as above
        num_drafts = sum(chunk.num_drafts for chunk in chunks)
        try:
            with child_ends_here():
                output = self.inner.forward(batch)
            failed: dict[int, str | Failure] = {}
            for slot, why in dict(output.failed).items():
                if isinstance(why, Failure) and why.code in RUN_ERROR_CODES:
                    failed[slot] = Failure(why.code, writable(why.message))
                else:
                    failed[slot] = writable(why) if isinstance(why, str) else shown(why)
            answered = np.asarray(output.tokens) if token_slots.size else None
            logits = np.asarray(output.logits) if logit_slots.size else None
            after_drafts = np.asarray(output.draft_logits) if num_drafts else None
            top = self._checked_top(output.top_logits, len(top_slots)) if top_slots.size else None
            scores = dict(output.chunk_logits) if any(chunk.is_scored for chunk in chunks) else {}
        except (KeyboardInterrupt, LostModelError):
            raise
        except ModelError as error:
            raise ModelError(describe(error).removeprefix("ModelError: ")) from error
        except BaseException as error:  # user code may raise anything
            note_raised(raised(error))
            raise ModelError(f"{self.name} raised {describe(error)}") from error
        if not failed.keys() <= computed:
            raise ModelError(f"{self.name} failed rows that it was not asked for: {list(failed)}")
        tokens = np.zeros(num_slots, np.int64)
        if answered is not None:
            if answered.shape != (num_slots,) or answered.dtype.kind not in "iu":
                shape = f"{answered.dtype} {list(answered.shape)}"
                raise ModelError(f"{self.name} returned {shape}, not integers [{num_slots}]")
            largest = MAX_INT if vocab_size is None else vocab_size - 1
            is_good = (answered[token_slots] >= 0) & (answered[token_slots] <= largest)
            tokens[token_slots[is_good]] = answered[token_slots[is_good]]
            for slot in token_slots[~is_good].tolist():
                said = f"{self.name} returned {answered[slot]}, not a token id"
                failed.setdefault(slot, f"{said} from 0 to {largest}")
        checked_scores = {
            chunk.slot: self._pieces(scores.get(chunk.slot, ()), len(chunk.token_ids))
            for chunk in chunks
            if chunk.is_scored
        }
        if logits is not None:
            logits = self._logits(logits, logit_slots.size)
        if after_drafts is not None:
            after_drafts = self._logits(after_drafts, num_drafts, "drafts")
        return ModelOutput(tokens, failed, logits, checked_scores, after_drafts, top)

    def _checked_top(self, top: TopLogits | None, num_rows: int) -> TopLogits:
        shapes = [part.shape for part in top[:5]] if top else []
        if not top or shapes[2:] != [(num_rows,), shapes[0], (num_rows,)] or shapes[0] != shapes[1]:
            raise ModelError(f"{self.name} returned largest logits {shapes} for {num_rows} rows")
        return top

    def _pieces(self, pieces: Iterable[Any], num_tokens: int) -> Iterator[FloatArray]:
        num_left = num_tokens
        try:
            for answered in pieces:
                piece = np.asarray(answered)
                num_left -= len(piece)
                yield self._logits(piece, len(piece))
        except (ModelError, LostModelError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # as in forward
            raise ModelError(f"{self.name} raised {describe(error)}") from error
        if num_left:
            found = f"logits of {num_tokens - num_left} tokens"
            raise ModelError(f"{self.name} returned {found}, not of the {num_tokens} of the chunk")

    def _logits(self, answered: NDArray[Any], num_rows: int, whose: str = "") -> FloatArray:
        if answered.shape != (num_rows, self.vocab_size) or answered.dtype.kind not in "iuf":
            shape = f"{answered.dtype} {list(answered.shape)}"
            wanted = f"[{num_rows}, {self.vocab_size}]"
            kind = f"logits of {whose}" if whose else "logits"
            raise ModelError(f"{self.name} returned {kind} {shape}, not numbers {wanted}")
        with np.errstate(over="ignore"):  # too large ones become infinite
            return np.ascontiguousarray(answered, np.float32)


S = TypeVar("S", bound=msgspec.Struct)

ATTRIBUTES = ("name", "settings", "tokenizer", "vocab_size", "eos_token_id")  # of a Model
_KNOWN = "simulated, smollm2, FILE.gguf, a folder, hf:NAME, openai:URL"
_LIKE_A_NAME_OF_THE_HUB = re.compile(
    r"\w[\w.-]*/\w[\w.-]*|(distil)?gpt2(-medium|-large|-xl)?", re.ASCII
)
_LIKE_A_URL = re.compile(r"https?://.+|[\w.-]+:\d+(/.*)?", re.ASCII)
MAX_LOGITS = 2**24  # more than any vocabulary; a row of them is 64 MiB


def load_model(
    spec: str,
    settings: Mapping[str, Any] = MappingProxyType({}),
    watch: Callable[[int, int], None] = lambda _number, _total: None,
) -> Model:
    """Return the model that `spec` names.

    spec: "simulated"; or "package.module:name" of a callable, a Model, an LLM or a class of one of
    them, importable from the current folder; or a .gguf file, a folder or `smollm2`, a checkpoint;
    or `hf:` and a folder or a name on the Hub.
    settings: SimulatedSettings, CallSettings, TransformerSettings or HFSettings, in this order.
    watch: called with the number of tensors of a checkpoint that are read, and their total.

    Raises:
        BatchdecodeError: there is no such model, or the settings do not apply to it.
    """
    if spec == "simulated":
        return SimulatedModel(_settings(settings, SimulatedSettings, "simulated model"))
    if is_checkpoint(spec):
        from batcher.models.checkpoints import load_transformer  # noqa: PLC0415 - see above

        made = _settings(settings, TransformerSettings, "transformer")
        return as_model(load_transformer(spec, made, watch), spec)
    if is_hf(spec):
        from batcher.models.checkpoints import load_hf  # noqa: PLC0415 - as above

        return as_model(load_hf(spec, _settings(settings, HFSettings, "hf")), spec)
    from batcher.models.callables import CallSettings  # noqa: PLC0415 - as above

    call_settings = _settings(settings, CallSettings, "llm")
    meant = f"{PREFIX}{spec}" if _LIKE_A_NAME_OF_THE_HUB.fullmatch(spec) else None
    if _LIKE_A_URL.fullmatch(spec):
        meant = meant or meant_server(spec)
    if meant is not None:
        raise BatchdecodeError(f"unknown model {spec!r} (did you mean {meant}?), known: {_KNOWN}")
    return as_model(import_object(spec, "model", _KNOWN), spec, call_settings)


def as_model(
    model: object, name: str | None = None, call_settings: "CallSettings | None" = None
) -> Model:
    """Return `model` as a Model; a class is instantiated, and a text is loaded by `load_model`.

    call_settings: of an LLM.

    Raises:
        BatchdecodeError: it is no model, its class raises, or an LLM does not answer.
    """
    if isinstance(model, str):
        return load_model(model)
    try:
        made = model
        if isinstance(model, type):
            with calling(f"cannot make a {model.__name__}:"):
                made = model()
        adapted = made if isinstance(made, SimulatedModel) else _adapted(made, name, call_settings)
        check_description(adapted)
        adapted.tokenizer = checked_tokenizer(adapted.tokenizer, adapted.vocab_size)
    except (BatchdecodeError, KeyboardInterrupt):
        raise
    except BaseException as error:  # attributes of the model may raise anything
        called, why = name or shown(model), raised(error)
        raise RaisedError(f"{called} cannot be used: {why}", why) from error
    return adapted


def _adapted(
    model: Any, name: str | None, call_settings: "CallSettings | None"
) -> "PrefixModel | CheckedModel":
    from batcher.models import callables  # noqa: PLC0415 - see above

    if isinstance(model, callables.PrefixModel | CheckedModel):
        return model
    whose = name or shown(model)
    if has_attribute(model, "forward") and has_attribute(model, "allocate"):
        for needed in ATTRIBUTES:
            if not has_attribute(model, needed):
                raise BatchdecodeError(f"{whose} is not a Model: it lacks {needed}")
        checked = CheckedModel(model)
        fault = None
        if checked.is_paged and not has_attribute(model, "allocate_pages"):
            fault = "is_paged, and lacks allocate_pages"
        elif checked.verifies_drafts and not checked.is_paged:
            fault = "verifies_drafts, and is not paged"
        elif checked.verifies_drafts and checked.gives == "tokens":
            fault = "verifies_drafts, and gives no logits"
        if fault is not None:
            raise BatchdecodeError(f"{whose} says that it {fault}")
        return checked
    missing = missing_methods(model)
    if not missing:
        return callables.LLMModel(model, name, call_settings)
    if callable(model):
        return callables.CallableModel(model, name)
    lacks = f", which would need {missing[0]}, nor" if len(missing) == 1 else " nor"
    raise BatchdecodeError(f"{whose} is neither a Model nor an LLM{lacks} callable")


def missing_methods(model: object) -> list[str]:
    methods = ("next_token_logits", "get_stop_token_id")
    return [method for method in methods if not callable(getattr(model, method, None))]


def check_description(model: Any) -> None:
    """Make sure that a model says of itself what the engine builds on."""

    def is_int(value: Any, least: int, most: int | None) -> bool:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return is_number and least <= value and (most is None or value <= most)

    is_token_id, size = partial(is_int, least=0, most=MAX_INT), model.vocab_size
    kinds = getattr(model, "KINDS", get_args(OutputKind))
    several, fault = told(model, "eos_token_ids", ()), None
    if not isinstance(model.name, str) or writable(model.name) != model.name:
        fault = "name is not text"
    elif model.gives not in kinds:
        fault = f"gives is not one of {', '.join(kinds)}"
    elif size is not None and not is_int(size, 1, None):
        fault = "vocab_size is neither a positive int nor None"
    elif model.eos_token_id is not None and not is_token_id(model.eos_token_id):
        fault = "eos_token_id is neither a token id nor None"
    elif not isinstance(several, list | tuple) or not all(map(is_token_id, several)):
        fault = "eos_token_ids are not a list of token ids"
    elif not isinstance(model.settings, dict):
        fault = "settings are not a dict"
    elif size is None:
        fault = None if model.gives == "tokens" else "vocab_size is None, and it gives logits"
    elif (last := max(eos_token_ids_of(model), default=0)) >= size:
        name = "eos_token_id" if last == model.eos_token_id else "eos_token_ids:"
        fault = f"{name} {last} is not below vocab_size {size}"
    elif size > (largest := MAX_INT + 1 if model.gives == "tokens" else MAX_LOGITS):
        fault = f"vocab_size {shown(size)} is above {largest}"
    try:
        msgspec.json.encode(model.settings)
    except (TypeError, ValueError, RecursionError) as error:
        fault = f"settings do not fit into JSON: {error}"
    if fault is not None:
        name = model.name if isinstance(model.name, str) else shown(model.name)
        raise BatchdecodeError(f"model {writable(name)}: its {fault}")


def _settings(given: Mapping[str, Any], kind: type[S], whose: str) -> S:
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise BatchdecodeError(f"{whose}: {error} (settings: {known})") from None


def cache_windows_of(model: Model) -> CacheWindows:
    """Return for each group of layers, each with a table of its own, how far back they read.

    A model tells that with `cache_windows`: the number of tokens, its own included, that one reads
    in the layers of a group, or None for all before it; 2 for a recurrent state, which is what the
    token before has left.  One without is a single group that reads all.

    Raises:
        BatchdecodeError: what it tells is something else.
    """
    windows = told(model, "cache_windows", ONE_GROUP)
    if (
        type(windows) is tuple
        and windows
        and all(window is None or (type(window) is int and window > 0) for window in windows)
    ):
        return windows
    raise BatchdecodeError(
        f"{model.name}: cache_windows are a tuple of numbers from 1 on, or None for all tokens, "
        f"not {shown(windows)}"
    )
