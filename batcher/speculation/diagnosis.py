"""Diagnose why drafts of a model are rejected: its probabilities compared with the target's.

A draft drawn from q is accepted with probability sum(min(p, q)), where p is the target's
distribution (Leviathan et al. 2023, section 3.2). That overlap is computed at each position of the
target's outputs, as it is, and as it would be without a possible fault.
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

Cause = Literal["tokenizer", "cache", "positions", "temperature", "processor", "weak", "none"]

GOOD = 0.8  # an overlap without faults
_SAME = 0.98  # of what is computed twice, perhaps in another order
_LEAST_GAIN = 0.03  # of overlap, for a setting known to differ
_LEAST_SHARE = 1 / 3  # of the missing overlap: a guessed fault has to explain as much
_NUM_RECOMPUTED = 3  # positions of each row
_NUM_SCALED = 96  # positions to which a temperature is fitted
_SCALES = 2.0 ** np.linspace(-2, 2, 33)
_SURE: dict[Cause, int] = {"tokenizer": 0, "cache": 1}  # certain faults come first
_SLOT = 0


class CauseCheck(Struct, frozen=True, kw_only=True):
    """One possible cause, and whether it is a fault."""

    cause: Cause
    is_fault: bool
    overlap: float | None = None
    text: str


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The overlap of draft and target, and its causes.

    overlap: the mean of sum(min(p, q)); None if the draft cannot read the target's tokens.
    by_position: the same, by position in the output.
    agreement: how often both have the same likeliest token.
    cause: the fault that explains the most.
    """

    num_rows: int
    num_positions: int = 0
    overlap: float | None = None
    agreement: float | None = None
    by_position: list[float] = []
    checks: list[CauseCheck]
    cause: Cause


class TargetOutput(Struct, frozen=True):
    """A request, its prompt, and the target's output of at least one token."""

    request: Request
    prompt: list[int]
    output: list[int]


def can_be_compared(request: Request) -> bool:
    """Return whether the distribution of a token depends on the logits of one row alone."""
    return not (
        request.num_beams > 1
        or request.cfg_scale != 1
        or request.mirostat
        or request.heal
        or request.session is not None
        or any(getattr(request, name) is not None for name in CONSTRAINT_FIELDS)
    )


class Side:
    """One of both models, its logits at each position of rows, and its distributions."""

    def __init__(self, model: Model, rows: Sequence[TargetOutput]) -> None:
        self._model, self._rows = model, rows
        model.allocate(1)
        self._sampler = Sampler(1, model.vocab_size or 0, model.tokenizer)
        self.logits = [self.logits_after(row.prompt, row.output[:-1]) for row in rows]

    def logits_after(self, tokens: Sequence[int], others: Sequence[int] = ()) -> FloatArray:
        """Return the logits [1 + others, vocab] after `tokens`, and after each of `others`."""
        batch = Batch(1)
        batch.join(Chunk(_SLOT, list(tokens), 0))
        batch.logit_slots = np.array([_SLOT])
        rows = []
        for token in [None, *others]:
            if token is not None:
                batch.chunks, batch.tokens[_SLOT] = [], token
            output = self._model.forward(batch)
            if output.failed or output.logits is None:
                why = output.failed.get(_SLOT, "it gives no logits")
                raise ModelError(f"{self._model.name}: {getattr(why, 'message', why)}")
            rows.append(output.logits[0].copy())
        self._model.release(_SLOT)
        return np.stack(rows)

    def probabilities(
        self, requests: Sequence[Request], places: Sequence[tuple[int, int]], scale: float = 1.0
    ) -> list[Floats]:
        """Return the probabilities [vocab] at each of `places`: row, and position in its output.

        requests: the sampling settings of each row. places: ascending.
        scale: factor of the logits.
        """
        found: list[Floats] = []
        for number, of_row in groupby(places, itemgetter(0)):
            positions = [position for _, position in of_row]
            logits = self.logits[number][positions] * np.float32(scale)
            found += self._drawn_from(number, requests[number], positions, logits)
        return found

    def recomputed(self, number: int, request: Request, positions: Sequence[int]) -> list[Floats]:
        """Return the same at positions of a row, computed without the cache."""
        row = self._rows[number]
        logits = (self.logits_after([*row.prompt, *row.output[:at]])[0] for at in positions)
        return self._drawn_from(number, request, positions, logits)

    def _drawn_from(
        self, number: int, request: Request, positions: Sequence[int], logits: Iterable[FloatArray]
    ) -> list[Floats]:
        row, sampler, found, num_known = self._rows[number], self._sampler, [], 0
        stop = request.stop_token
        stops = [] if stop is None else [stop] if isinstance(stop, int) else stop
        eos = () if request.ignore_eos else eos_token_ids_of(self._model)
        no_key = 0
        params = sampling_params(request)
        sampler.open(_SLOT, SamplingRow(params, no_key, row.prompt, (*stops, *eos)))
        for position, own in zip(positions, logits, strict=True):
            sampler.extend({_SLOT: row.output[num_known:position]})
            num_known = position
            found.append(sampler.probabilities(_SLOT, own))
        sampler.close(_SLOT)
        return found


