"""What a deployment costs: the dollars and the watts of its GPUs, at prices from a user's file.

Rule: no price is known here; they change, and differ from one contract to the next.
"""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.fleet.result import FleetResult
from batcher.timing import catalog
from batcher.timing.catalog import CatalogError
from batcher.timing.hardware import FILE_SUFFIXES
from batcher.timing.loading import Hardware, hardware_of
from batcher.timing.step_time import TICKS_PER_SECOND

SECONDS_PER_HOUR = 3600
MILLION = 1e6
JOULES_PER_KWH = 3.6e6
NUM_DIGITS = 6


class Price(Struct, frozen=True, kw_only=True):
    """What one GPU costs, and what it draws.

    busy_watts: while a step is computed.  idle_watts: in between; None: as when it is busy.
    """

    dollars_per_hour: catalog.Amount
    busy_watts: catalog.OptionalPositive = None
    idle_watts: catalog.OptionalPositive = None
    source: catalog.Text = "not stated"


class Cost(Struct, frozen=True, kw_only=True):
    """What serving a workload cost.

    gpus: those of all replicas, which are paid from the first arrival to the end of the last step.
    dollars_per_million_tokens, kwh_per_million_tokens: of output tokens; None if there were none.
    The energy, of GPUs alone, is None if the prices have no watts.
    """

    gpus: int
    dollars_per_hour: float
    dollars_per_million_tokens: float | None
    kwh_per_million_tokens: float | None


def read_prices(path: str) -> dict[str, Price]:
    """Return the prices of a YAML file by the names of GPUs.

    Raises:
        CatalogError: the file cannot be read, or one of its prices is none.
    """
    prices = {}
    for name, values in catalog.read_mapping(path).items():
        place = f"{path}: {name}"
        price = prices[name] = catalog.as_record(values, Price, place)
        if price.idle_watts is not None and price.idle_watts > (price.busy_watts or 0):
            raise CatalogError(f"{place}: idle_watts: expected at most busy_watts")
    return prices


def price_of(profile: str, prices: Mapping[str, Price]) -> tuple[Hardware, Price]:
    """Return the GPUs of the step time called `profile`, and the price of one of them.

    Raises:
        BatchdecodeError: nothing says which they are, or they have no price.
    """
    hardware = hardware_of(profile)
    if hardware is None:
        raise BatchdecodeError(
            f"--prices: nothing says which GPU {profile} runs on: give a --profile with "
            "`hardware: NAME` in its file, or roofline:MODEL:GPU"
        )
    name = hardware.gpu
    if name.endswith(FILE_SUFFIXES):
        name = Path(name).stem
    return hardware, catalog.find(name, dict(prices), "GPU of --prices")


def cost_of(
    profile: str, prices: Mapping[str, Price], result: FleetResult, num_tokens: int
) -> Cost:
    """Return what a run on replicas cost whose steps took `profile`, with so many output tokens.

    All GPUs of a replica are busy while it computes a step.

    Raises:
        BatchdecodeError: see `price_of`.
    """
    hardware, price = price_of(profile, prices)
    num_gpus = hardware.num_gpus * len(result.replicas)
    seconds = result.makespan * num_gpus
    dollars = price.dollars_per_hour * seconds / SECONDS_PER_HOUR
    kwh = None
    if price.busy_watts is not None:
        busy_ticks = sum(replica.busy_ticks for replica in result.replicas)
        busy = busy_ticks / TICKS_PER_SECOND * hardware.num_gpus
        idle_watts = price.busy_watts if price.idle_watts is None else price.idle_watts
        joules = price.busy_watts * busy + idle_watts * max(seconds - busy, 0.0)
        kwh = joules / JOULES_PER_KWH
    return Cost(
        gpus=num_gpus,
        dollars_per_hour=round(price.dollars_per_hour * num_gpus, NUM_DIGITS),
        dollars_per_million_tokens=_per_million(dollars, num_tokens),
        kwh_per_million_tokens=_per_million(kwh, num_tokens),
    )


def _per_million(amount: float | None, num_tokens: int) -> float | None:
    if amount is None or not num_tokens:
        return None
    return round(amount * MILLION / num_tokens, NUM_DIGITS)
