"""Whether a profile is slower than its hardware could be: no measured engine beats its roofline."""

from collections.abc import Iterator

from msgspec import Struct

from batcher.timing.catalog import CatalogError
from batcher.timing.profiles import Profile
from batcher.timing.roofline import load_gpu, load_model_shape, roofline
from batcher.timing.step_time import TICKS_PER_SECOND

_CONTEXT = 1024  # tokens before the one that a row decodes


class Load(Struct, frozen=True):
    """What a step computes, and a name for it."""

    name: str
    num_tokens: int
    num_sequences: int
    kv_read: int
    prefill_work: int


LOADS = (
    *(Load(f"decode {n} x {_CONTEXT:,}", n, n, n * _CONTEXT, 0) for n in (1, 8, 32, 128, 256)),
    *(Load(f"prefill {tokens:,}", tokens, 1, 0, tokens * tokens) for tokens in (512, 2048)),
)


class Bound(Struct, frozen=True):
    """What a profile says of a load, and the least it could be; both in seconds.

    limit: what makes that the least: "compute" or "memory bandwidth".
    """

    load: str
    predicted: float
    least: float
    limit: str

    @property
    def is_beaten(self) -> bool:
        """Whether the profile is faster than the hardware can be."""
        return self.predicted < self.least


class Verdict(Struct, frozen=True):
    """What the check found: a bound for each load, or in `unchecked` why there is none."""

    bounds: tuple[Bound, ...] = ()
    unchecked: str | None = None

    @property
    def worst(self) -> Bound | None:
        """The bound that the profile beats by most; None if it beats none."""
        beaten = [bound for bound in self.bounds if bound.is_beaten]
        return max(beaten, key=lambda bound: bound.least / bound.predicted, default=None)


def check_physics(profile: Profile) -> Verdict:
    """Return whether a profile beats the peak of its hardware, for its model, under LOADS."""
    if profile.hardware is None or profile.model is None:
        return Verdict(unchecked="it names no hardware or no model")
    try:
        return Verdict(tuple(_bounds(profile, profile.model, profile.hardware)))
    except CatalogError as error:
        return Verdict(unchecked=str(error))


def _bounds(profile: Profile, model: str, hardware: str) -> Iterator[Bound]:
    """Yield the bound of each load.

    Raises:
        CatalogError: the model or the hardware is not known.
    """
    best = roofline("bound", load_model_shape(model), load_gpu(hardware), profile.tensor_parallel)
    predicted = profile.step_time("profile")
    for load in LOADS:
        tokens, sequences, kv_read, work = (
            load.num_tokens,
            load.num_sequences,
            load.kv_read,
            load.prefill_work,
        )
        compute = best.compute_ticks(tokens, sequences, kv_read, work)
        memory = best.memory_ticks(tokens, kv_read)
        yield Bound(
            load.name,
            predicted.ticks(tokens, sequences, kv_read, work) / TICKS_PER_SECOND,
            max(compute, memory) / TICKS_PER_SECOND,
            "compute" if compute > memory else "memory bandwidth",
        )