def diagnose(
    rows: Sequence[TargetOutput], target: Model, draft: Model, draft_fields: dict[str, object]
) -> Diagnosis:
    """Return the diagnosis of `draft`."""
    for model in (target, draft):
        if model.gives == "tokens":
            raise BatchdecodeError(f"{model.name} has no logits to compare")
    own_bytes, draft_bytes = target.tokenizer.token_bytes, draft.tokenizer.token_bytes
    used = sorted({token for row in rows for token in (*row.prompt, *row.output)})
    others = [token for token in used if bytes_of(token, own_bytes) != bytes_of(token, draft_bytes)]
    ends, other_ends = (
        " or ".join(map(str, sorted(eos_token_ids_of(model)))) or "no token"
        for model in (target, draft)
    )
    text = f"all {len(used)} tokens have the same text in both vocabularies"
    if others:
        first = others[0]
        known, read = (bytes_of(first, each) for each in (own_bytes, draft_bytes))
        text = (
            f"{len(others)} of {len(used)} tokens differ: {first} is {known!r} for the target, "
            f"{read!r} for the draft"
        )
    elif ends != other_ends:
        text = f"EOS is {ends} for the target, {other_ends} for the draft"
    checks: list[CauseCheck] = []

    def add(cause: Cause, text: str, *, is_fault: bool, overlap: float | None = None) -> None:
        checks.append(CauseCheck(cause=cause, is_fault=is_fault, overlap=overlap, text=text))

    add("tokenizer", text, is_fault=bool(others) or ends != other_ends)
    if max(max([*row.prompt, *row.output]) for row in rows) >= (draft.vocab_size or 0):
        return Diagnosis(num_rows=len(rows), checks=checks, cause="tokenizer")
    ours, theirs = Side(target, rows), Side(draft, rows)
    places = [(number, at) for number, row in enumerate(rows) for at in range(len(row.output))]
    wanted = ours.probabilities([row.request for row in rows], places)
    draft_requests = [replace(row.request, **draft_fields) for row in rows]
    drawn = theirs.probabilities(draft_requests, places)
    overlaps = _overlaps(wanted, drawn)
    overlap = float(overlaps.mean())

    def explains(gain: float) -> bool:
        return gain >= max(_LEAST_GAIN, _LEAST_SHARE * (1 - overlap))

    # with the cache, compared with a run without it
    index, again = [], []
    for number, row in enumerate(rows):
        some = np.linspace(len(row.output) - 1, 0, _NUM_RECOMPUTED).astype(np.intp)
        positions = np.unique(some).tolist()
        index += [places.index((number, at)) for at in positions]
        again += theirs.recomputed(number, draft_requests[number], positions)
    same = float(_overlaps([drawn[at] for at in index], again).mean())
    text = f"overlap {same:.3f} with a run without its cache, at {len(index)} positions"
    beside = float(_overlaps([wanted[at] for at in index], again).mean())
    add("cache", text, is_fault=same < _SAME, overlap=beside)
    # with one more setting of the request
    for name in SAMPLING_FIELDS:
        values, own = [getattr(row.request, name) for row in rows], draft_fields.get(name)
        other = next((value for value in values if value != own), own)
        if name not in draft_fields or other == own:
            continue
        pairs = zip(draft_requests, values, strict=True)
        requests = [replace(request, **{name: value}) for request, value in pairs]
        without = float(_overlaps(wanted, theirs.probabilities(requests, places)).mean())
        add(
            "temperature" if name == "temperature" else "processor",
            f"{name} is {other} for the target, {own} for the draft",
            is_fault=without >= overlap + _LEAST_GAIN,
            overlap=without,
        )
    # the temperature of the best overlap
    every = -(-len(places) // _NUM_SCALED)
    found = []
    for scale in _SCALES:
        scaled = theirs.probabilities(draft_requests, places[::every], scale)
        found.append(float(_overlaps(wanted[::every], scaled).mean()))
    best, here = int(np.argmax(found)), found[len(_SCALES) // 2]
    gain, text = found[best] - here, "the overlap is largest at its own temperature"
    if gain > 0 and _SCALES[best] != 1:
        text = f"the overlap is largest at {1 / _SCALES[best]:.2g} times its temperature"
    add("temperature", text, is_fault=explains(gain), overlap=overlap + gain)
    # compared with the target's neighbouring positions
    shifted = {}
    for shift in (-1, 1):
        shifts = [
            (wanted[at + shift], drawn[at])
            for at, (number, place) in enumerate(places)
            if 0 <= place + shift < len(rows[number].output)
        ]
        if shifts:
            shifted[shift] = float(_overlaps(*zip(*shifts, strict=True)).mean())
    nearest = max(shifted, key=shifted.__getitem__, default=0)
    beside = shifted.get(nearest, 0.0)
    words = {-1: "the previous", 1: "the next", 0: "any other"}[nearest]
    text = f"compared with the target at {words} position"
    add("positions", text, is_fault=explains(beside - overlap), overlap=beside)
    faults = [check for check in checks if check.is_fault]
    faults.sort(key=lambda check: (_SURE.get(check.cause, 2), -(check.overlap or 0.0)))
    is_same = [
        our.argmax(axis=-1) == their.argmax(axis=-1)
        for our, their in zip(ours.logits, theirs.logits, strict=True)
    ]
    at_place = np.array([place for _, place in places])
    return Diagnosis(
        num_rows=len(rows),
        num_positions=len(places),
        overlap=overlap,
        agreement=float(np.concatenate(is_same).mean()),
        by_position=[
            float(overlaps[at_place == place].mean()) for place in range(at_place.max() + 1)
        ],
        checks=checks,
        cause=faults[0].cause if faults else "none" if overlap >= GOOD else "weak",
    )


def _overlaps(wanted: Sequence[Floats], drawn: Sequence[Floats]) -> Floats:
    overlaps = []
    for ours, theirs in zip(wanted, drawn, strict=True):
        width = min(len(ours), len(theirs))
        overlaps.append(float(np.minimum(ours[:width], theirs[:width]).sum()))
    return np.array(overlaps)
