"""Fits the terms of a profile to a log of real step times, and states the errors of the fit.

With c = w / f, max(w, f*T) is f * max(c, T): for a given c all terms are linear, so the fit is a
search for c around least squares of the relative errors.

Steps that only decode, steps of prompts and mixed steps say little of each other.  The cost of
decoding is part of all steps, and prompts have terms of their own that can absorb errors.  So each
kind has its fixed share of the weights (SHARES, decoding the largest), and errors of its own.
"""

from array import array
from collections.abc import Callable, Iterable
from itertools import combinations, pairwise
from operator import add
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError
from batcher.events import StepsEvent

Positive = Annotated[int, Meta(ge=1, le=2**40)]
NotNegative = Annotated[int, Meta(ge=0, le=2**53)]  # exact as a float

TRACED_STEPS = b'"event":"steps"'
_FIELDS = "num_tokens, num_sequences, kv_read, seconds, prefill_work or chunks, and maybe time"


class StepLine(Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a log: one step; see StepTime.ticks for the first three.

    seconds: its duration.  chunks: [context, tokens] of each prompt computed, instead of
    prefill_work.  time: its start.
    """

    num_tokens: Positive
    num_sequences: Positive
    kv_read: NotNegative
    seconds: Annotated[float, Meta(gt=0, le=1e6)]
    prefill_work: NotNegative | None = None
    chunks: list[tuple[NotNegative, Positive]] | None = None
    time: float | None = None

    @property
    def work(self) -> int:
        if self.chunks is None:
            return self.prefill_work or 0
        return sum(tokens * (2 * context + tokens) for context, tokens in self.chunks)


class StepLog(Struct, frozen=True):
    """Steps as columns [steps] float64."""

    num_tokens: Any
    num_sequences: Any
    kv_read: Any
    prefill_work: Any
    seconds: Any

    @property
    def num_steps(self) -> int:
        return len(self.seconds)

    def part(self, chosen: Any) -> "StepLog":
        return StepLog(*(getattr(self, name)[chosen] for name in self.__struct_fields__))


def read_step_log(lines: Iterable[tuple[int, bytes]], name: str) -> StepLog:
    """Return the steps of the log `name`, given as (line number, line)."""
    decoder = msgspec.json.Decoder(StepLine)
    values = array("d")
    last = float("-inf")
    for number, text in lines:
        try:
            line = decoder.decode(text)
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            said = str(error).replace(" - at `$.", " at `")
            if not said.startswith("JSON"):
                said = said[:1].lower() + said[1:]
            raise BatchdecodeError(f"{name}:{number}: {said}; fields: {_FIELDS}") from None
        if fault := _contradiction(line, last):
            raise BatchdecodeError(f"{name}:{number}: {fault}")
        last = last if line.time is None else line.time
        values.extend((line.num_tokens, line.num_sequences, line.kv_read, line.work, line.seconds))
    table = np.array(values).reshape(-1, len(StepLog.__struct_fields__))
    return StepLog(*np.ascontiguousarray(table.T))


def read_traced_steps(lines: Iterable[tuple[int, bytes]], name: str) -> StepLog:
    """Return the steps of a trace of `run --profile wall`, given as (line number, line)."""
    decoder = msgspec.json.Decoder(StepsEvent)
    table: list[tuple[float, ...]] = []
    for number, text in lines:
        if TRACED_STEPS not in text:
            continue
        try:
            event = decoder.decode(text)
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            raise BatchdecodeError(f"{name}:{number}: not a line of a trace: {error}") from None
        if event.seconds is None or event.kv_read is None or event.prefill_work is None:
            raise BatchdecodeError(
                f"{name}:{number}: its steps have no times; run with --profile wall to time them"
            )
        columns = event.rows, event.kv_read, event.prefill_work, event.seconds
        tokens = map(add, event.decodes, event.prefills)
        try:
            steps = [*zip(tokens, *columns, strict=True)]
        except ValueError:
            raise BatchdecodeError(f"{name}:{number}: lists of steps differ in length") from None
        table += [step for step in steps if step[0] > 0 and step[-1] > 0]  # not the empty ones
    if not table:
        raise BatchdecodeError(f"{name}: no steps; run with --profile wall and --trace")
    return StepLog(*np.array(table, np.float64).T.copy())


def _contradiction(line: StepLine, last: float) -> str | None:
    if (line.prefill_work is None) == (line.chunks is None):
        return "expected either prefill_work or chunks"
    if line.time is not None and line.time < last:
        return f"time goes back from {last:g} to {line.time:g}"
    if line.num_sequences > line.num_tokens:
        return (
            f"num_sequences {line.num_sequences} with num_tokens {line.num_tokens}: "
            "each sequence computes at least one token"
        )
    if line.num_tokens > line.num_sequences and not line.work:
        return (
            f"num_tokens {line.num_tokens} of {line.num_sequences} sequences, but no prompt: "
            "a sequence that decodes computes one token"
        )
    if line.chunks is not None and sum(tokens for _, tokens in line.chunks) > line.num_tokens:
        return f"chunks have more than the {line.num_tokens} of num_tokens"
    return None


LEAST_STEPS = 20
KINDS = ("decode only", "prompt only", "mixed")
SHARES = (10.0, 1.0, 1.0)
_FEW = 10  # steps of a kind: with fewer, each weighs as if there were as many; one may be odd
_SAME = 1e-9  # of the loss: a smaller gain is rounding, and fewer columns are better
_NUM_FITS = 3  # the last two change little
_HELD_OUT = 5  # every fifth step is held out
_NUM_CANDIDATES = 48  # for the crossing of w and f*T
_NUM_REFINEMENTS = 24
_STEPS_FOR_CROSSING = 4000  # evenly chosen, to find the crossing; all steps fit the rest
_GOLDEN = (5**0.5 - 1) / 2
_DIGITS = 4  # the same on all machines
_MS = 1000.0

Terms = dict[str, float]
Experts = tuple[int, int]


class KindErrors(Struct, frozen=True):
    """Errors of a fit, for one kind of step."""

    kind: str
    num_steps: int
    mape: float
    replayed: float

    def describe(self) -> str:
        text = f"{self.kind} MAPE {self.mape:.1%}, in all {self.replayed:+.1%}"
        return f"{text} ({self.num_steps:,})".replace("%", " %")


class FitErrors(Struct, frozen=True, kw_only=True):
    """The errors of a fit, relative to the real time of a step.

    r2: the share of the variance explained.  held_out_mape: over every fifth step, with a fit to
    all others.  replayed: the error of the duration of the whole log.
    """

    num_steps: int
    mape: float
    p95: float
    r2: float
    held_out_mape: float
    replayed: float
    by_kind: list[KindErrors]

    def describe(self) -> str:
        return (
            f"MAPE {self.mape:.2%}, p95 {self.p95:.2%}, R2 {self.r2:.4f}, held out "
            f"{self.held_out_mape:.2%}; {self.num_steps:,} steps, replayed {self.replayed:+.2%}"
        ).replace("%", " %")


class Fit(Struct, frozen=True):
    """The terms of a profile in milliseconds, their errors, and warnings of uncertain ones."""

    terms: Terms
    errors: FitErrors
    notes: list[str]


def fit_steps(log: StepLog, name: str, experts: Experts | None = None) -> Fit:
    """Return the profile that fits the log `name` best.

    experts: of a layer, and per token; they add a term x, for reading all experts.
    """
    if log.num_steps < LEAST_STEPS:
        raise BatchdecodeError(f"{name}: {log.num_steps} steps: at least {LEAST_STEPS} are needed")
    held_out = np.arange(log.num_steps) % _HELD_OUT == _HELD_OUT - 1
    others = fit_terms(log.part(~held_out), experts)
    terms = fit_terms(log, experts)
    predicted = predicted_seconds(terms, log, experts)
    off = relative_errors(terms, log, experts)
    left = (predicted - log.seconds) ** 2
    spread = (log.seconds - log.seconds.mean()) ** 2
    kinds, by_kind = kinds_of(log), []
    for place, kind in enumerate(KINDS):
        of_kind = kinds == place
        if of_kind.any():
            ours, real = predicted[of_kind], log.seconds[of_kind]
            shares = float(np.abs(ours / real - 1).mean())
            by_kind.append(KindErrors(kind, len(real), shares, float(ours.sum() / real.sum()) - 1))
    errors = FitErrors(
        num_steps=log.num_steps,
        mape=float(off.mean()),
        p95=float(np.quantile(off, 0.95)),
        r2=1 - float(left.sum() / spread.sum()) if np.ptp(log.seconds) else 1.0,
        held_out_mape=float(relative_errors(others, log.part(held_out), experts).mean()),
        replayed=float(predicted.sum() / log.seconds.sum()) - 1,
        by_kind=by_kind,
    )
    return Fit(terms, errors, _open_questions(log))


def share_of_experts(log: StepLog, experts: Experts | None) -> Any:
    """Return the mean share of the experts that each step hits: [steps] float64."""
    if experts is None:
        return np.zeros(log.num_steps)
    num_experts, per_token = experts
    return 1 - (1 - per_token / num_experts) ** log.num_tokens


def predicted_seconds(terms: Terms, log: StepLog, experts: Experts | None = None) -> Any:
    """Return the predicted time of each step: [steps] float64."""
    milliseconds = (
        terms["t0"]
        + np.maximum(terms["w"], terms["f"] * log.num_tokens)
        + terms["g"] * log.num_sequences
        + (terms["d"] + terms["h"] * (log.prefill_work > 0)) * log.kv_read
        + terms["e"] / 2 * log.prefill_work
        + terms.get("x", 0.0) * share_of_experts(log, experts)
    )
    return milliseconds / _MS


def relative_errors(terms: Terms, log: StepLog, experts: Experts | None = None) -> Any:
    """Return the relative error of each step: [steps] float64."""
    return np.abs(predicted_seconds(terms, log, experts) / log.seconds - 1)


def fit_terms(log: StepLog, experts: Experts | None = None) -> Terms:
    """Return the terms, in milliseconds, with the least squares of weighted relative errors.

    Errors are relative to the predicted time, which a first fit gives: relative to the measured
    one, slow steps would count less, and the terms would predict too little in all.
    """
    every = -(-log.num_steps // _STEPS_FOR_CROSSING)
    some = log.part(slice(None, None, every))
    shares = np.linspace(0, 1, _NUM_CANDIDATES)
    places = [0.0, *np.unique(np.quantile(some.num_tokens, shares)).tolist()]
    crossing = _least(lambda place: _fit(some, place, experts, some.seconds)[1], places)
    expected = log.seconds
    for _ in range(_NUM_FITS):
        t0, f, g, d, h, e, *x = (_fit(log, crossing, experts, expected)[0] * _MS).tolist()
        terms = {"t0": t0, "w": f * crossing, "f": f, "g": g, "d": d, "h": h, "e": e}
        terms |= dict(zip(("x",), x, strict=False))
        expected = np.maximum(predicted_seconds(terms, log, experts), log.seconds.min())
    return {term: float(f"{value:.{_DIGITS}g}") for term, value in terms.items()}


def _fit(
    log: StepLog, crossing: float, experts: Experts | None, expected: Any
) -> tuple[Any, float]:
    """Return (all terms but w [6, with x 7] in seconds, the loss) if w is f * crossing.

    expected: [steps] seconds that errors are relative to.
    """
    parts = [
        np.ones(log.num_steps),
        np.maximum(crossing, log.num_tokens),
        log.num_sequences,
        log.kv_read,
        log.kv_read * (log.prefill_work > 0),
        log.prefill_work / 2,
    ]
    if experts is not None:
        parts.append(share_of_experts(log, experts))
    columns = np.column_stack(parts)
    weights = np.sqrt(weights_of(log)) / expected
    return fit_nonnegative(columns * weights[:, None], log.seconds * weights)


def fit_nonnegative(columns: Any, target: Any) -> tuple[Any, float]:
    """Return the coefficients [columns] >= 0 that fit `target` [rows] best, and the squared loss.

    columns: [rows, columns].  The best fit is a plain one to a subset of the columns, so all
    subsets are tried, on the small triangle of a QR decomposition, which preserves lengths.
    """
    scales = np.sqrt((columns * columns).sum(axis=0))
    scales[scales == 0] = 1.0
    triangle: Any = np.linalg.qr(np.column_stack([columns / scales, target]), mode="r")
    matrix, goal = triangle[:, :-1], triangle[:, -1]
    found, _, rank, _ = np.linalg.lstsq(matrix, goal, rcond=None)
    if rank == len(scales) and (found >= 0).all():  # the unconstrained optimum
        return found / scales, float(((goal - matrix @ found) ** 2).sum())
    best, least = np.zeros(len(scales)), float(goal @ goal)
    smallest = _SAME**2 * least
    for size in range(1, len(scales) + 1):
        for chosen in combinations(range(len(scales)), size):
            part = matrix[:, chosen]
            found = np.linalg.lstsq(part, goal, rcond=None)[0]
            if (found < 0).any():
                continue
            rest = goal - part @ found
            loss = float(rest @ rest)
            if loss < least * (1 - _SAME) - smallest:
                best, least = np.zeros(len(scales)), loss
                best[list(chosen)] = found
    return best / scales, least


def _least(loss: Callable[[float], float], places: list[float]) -> float:
    """Return the place of the least loss: the best of `places`, refined by golden sections."""
    losses = [loss(place) for place in places]
    best = min(range(len(places)), key=losses.__getitem__)
    found = [places[best]]
    for low, high in pairwise(places[max(best - 1, 0) : best + 2]):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_left, at_right = loss(left), loss(right)
        for _ in range(_NUM_REFINEMENTS):
            if at_left <= at_right:
                high, right, at_right = right, left, at_left  # noqa: PLW2901 - a section of it
                left = high - _GOLDEN * (high - low)
                at_left = loss(left)
            else:
                low, left, at_left = left, right, at_right  # noqa: PLW2901 - as above
                right = low + _GOLDEN * (high - low)
                at_right = loss(right)
        found.append(left if at_left <= at_right else right)
    return min(found, key=loss)


def kinds_of(log: StepLog) -> Any:
    """Return the place in KINDS of each step: [steps] int64."""
    has_prompts, has_decodes = log.prefill_work > 0, log.kv_read > 0
    return np.where(has_prompts, np.where(has_decodes, 2, 1), 0)


def weights_of(log: StepLog) -> Any:
    """Return the weight of each step, 1 on average: [steps] float64."""
    kinds = kinds_of(log)
    counts = np.maximum(np.bincount(kinds, minlength=len(KINDS)), _FEW)
    weights = (np.array(SHARES) / counts)[kinds]
    return weights / weights.mean()


def _open_questions(log: StepLog) -> list[str]:
    """Return warnings about terms for which the log has no steps, or few."""
    decodes, prompts, mixed = np.bincount(kinds_of(log), minlength=len(KINDS)).tolist()
    warnings = []
    if not decodes:
        warnings.append("no step only decodes: w and d are guesses")
    elif decodes < _FEW:
        warnings.append(f"steps that only decode: {decodes}, so w and d are uncertain")
    if not prompts + mixed:
        warnings.append("no step computes a prompt: t0 + w, g and d are known, f, h and e guesses")
    elif not mixed:
        warnings.append("no step computes prompts while others decode: h is a guess")
    elif not prompts:
        warnings.append("no step computes prompts alone: f and e depend on mixed steps only")
    elif prompts < _FEW or mixed < _FEW:
        warnings.append(
            f"steps with prompts: {prompts} alone, {mixed} mixed, so f, h and e are uncertain"
        )
    if np.ptp(log.num_sequences) == 0:
        warnings.append("all steps have the same number of sequences: g may be part of t0")
    return warnings
