"""How a fleet is managed, as its file states it: who is admitted, what fails, comes and goes.

Rule: whatever can have no effect, or no meaning, is an error here.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.planning.admission import AdmissionControl
from batcher.planning.autoscaling import POLICIES, SLO, Autoscale, policy_of
from batcher.planning.failures import Failures
from batcher.timing.catalog import CatalogError, as_record
from batcher.timing.place import Place

R = TypeVar("R", bound=Struct)


class Management(Struct, frozen=True, kw_only=True):
    """How a fleet is managed; None, or nothing: not in this respect.

    autoscale: of each group that scales.
    """

    admission: AdmissionControl | None = None
    failures: Failures | None = None
    autoscale: tuple[Autoscale, ...] = ()


SECTIONS = ("admission", "failures", "autoscale")


def management_of(
    sections: Mapping[str, Any], counts: Mapping[str, int], path: str
) -> Management | None:
    """Return what the sections of a file state, None being left out; None if all are.

    counts: the replicas of each group.

    Raises:
        CatalogError: something in them, which stand in the file `path`, is not allowed.
    """
    admission, failures, autoscale = (sections[name] for name in SECTIONS)
    if admission is None and failures is None and autoscale is None:
        return None
    management = Management(
        admission=_record(admission, AdmissionControl, Place(path, "admission", "admission")),
        failures=_record(failures, Failures, Place(path, "failures", "failures")),
        autoscale=_scaled_groups(autoscale, counts, path),
    )
    if management.failures is not None:
        num_replicas = None if management.autoscale else sum(counts.values())
        place = Place(path, "failures", "failures")
        _check_failures(management.failures, num_replicas, place)
    return management


def _record(values: Any, kind: type[R], place: Place) -> R | None:
    return None if values is None else as_record(values, kind, place)


def _scaled_groups(values: Any, counts: Mapping[str, int], path: str) -> tuple[Autoscale, ...]:
    """Return how groups scale, each of which is named if there are several."""
    scaled: dict[str, Autoscale] = {}
    is_list = isinstance(values, list)
    for index, each in enumerate(values if is_list else [values] * (values is not None)):
        place = Place(path, "autoscale", "autoscale")
        if is_list and len(values) > 1:
            place = Place(path, f"autoscale {index + 1}", "autoscale", index)
        if isinstance(each, dict) and isinstance(each.get("group"), int):
            each["group"] = str(each["group"])  # as groups without a name are called
        autoscale = as_record(each, Autoscale, place)
        name = autoscale.group
        if name is None and len(counts) > 1:
            raise CatalogError(
                f"{place}: expected a list, each with its group: {', '.join(counts)}"
            )
        name = next(iter(counts)) if name is None else name
        if name not in counts:
            raise CatalogError(f"{place}: there is no group {name}; known: {', '.join(counts)}")
        if name in scaled:
            raise CatalogError(f"{place}: group {name} is there twice")
        _check_autoscale(autoscale, counts[name], place)
        scaled[name] = replace(autoscale, group=name)
    return tuple(scaled.values())


def _check_failures(failures: Failures, num_replicas: int | None, place: Place) -> None:
    if failures.mtbf is None and not failures.planned:
        raise CatalogError(f"{place}: nothing fails without mtbf or planned")
    for failure in failures.planned:
        if num_replicas is not None and failure.replica >= num_replicas:
            raise CatalogError(
                f"{place}: planned: there is no replica {failure.replica}, the last is "
                f"{num_replicas - 1}"
            )


def _check_autoscale(autoscale: Autoscale, num_replicas: int, place: Place) -> None:
    if not autoscale.min <= num_replicas <= autoscale.max:
        raise CatalogError(
            f"{place}: it begins with {num_replicas} replicas, which is not from min "
            f"{autoscale.min} to max {autoscale.max}"
        )
    if autoscale.slo is not None and autoscale.policy in POLICIES and autoscale.policy != SLO:
        raise CatalogError(f"{place}: slo has no effect on {autoscale.policy}")
    try:
        policy_of(autoscale)
        _ = autoscale.limits
    except BatchdecodeError as error:
        raise CatalogError(f"{place}: {error}") from None
