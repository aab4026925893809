"""The kinds of steps that a log has: what is told of one kind says little of another.

What only decoding costs is a part of all steps, and prompts have terms to themselves that can take
up what a fit leaves over.  So in a fit each kind has its SHARES, however few its steps are, the
largest those that only decode; and each has errors of its own.
"""

from typing import Any

import numpy as np
from msgspec import Struct

from batcher.timing.step_log import StepLog

KINDS = ("decode only", "prompt only", "mixed")
SHARES = (10.0, 1.0, 1.0)
_FEW = 10  # steps of a kind: fewer count no more than as many would, for one of them may be odd


class KindErrors(Struct, frozen=True):
    """How far a fit is off at the steps of one kind.

    mape: the mean, as a share of the time of a step.  replayed: how much longer all of them take
    together than they did, as a share.
    """

    kind: str
    num_steps: int
    mape: float
    replayed: float

    def describe(self) -> str:
        """Return it as a person reads it."""
        text = f"{self.kind} MAPE {self.mape:.1%}, in all {self.replayed:+.1%}"
        return f"{text} ({self.num_steps:,})".replace("%", " %")


def kinds_of(log: StepLog) -> Any:
    """Return the place in KINDS of each step: [steps] int64."""
    has_prompts, has_decodes = log.prefill_work > 0, log.kv_read > 0
    return np.where(has_prompts, np.where(has_decodes, 2, 1), 0)


def weights_of(log: StepLog) -> Any:
    """Return how much each step counts, 1 in the mean: [steps] float64."""
    kinds = kinds_of(log)
    counts = np.maximum(np.bincount(kinds, minlength=len(KINDS)), _FEW)
    weights = (np.array(SHARES) / counts)[kinds]
    return weights / weights.mean()


def errors_by_kind(predicted: Any, log: StepLog) -> list[KindErrors]:
    """Return how far off the `predicted` seconds [steps] are, for each kind that there is."""
    kinds, errors = kinds_of(log), []
    for place, kind in enumerate(KINDS):
        of_kind = kinds == place
        if of_kind.any():
            ours, real = predicted[of_kind], log.seconds[of_kind]
            off = float(np.abs(ours / real - 1).mean())
            errors.append(KindErrors(kind, len(real), off, float(ours.sum() / real.sum()) - 1))
    return errors


def missing_kinds(log: StepLog) -> list[str]:
    """Return what the log cannot tell since it has no, or few, steps of a kind."""
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
        warnings.append("no step computes prompts alone: f and e are told by mixed ones only")
    elif prompts < _FEW or mixed < _FEW:
        warnings.append(
            f"steps with prompts: {prompts} alone, {mixed} mixed, so f, h and e are uncertain"
        )
    return warnings
