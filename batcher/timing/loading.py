"""From what a person names to a StepTime: a constant, a profile, a roofline."""

from math import isfinite

from batcher.timing.catalog import CatalogError
from batcher.timing.formulas import ConstantStepTime
from batcher.timing.profiles import load_profile
from batcher.timing.roofline import roofline_of
from batcher.timing.step_time import StepTime

MAX_STEP_SECONDS = 1e6
FORMS = (
    "constant, constant:SECONDS, the name of a profile, FILE.yaml, FILE.yaml:NAME, "
    "roofline:MODEL:GPU or roofline:MODEL:GPU:TP"
)


def step_time_of(text: str) -> StepTime:
    """Return the step time that `text` names, in one of FORMS.

    Raises:
        CatalogError: there is none.
    """
    kind, colon, rest = text.partition(":")
    if text == "wall":
        raise CatalogError("wall, the time that steps really take, is for run; give " + FORMS)
    if kind == "constant":
        return ConstantStepTime(_seconds(rest)) if colon else ConstantStepTime()
    if kind == "roofline" and colon:
        return roofline_of(rest)
    if not text:
        raise CatalogError(f"no step time is named; give {FORMS}")
    name, profile = load_profile(text)
    return profile.step_time(name)


def _seconds(text: str) -> float:
    """Return the duration of a step.

    Raises:
        CatalogError: it is none.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (isfinite(seconds) and 1e-15 <= seconds <= MAX_STEP_SECONDS):  # noqa: PLR2004 - a tick
        raise CatalogError(
            f"constant:{text}: expected the seconds of a step, above 0 and up to 1e6"
        )
    return seconds
