"""Why drafts of a model are not accepted: its probabilities beside those of its target.

A draft that is drawn from q is accepted with the probability sum(min(p, q)), p being what its
target draws from (Leviathan et al. 2023, section 3.2).  That overlap is what is looked at in each
position of what the target wrote, as it is, and as it would be without a fault that there may be.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batcher.decoding.filters import sampling_params
from batcher.decoding.logprobs import Floats
from batcher.decoding.sampling import Sampler, SamplingRow
from batcher.errors import BatchdecodeError, ModelError
from batcher.models.base import Batch, Chunk, FloatArray, Model, bytes_of, eos_token_ids_of
from batcher.request import CONSTRAINT_FIELDS, SAMPLING_FIELDS, Request

# What a model gives at each position of rows, token by token or all at once.

_SLOT = 0
_NO_KEY = 0  # nothing is drawn


class TargetOutput(Struct, frozen=True):
    """A request, its prompt, and what the target wrote, of at least one token."""

    request: Request
    prompt: list[int]
    output: list[int]


class RowLogits:
    """Asks a model, which nobody else uses, about one row at a time."""

    def __init__(self, model: Model) -> None:
        self._model = model
        model.allocate(1)

    def step_by_step(self, tokens: Sequence[int], num_prompt: int) -> FloatArray:
        """Return the logits [tokens after the prompt, vocab] that each of them is chosen by.

        The prompt is computed at once, and then a token at a time, as when the row is decoded.

        Raises:
            ModelError: the model fails.
        """
        batch = self._begin(tokens[:num_prompt])
        rows = [self._forward(batch)]
        for token in tokens[num_prompt:-1]:
            batch.chunks = []
            batch.tokens[_SLOT] = token
            rows.append(self._forward(batch))
        self._model.release(_SLOT)
        return np.stack(rows)

    def at_once(self, tokens: Sequence[int]) -> FloatArray:
        """Return the logits [vocab] after `tokens`, none of which is in the cache.

        Raises:
            ModelError: the model fails.
        """
        logits = self._forward(self._begin(tokens))
        self._model.release(_SLOT)
        return logits

    def _begin(self, tokens: Sequence[int]) -> Batch:
        batch = Batch(1)
        batch.join(Chunk(_SLOT, list(tokens), 0))
        batch.logit_slots = np.array([_SLOT])
        return batch

    def _forward(self, batch: Batch) -> FloatArray:
        output = self._model.forward(batch)
        if output.failed or output.logits is None:
            why = output.failed.get(_SLOT, "it gives no logits")
            raise ModelError(f"{self._model.name}: {getattr(why, 'message', why)}")
        logits: FloatArray = output.logits[0].copy()
        return logits


class Side:
    """A model, its logits at each position of all rows, and the probabilities that they become."""

    def __init__(self, model: Model, rows: Sequence[TargetOutput]) -> None:
        self._rows, self._row_logits = rows, RowLogits(model)
        self._sampler = Sampler(1, model.vocab_size or 0, model.tokenizer)
        self._eos = eos_token_ids_of(model)
        self.logits = [
            self._row_logits.step_by_step([*row.prompt, *row.output], len(row.prompt))
            for row in rows
        ]

    def probabilities(
        self, requests: Sequence[Request], places: Sequence[tuple[int, int]], scale: float = 1.0
    ) -> list[Floats]:
        """Return the probabilities [vocab] at each of `places`: row, and position in its output.

        requests: of each row, how it is drawn from.  places: ascending.
        scale: what logits are multiplied by.
        """
        found: list[Floats] = []
        for number, of_row in groupby(places, itemgetter(0)):
            positions = [position for _, position in of_row]
            logits = self.logits[number][positions] * np.float32(scale)
            found += self._drawn_from(number, requests[number], positions, logits)
        return found

    def recomputed(self, number: int, request: Request, positions: Sequence[int]) -> list[Floats]:
        """Return the same at positions of a row, without what the model has in its cache."""
        row = self._rows[number]
        logits = (
            self._row_logits.at_once([*row.prompt, *row.output[:position]])
            for position in positions
        )
        return self._drawn_from(number, request, positions, logits)

    def _drawn_from(
        self,
        number: int,
        request: Request,
        positions: Sequence[int],
        logits: Iterable[FloatArray],
    ) -> list[Floats]:
        """Return what a row is drawn from at `positions` of its output, by the logits of each."""
        row, sampler, found, num_known = self._rows[number], self._sampler, [], 0
        stop = request.stop_token
        stops = [] if stop is None else [stop] if isinstance(stop, int) else stop
        eos = () if request.ignore_eos else self._eos
        params = sampling_params(request)
        sampler.open(_SLOT, SamplingRow(params, _NO_KEY, row.prompt, (*stops, *eos)))
        for position, own in zip(positions, logits, strict=True):
            sampler.extend({_SLOT: row.output[num_known:position]})
            num_known = position
            found.append(sampler.probabilities(_SLOT, own))
        sampler.close(_SLOT)
        return found


Cause = Literal["tokenizer", "cache", "positions", "temperature", "processor", "weak", "none"]

GOOD = 0.8  # an overlap from which on nothing is wrong with a draft
_SAME = 0.98  # of what is computed twice, which may be in another order
_LEAST_GAIN = 0.03  # of overlap, for a setting that is known to be another one
_LEAST_SHARE = 1 / 3  # of what is missing: a fault that is guessed has to explain as much
_NUM_RECOMPUTED = 3  # positions of each row
_NUM_SCALED = 96  # positions that a temperature is fitted to
_SCALES = 2.0 ** np.linspace(-2, 2, 33)
_FIELDS = [name for name in SAMPLING_FIELDS if name != "seed"]


class CauseCheck(Struct, frozen=True, kw_only=True):
    """What was looked at, and whether it is a fault; cause: which one it would be.

    overlap: what there would be without it, None if that cannot be told.
    """

    cause: Cause
    is_fault: bool
    overlap: float | None
    text: str


class Diagnosis(Struct, frozen=True, kw_only=True):
    """Why drafts are accepted as often as they are.

    overlap: the mean of sum(min(p, q)), None if the draft cannot read the target's tokens.
    by_position: the same, by how many tokens were written before.
    agreement: how often both think the same token the likeliest.
    cause: the fault that explains the most.
    """

    num_rows: int
    num_positions: int
    overlap: float | None
    agreement: float | None
    by_position: list[float]
    checks: list[CauseCheck]
    cause: Cause


def can_be_compared(request: Request) -> bool:
    """Return whether what a token is drawn from follows from the logits of one row alone."""
    return not (
        request.num_beams > 1
        or request.cfg_scale != 1
        or request.mirostat
        or request.heal
        or request.session is not None
        or any(getattr(request, name) is not None for name in CONSTRAINT_FIELDS)
    )


def diagnose(
    rows: Sequence[TargetOutput], target: Model, draft: Model, draft_fields: dict[str, object]
) -> Diagnosis:
    """Return what is wrong with `draft`.

    rows: those of `target`.  draft_fields: sampling fields that are others for the draft.

    Raises:
        BatchdecodeError: a model gives no logits, or fails.
    """
    for model in (target, draft):
        if model.gives == "tokens":
            raise BatchdecodeError(f"{model.name} gives no logits, so there is nothing to compare")
    tokenizer = _tokenizer_check(rows, target, draft)
    readable = draft.vocab_size or 0
    if max(max([*row.prompt, *row.output]) for row in rows) >= readable:
        return Diagnosis(
            num_rows=len(rows),
            num_positions=0,
            overlap=None,
            agreement=None,
            by_position=[],
            checks=[tokenizer],
            cause="tokenizer",
        )
    return _Comparison(rows, target, draft, draft_fields).diagnosis(tokenizer)


class _Comparison:
    """Both models' logits at each position of all rows, and what is made of them."""

    def __init__(
        self,
        rows: Sequence[TargetOutput],
        target: Model,
        draft: Model,
        draft_fields: dict[str, object],
    ) -> None:
        self._rows, self._draft_fields = rows, draft_fields
        self._target, self._draft = Side(target, rows), Side(draft, rows)
        self._draft_requests = [replace(row.request, **draft_fields) for row in rows]
        self._places = [
            (number, place) for number, row in enumerate(rows) for place in range(len(row.output))
        ]
        requests = [row.request for row in rows]
        self._wanted = self._target.probabilities(requests, self._places)
        self._drawn = self._draft.probabilities(self._draft_requests, self._places)
        self._overlaps = _overlaps(self._wanted, self._drawn)
        self._overlap = float(self._overlaps.mean())

    def diagnosis(self, tokenizer: CauseCheck) -> Diagnosis:
        """Return what is wrong; tokenizer: what was found out of those of both."""
        checks = [tokenizer, self._cache(), *self._fields(), self._temperature(), self._positions()]
        faults = [check for check in checks if check.is_fault]
        faults.sort(key=_rank)
        cause: Cause = "none" if self._overlap >= GOOD else "weak"
        places = np.array([place for _, place in self._places])
        return Diagnosis(
            num_rows=len(self._rows),
            num_positions=len(self._places),
            overlap=self._overlap,
            agreement=self._agreement(),
            by_position=[
                float(self._overlaps[places == place].mean()) for place in range(places.max() + 1)
            ],
            checks=checks,
            cause=faults[0].cause if faults else cause,
        )

    def _agreement(self) -> float:
        pairs = zip(self._target.logits, self._draft.logits, strict=True)
        same = [ours.argmax(axis=-1) == theirs.argmax(axis=-1) for ours, theirs in pairs]
        return float(np.concatenate(same).mean())

    def _cache(self) -> CauseCheck:
        """Compare what the draft gives token by token with what it gives without its cache."""
        places, drawn = [], []
        for number, row in enumerate(self._rows):
            length = len(row.output)
            some = np.unique(np.linspace(length - 1, 0, _NUM_RECOMPUTED).astype(np.intp))
            places += [(number, place) for place in some.tolist()]
            drawn += self._draft.recomputed(number, self._draft_requests[number], some.tolist())
        index = [self._places.index(place) for place in places]
        same = float(_overlaps([self._drawn[at] for at in index], drawn).mean())
        overlap = float(_overlaps([self._wanted[at] for at in index], drawn).mean())
        text = f"without its cache it gives {same:.3f} of the same, at {len(places)} positions"
        return CauseCheck(cause="cache", is_fault=same < _SAME, overlap=overlap, text=text)

    def _fields(self) -> list[CauseCheck]:
        """Compare with what the draft would give if one more setting was the request's."""
        checks = []
        for name in _FIELDS:
            values = [getattr(row.request, name) for row in self._rows]
            theirs = self._draft_fields.get(name)
            other = next((value for value in values if value != theirs), theirs)
            if name not in self._draft_fields or other == theirs:
                continue
            requests = [
                replace(request, **{name: value})
                for request, value in zip(self._draft_requests, values, strict=True)
            ]
            overlap = self._overlap_with(self._draft.probabilities(requests, self._places))
            cause: Cause = "temperature" if name == "temperature" else "processor"
            text = f"{name} is {other} for the target, and {theirs} for the draft"
            is_fault = overlap >= self._overlap + _LEAST_GAIN
            checks.append(CauseCheck(cause=cause, is_fault=is_fault, overlap=overlap, text=text))
        return checks

    def _temperature(self) -> CauseCheck:
        """Look for a temperature at which the draft would be nearest."""
        every = -(-len(self._places) // _NUM_SCALED)
        some = self._places[::every]
        wanted = self._wanted[::every]
        found = [
            float(
                _overlaps(wanted, self._draft.probabilities(self._draft_requests, some, s)).mean()
            )
            for s in _SCALES
        ]
        best = int(np.argmax(found))
        here = found[len(_SCALES) // 2]
        scale = float(_SCALES[best]) if found[best] > here else 1.0
        text = "it is nearest at its own temperature"
        if scale != 1:
            text = f"it is nearest at {1 / scale:.2g} times its temperature"
        gain = found[best] - here
        overlap, is_fault = self._overlap + gain, self._explains(gain)
        return CauseCheck(cause="temperature", is_fault=is_fault, overlap=overlap, text=text)

    def _positions(self) -> CauseCheck:
        """Compare each position of the draft with those of the target beside it."""
        shifted = {}
        for shift in (-1, 1):
            pairs = [
                (self._wanted[at + shift], self._drawn[at])
                for at, (number, place) in enumerate(self._places)
                if 0 <= place + shift < len(self._rows[number].output)
            ]
            if pairs:
                wanted, drawn = zip(*pairs, strict=True)
                shifted[shift] = float(_overlaps(wanted, drawn).mean())
        best = max(shifted, key=shifted.__getitem__, default=0)
        overlap = shifted.get(best, 0.0)
        words = {-1: "before", 1: "after", 0: "beside"}[best]
        text = f"with what the target gives one position {words} it"
        is_fault = self._explains(overlap - self._overlap)
        return CauseCheck(cause="positions", is_fault=is_fault, overlap=overlap, text=text)

    def _explains(self, gain: float) -> bool:
        """Return whether so much overlap is a good part of what is missing."""
        return gain >= max(_LEAST_GAIN, _LEAST_SHARE * (1 - self._overlap))

    def _overlap_with(self, drawn: Sequence[Floats]) -> float:
        return float(_overlaps(self._wanted, drawn).mean())


def _overlaps(wanted: Sequence[Floats], drawn: Sequence[Floats]) -> Floats:
    """Return sum(min(p, q)) [positions]; a token that only one of both has is worth nothing."""
    overlaps = []
    for ours, theirs in zip(wanted, drawn, strict=True):
        width = min(len(ours), len(theirs))
        overlaps.append(float(np.minimum(ours[:width], theirs[:width]).sum()))
    return np.array(overlaps)


def _rank(check: CauseCheck) -> tuple[int, float]:
    """Return what faults are sorted by: those that are seen at once, then what explains most."""
    sure: dict[Cause, int] = {"tokenizer": 0, "cache": 1}
    return sure.get(check.cause, 2), -(check.overlap or 0.0)


def _tokenizer_check(rows: Sequence[TargetOutput], target: Model, draft: Model) -> CauseCheck:
    """Compare what both models read in the tokens of `rows`, and what ends their texts."""
    ours, theirs = target.tokenizer.token_bytes, draft.tokenizer.token_bytes
    used = sorted({token for row in rows for token in (*row.prompt, *row.output)})
    others = [token for token in used if bytes_of(token, ours) != bytes_of(token, theirs)]
    if others:
        first = others[0]
        text = (
            f"{len(others)} of {len(used)} tokens are others for the draft: {first} is "
            f"{bytes_of(first, ours)!r}, and {bytes_of(first, theirs)!r} for the draft"
        )
        return CauseCheck(cause="tokenizer", is_fault=True, overlap=None, text=text)
    ends, other_ends = eos_token_ids_of(target), eos_token_ids_of(draft)
    if set(ends) != set(other_ends):
        text = f"texts end with {_ids(ends)}, and with {_ids(other_ends)} for the draft"
        return CauseCheck(cause="tokenizer", is_fault=True, overlap=None, text=text)
    text = f"both read all {len(used)} tokens alike"
    return CauseCheck(cause="tokenizer", is_fault=False, overlap=None, text=text)


def _ids(token_ids: Sequence[int]) -> str:
    return " or ".join(map(str, token_ids)) or "no token"
