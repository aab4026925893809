"""What a person names for a StepTime, and the memory there: a constant, a profile, a roofline."""

from math import isfinite

from msgspec import Struct

from batcher.fields import read_number
from batcher.timing.catalog import CatalogError
from batcher.timing.formulas import ConstantStepTime
from batcher.timing.hardware import GPU, load_gpu
from batcher.timing.least import LeastStepTime
from batcher.timing.model_shape import ModelShape, load_model_shape
from batcher.timing.overhead import Overhead, split_overhead, with_overhead
from batcher.timing.profiles import Profile, find_profile
from batcher.timing.roofline import num_kv_tokens, parts_of, roofline
from batcher.timing.step_time import StepTime

MAX_STEP_SECONDS = 1e6
FORMS = (
    "constant, constant:SECONDS, the name of a profile, FILE.yaml, FILE.yaml:NAME, "
    "roofline:MODEL:GPU or roofline:MODEL:GPU:GPUS; all but a constant with @ENGINE"
)


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


class Hardware(Struct, frozen=True):
    """Where one engine runs; gpu: the name of a GPU, or the file of its data sheet."""

    gpu: str
    num_gpus: int


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
        return _roofline_of(text)
    if not text:
        raise CatalogError(f"no step time is named; give {FORMS}")
    name, profile = load_profile(text)
    return profile.step_time(name)


def load_profile(text: str) -> tuple[str, Profile]:
    """Return the name and the profile that `text` names, with what "@ENGINE" at its end adds.

    Raises:
        CatalogError: there is none, or nothing can be added to it.
    """
    kernels, overhead = split_overhead(text)
    name, profile = find_profile(kernels)
    if overhead is None:
        return name, profile
    return f"{name}{text.removeprefix(kernels)}", with_overhead(profile, overhead)


def _roofline_of(text: str) -> StepTime:
    """Return the step time of roofline:MODEL:GPU:GPUS@ENGINE, or raise a CatalogError."""
    kernels, overhead = split_overhead(text)
    named = parts_of(kernels.partition(":")[2])
    overhead, num_layers = overhead or Overhead(), named[0].num_hidden_layers
    best = roofline(text, *named, overhead.gap_seconds(num_layers))
    least = overhead.least_ms(num_layers)
    return LeastStepTime(best, least) if least else best


def _seconds(text: str) -> float:
    """Return the duration of a step, or raise a CatalogError."""
    try:
        seconds = read_number(text, float)
    except ValueError:
        seconds = -1.0
    if not (isfinite(seconds) and 1e-15 <= seconds <= MAX_STEP_SECONDS):  # noqa: PLR2004 - a tick
        raise CatalogError(
            f"constant:{text}: expected the seconds of a step, above 0 and up to 1e6"
        )
    return seconds


def usable_blocks(num_blocks: int) -> int:
    """Return how many of the blocks sequences get: vLLM keeps the first, the null block, empty."""
    return max(num_blocks - 1, 0)


def kv_room_of(text: str) -> KvRoom | None:
    """Return what is known of the memory where steps take what `text` names, None if nothing is.

    Raises:
        CatalogError: there is no such step time.
    """
    named = _named(text)
    if named is None:
        return None
    if isinstance(named, tuple):
        return KvRoom(num_kv_tokens(*named), is_reported=False)
    if named.kv_tokens is not None:
        return KvRoom(named.kv_tokens, is_reported=True)
    num_tokens = num_tokens_that_fit(named)
    return None if num_tokens is None else KvRoom(num_tokens, is_reported=False)


def model_shape_of(text: str) -> ModelShape | None:
    """Return the shape of the model whose steps take what `text` names, None if it is not known.

    Raises:
        CatalogError: there is no such step time.
    """
    named = _named(text)
    if isinstance(named, tuple):
        return named[0]
    if named is None or named.model is None:
        return None
    return _known_shape(named.model)


def hardware_of(text: str) -> Hardware | None:
    """Return the GPUs on which steps take what `text` names, None if it is not known.

    Raises:
        CatalogError: there is no such step time.
    """
    named = _named(text)
    if isinstance(named, tuple):
        _, _, tensor_parallel, num_stages = named
        return Hardware(split_overhead(text)[0].split(":")[2], tensor_parallel * num_stages)
    if named is None or named.hardware is None:
        return None
    return Hardware(named.hardware, named.tensor_parallel * named.pipeline_parallel)


def _named(text: str) -> tuple[ModelShape, GPU, int, int] | Profile | None:
    """Return the parts of the roofline, or the profile, that `text` names; None for a constant.

    Raises:
        CatalogError: there is no such step time.
    """
    kind, colon, rest = text.partition(":")
    if kind == "constant":
        return None
    if kind == "roofline" and colon:
        return parts_of(split_overhead(rest)[0])
    return load_profile(text)[1]


def _known_shape(name: str) -> ModelShape | None:
    try:
        return load_model_shape(name)
    except CatalogError:
        return None


def num_tokens_that_fit(profile: Profile) -> int | None:
    """Return the room beside the weights; None if the hardware or the model is not known."""
    if profile.hardware is None or profile.model is None:
        return None
    try:
        shape, gpu = load_model_shape(profile.model), load_gpu(profile.hardware)
    except CatalogError:
        return None
    return num_kv_tokens(shape, gpu, profile.tensor_parallel, profile.pipeline_parallel)
