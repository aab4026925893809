"""How a fleet is managed, as its file states it: who is admitted, what fails, comes and goes.

Rule: whatever can have no effect, or no meaning, is an error here.
"""

from typing import Any

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.fleet.admission import Admission
from batcher.fleet.autoscaling import POLICIES, SLO, Autoscale, policy_of
from batcher.fleet.failures import Failures
from batcher.timing.catalog import CatalogError, as_record


class Management(Struct, frozen=True, kw_only=True):
    """How a fleet is managed; None: not in this respect."""

    admission: Admission | None = None
    failures: Failures | None = None
    autoscale: Autoscale | None = None


SECTIONS: dict[str, type[Struct]] = {
    "admission": Admission,
    "failures": Failures,
    "autoscale": Autoscale,
}


def management_of(
    sections: dict[str, Any], num_replicas: int, num_groups: int, place: str
) -> Management | None:
    """Return what the sections of a file state, None being left out; None if all are.

    Raises:
        CatalogError: something in them is not allowed; `place` says where they stand.
    """
    records: dict[str, Any] = {
        name: as_record(values, SECTIONS[name], f"{place}: {name}")
        for name, values in sections.items()
        if values is not None
    }
    if not records:
        return None
    management = Management(**records)
    if management.failures is not None:
        is_fixed = management.autoscale is None
        _check_failures(management.failures, num_replicas if is_fixed else None, place)
    if management.autoscale is not None:
        _check_autoscale(management.autoscale, num_replicas, num_groups, place)
    return management


def _check_failures(failures: Failures, num_replicas: int | None, place: str) -> None:
    if failures.mtbf is None and not failures.planned:
        raise CatalogError(f"{place}: failures: nothing fails without mtbf or planned")
    for failure in failures.planned:
        if num_replicas is not None and failure.replica >= num_replicas:
            raise CatalogError(
                f"{place}: failures: planned: there is no replica {failure.replica}, the last is "
                f"{num_replicas - 1}"
            )


def _check_autoscale(autoscale: Autoscale, num_replicas: int, num_groups: int, place: str) -> None:
    if num_groups > 1:
        raise CatalogError(f"{place}: autoscale: a fleet of several groups does not scale")
    if not autoscale.min <= num_replicas <= autoscale.max:
        raise CatalogError(
            f"{place}: autoscale: it begins with {num_replicas} replicas, which is not from min "
            f"{autoscale.min} to max {autoscale.max}"
        )
    if autoscale.slo is not None and autoscale.policy in POLICIES and autoscale.policy != SLO:
        raise CatalogError(f"{place}: autoscale: slo has no effect on {autoscale.policy}")
    try:
        policy_of(autoscale)
        _ = autoscale.limits
    except BatchdecodeError as error:
        raise CatalogError(f"{place}: {error}") from None
