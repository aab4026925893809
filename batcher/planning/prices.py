"""What a deployment costs: the dollars and the watts of its GPUs, at prices from a user's file.

Rule: no price is known here; they change, and differ from one contract to the next.
"""

from collections.abc import Iterable, Mapping
from math import ceil
from pathlib import Path

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.planning.fleet import ReplicasResult
from batcher.planning.measure import NUM_DIGITS
from batcher.timing import catalog
from batcher.timing.catalog import FILE_SUFFIXES, CatalogError
from batcher.timing.profiles import Setup, setup_of
from batcher.timing.step_time import TICKS_PER_SECOND

SECONDS_PER_HOUR = 3600
MILLION = 1e6
JOULES_PER_KWH = 3.6e6


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

    gpus: those of all replicas, which are paid from the first arrival to the end of the last step;
    where replicas come and go those that are there, on average and rounded up.
    dollars_per_million_tokens, kwh_per_million_tokens: of output tokens; None if there were none.
    The energy, of GPUs alone, is None if the prices have no watts.
    price_sources: where the prices are from, as their file says.
    """

    gpus: int
    gpu_hours: float
    dollars_per_hour: float
    dollars_per_million_tokens: float | None
    kwh_per_million_tokens: float | None
    price_sources: list[str]


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


def price_of(profile: str, prices: Mapping[str, Price]) -> tuple[Setup, Price]:
    """Return the GPUs of the step time called `profile`, and the price of one of them.

    Raises:
        BatchdecodeError: nothing says which they are, or they have no price.
    """
    setup = setup_of(profile)
    name = setup.gpu
    if name is None:
        raise BatchdecodeError(
            f"--prices: nothing says which GPU {profile} runs on: give a --profile with "
            "`hardware: NAME` in its file, or roofline:MODEL:GPU"
        )
    if name.endswith(FILE_SUFFIXES):
        name = Path(name).stem
    return setup, catalog.find(name, dict(prices), "GPU of --prices")


def cost_of(
    parts: Iterable[tuple[str, ReplicasResult]],
    prices: Mapping[str, Price],
    makespan: float,
    num_tokens: int,
) -> Cost:
    """Return what a run of `makespan` seconds cost that gave so many output tokens.

    parts: what the steps of replicas took, as they call it, and what these did.  All GPUs of a
    replica are busy while it computes a step.

    Raises:
        BatchdecodeError: see `price_of`.
    """
    num_gpus, gpu_seconds, per_hour, joules, has_watts = 0, 0.0, 0.0, 0.0, True
    sources = dict[str, None]()
    for profile, part in parts:
        setup, price = price_of(profile, prices)
        sources[price.source] = None
        seconds = part.paid_seconds(makespan) * setup.num_gpus
        num_own = seconds / makespan if makespan else setup.num_gpus * len(part.replicas)
        num_gpus += ceil(round(num_own, NUM_DIGITS))
        gpu_seconds += seconds
        per_hour += price.dollars_per_hour * num_own
        if price.busy_watts is None:
            has_watts = False
            continue
        busy = part.busy_ticks / TICKS_PER_SECOND * setup.num_gpus
        idle = max(seconds - busy, 0.0)
        idle_watts = price.busy_watts if price.idle_watts is None else price.idle_watts
        joules += price.busy_watts * busy + idle_watts * idle
    return Cost(
        gpus=num_gpus,
        gpu_hours=round(gpu_seconds / SECONDS_PER_HOUR, NUM_DIGITS),
        dollars_per_hour=round(per_hour, NUM_DIGITS),
        dollars_per_million_tokens=_per_million(per_hour * makespan / SECONDS_PER_HOUR, num_tokens),
        kwh_per_million_tokens=_per_million(
            joules / JOULES_PER_KWH if has_watts else None, num_tokens
        ),
        price_sources=list(sources),
    )


def _per_million(amount: float | None, num_tokens: int) -> float | None:
    if amount is None or not num_tokens:
        return None
    return round(amount * MILLION / num_tokens, NUM_DIGITS)
