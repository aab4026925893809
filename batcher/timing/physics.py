"""What the hardware of a profile allows: no engine beats its roofline, or has more memory."""

from collections.abc import Iterator

from msgspec import Struct

from batcher.timing.catalog import CatalogError
from batcher.timing.profiles import Profile, load_profile
from batcher.timing.roofline import load_gpu, load_model_shape, num_kv_tokens, parts_of, roofline
from batcher.timing.step_time import TICKS_PER_SECOND


class KvRoom(Struct, frozen=True):
    """Room for so many tokens; 0 if not even the weights fit.

    is_reported: an engine has reported it.  If not, it is the memory of the data sheet less the
    weights.
    """

    num_tokens: int
    is_reported: bool

    def num_blocks(self, block_size: int) -> int:
        """Count the blocks of so many tokens that sequences get."""
        return usable_blocks(self.num_tokens // block_size)


def usable_blocks(num_blocks: int) -> int:
    """Return how many of the blocks sequences get: vLLM keeps the first, the null block, empty."""
    return max(num_blocks - 1, 0)


def kv_room_of(text: str) -> KvRoom | None:
    """Return what is known of the memory where steps take what `text` names, None if nothing is.

    Raises:
        CatalogError: there is no such step time.
    """
    kind, colon, rest = text.partition(":")
    if kind == "constant":
        return None
    if kind == "roofline" and colon:
        return KvRoom(num_kv_tokens(*parts_of(rest)), is_reported=False)
    _, profile = load_profile(text)
    if profile.kv_tokens is not None:
        return KvRoom(profile.kv_tokens, is_reported=True)
    num_tokens = num_tokens_that_fit(profile)
    return None if num_tokens is None else KvRoom(num_tokens, is_reported=False)


def num_tokens_that_fit(profile: Profile) -> int | None:
    """Return the room beside the weights; None if the hardware or the model is not known."""
    if profile.hardware is None or profile.model is None:
        return None
    try:
        shape, gpu = load_model_shape(profile.model), load_gpu(profile.hardware)
    except CatalogError:
        return None
    return num_kv_tokens(shape, gpu, profile.tensor_parallel)


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


class PhysicsVerdict(Struct, frozen=True):
    """What the check found: a bound for each load, or in `unchecked` why there is none."""

    bounds: tuple[Bound, ...] = ()
    unchecked: str | None = None

    @property
    def worst(self) -> Bound | None:
        """The bound that the profile beats by most; None if it beats none."""
        beaten = [bound for bound in self.bounds if bound.is_beaten]
        return max(beaten, key=lambda bound: bound.least / bound.predicted, default=None)


def check_physics(profile: Profile) -> PhysicsVerdict:
    """Return whether a profile beats the peak of its hardware, for its model, under LOADS."""
    if profile.hardware is None or profile.model is None:
        return PhysicsVerdict(unchecked="it names no hardware or no model")
    try:
        return PhysicsVerdict(tuple(_bounds(profile, profile.model, profile.hardware)))
    except CatalogError as error:
        return PhysicsVerdict(unchecked=str(error))


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
