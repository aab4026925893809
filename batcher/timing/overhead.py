"""What an engine takes beside its kernels: time between them, and time to launch them.

Rule: both are counted by layer, for each layer is as many kernels; what is added to a step does not
depend on what the step computes.
"""

import re

from msgspec import Struct
from msgspec.structs import replace

from batcher.timing import catalog
from batcher.timing.catalog import CatalogError
from batcher.timing.hardware import FILE_SUFFIXES
from batcher.timing.model_shape import load_model_shape
from batcher.timing.profiles import Profile

_US_PER_MS = 1000.0
# A folder may have an @ in its name: what has a / before the @ has to be a file already.
_AT_ENGINE = re.compile(r"([^/]+|.*\.(?:ya?ml|json)\b.*)@([^@]+)")


class Overhead(Struct, frozen=True, kw_only=True):
    """Microseconds for each layer of a model, in each step.

    gap_us: between kernels, on top of what they take; it remains with CUDA graphs.
    launch_us: what the host takes to launch them one by one, while those before are computed: a
    step takes no less, however short its kernels are.
    """

    gap_us: catalog.Amount = 0.0
    launch_us: catalog.Amount = 0.0
    source: catalog.Text = "not stated"

    def gap_seconds(self, num_layers: int) -> float:
        """Return what is added to each step."""
        return self.gap_us * num_layers / 1e6

    def least_ms(self, num_layers: int) -> float:
        """Return what each step takes at least, in milliseconds."""
        return self.launch_us * num_layers / _US_PER_MS


def split_overhead(text: str) -> tuple[str, Overhead | None]:
    """Return what stands before "@ENGINE", and what ENGINE takes; None if there is no such end.

    ENGINE is a name of overheads.yaml, or a file with the fields of an Overhead.

    Raises:
        CatalogError: there is no such engine.
    """
    found = _AT_ENGINE.fullmatch(text)
    if found is None:
        return text, None
    kernels, engine = found.groups()
    if engine.endswith(FILE_SUFFIXES):
        return kernels, catalog.as_record(catalog.read_mapping(engine), Overhead, engine)
    values = catalog.find(engine, catalog.shipped("overheads.yaml"), "engine")
    return kernels, catalog.as_record(values, Overhead, f"overheads.yaml: {engine}")


def with_overhead(profile: Profile, overhead: Overhead) -> Profile:
    """Return `profile` with what an engine takes beside the kernels that it tells the times of.

    Raises:
        CatalogError: it names no known model, so nobody knows how many layers there are.
    """
    if profile.model is None:
        raise CatalogError(
            "what an engine takes is counted by layer: a profile has to name its model"
        )
    num_layers = load_model_shape(profile.model).num_hidden_layers
    return replace(
        profile,
        t0=round(profile.t0 + _US_PER_MS * overhead.gap_seconds(num_layers), 9),
        least=max(profile.least, overhead.least_ms(num_layers)),
        error=f"without what the engine takes: {profile.error}",
        source=f"{profile.source}; the engine: {overhead.source}",
    )
