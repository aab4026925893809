"""The limits of a real run, as a JSON file beside its log says them under vLLM's names.

Rule: of several places the one vLLM came to counts more than the one it was asked for: what is in
`resolved_config`, then what is anywhere else, then what is in `engine_kwargs`; null says nothing.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.settings import DEFAULT_BLOCK_SIZE, Capacity
from batcher.timing.loading import usable_blocks

# As the options have them.
MAX_SLOTS, MAX_BLOCKS, MAX_BLOCK_SIZE, MAX_COUNT = 2**20, 2**24, 2**20, 2**31 - 1
RESOLVED, ASKED = "resolved_config", "engine_kwargs"
MAX_SHOWN = 80  # characters of a value

Value = Any


class Limit(Struct, frozen=True):
    """A setting as SchedulingSettings has it, or a batch; place: where it stands in the file."""

    value: Value
    place: str


class _UnfitError(Exception):
    """A value that a field cannot have; it says what is expected."""


class _Field(Struct, frozen=True):
    """What a field says of a setting.

    read: makes the value of the setting, or raises _UnfitError.
    """

    setting: str
    name: str
    read: Callable[[Any], Value]


def _count(most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int or not 1 <= value <= most:
            raise _UnfitError(f"expected a whole number from 1 to {most:,}")
        return value

    return read


def _threshold(value: Any) -> int | None:
    if value == 0 and type(value) is int:
        return None
    return _count(MAX_COUNT)(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _UnfitError("expected true or false")
    return value


def _capacity(value: Any) -> Capacity:
    return "watermark" if _flag(value) else "on-demand"


# Of several fields for a setting the first that is there counts.
_FIELDS = (
    _Field("batch", "max_num_seqs", _count(MAX_SLOTS)),
    _Field("max_batch_tokens", "max_num_scheduled_tokens", _count(MAX_COUNT)),
    _Field("max_batch_tokens", "max_num_batched_tokens", _count(MAX_COUNT)),
    _Field("long_prefill_threshold", "long_prefill_token_threshold", _threshold),
    _Field("block_size", "block_size", _count(MAX_BLOCK_SIZE)),
    _Field("kv_blocks", "num_gpu_blocks", _count(MAX_BLOCKS)),
    _Field("kv_tokens", "num_kv_tokens", _count(MAX_COUNT)),
    _Field("prefix_cache", "enable_prefix_caching", _flag),
    _Field("capacity", "scheduler_reserve_full_isl", _capacity),
)
NAMES = tuple(field.name for field in _FIELDS)

# What would change the schedule, and is not simulated -> whether a value is of that kind.
_NOT_SIMULATED: dict[str, Callable[[Any], bool]] = {
    "policy": lambda value: value != "fcfs",
    "enable_chunked_prefill": lambda value: value is False,
    "pipeline_parallel_size": lambda value: value != 1,
    "data_parallel_size": lambda value: value != 1,
    "speculative_config": bool,
}


class RunMeta(Struct, frozen=True):
    """limits: by the setting.  not_simulated: fields with a value no simulation heeds."""

    limits: dict[str, Limit]
    not_simulated: list[str]


def read_run_meta(content: bytes, name: str) -> RunMeta:
    """Return what the file `name` says of a run; there are no limits if it has none of NAMES.

    Raises:
        BatchdecodeError: it is no JSON object, or a field of it is not what it can be.
    """
    try:
        meta = json.loads(content.removeprefix(BOM_UTF8).decode())
    except json.JSONDecodeError as error:
        place = f"{name}:{error.lineno}:{error.colno}"
        raise BatchdecodeError(f"{place}: not JSON: {error.msg.lower()}") from None
    except RecursionError:
        raise BatchdecodeError(f"{name}: nested too deeply") from None
    except ValueError as error:
        raise BatchdecodeError(f"{name}: {error}") from None
    if not isinstance(meta, dict):
        raise BatchdecodeError(f"{name}: expected a JSON object with {', '.join(NAMES)}")
    said = sorted(_said(meta, ()), key=_trust)
    limits: dict[str, Limit] = {}
    for field in _FIELDS:
        for path, value in said:
            if path[-1] == field.name and field.setting not in limits:
                limits[field.setting] = Limit(_read(field, path, value, name), ".".join(path))
    _count_blocks(limits)
    settled = {path[-1]: (path, value) for path, value in reversed(said)}
    not_simulated = [
        f"{'.'.join(settled[field][0])} {json.dumps(settled[field][1])}"
        for field, is_other in _NOT_SIMULATED.items()
        if field in settled and is_other(settled[field][1])
    ]
    return RunMeta(limits, not_simulated)


def _said(meta: dict[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all that is said of a known field, with the names that lead to it."""
    for name, value in meta.items():
        path = (*above, name)
        if name in NAMES or name in _NOT_SIMULATED:
            if value is not None:
                yield path, value
        elif isinstance(value, dict):
            yield from _said(value, path)


def _trust(said: tuple[tuple[str, ...], Any]) -> int:
    path, _ = said
    return 0 if RESOLVED in path else 2 if ASKED in path else 1


def _read(field: _Field, path: tuple[str, ...], value: Any, name: str) -> Value:
    try:
        return field.read(value)
    except _UnfitError as error:
        shown = json.dumps(value)
        shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
        raise BatchdecodeError(f"{name}: {'.'.join(path)}: {error}, not {shown}") from None


def _count_blocks(limits: dict[str, Limit]) -> None:
    """Count the blocks that sequences get; tokens, where only they are known, are put into some."""
    tokens = limits.pop("kv_tokens", None)
    if tokens is not None and "kv_blocks" not in limits:
        size = limits["block_size"].value if "block_size" in limits else DEFAULT_BLOCK_SIZE
        limits["kv_blocks"] = Limit(min(tokens.value // size, MAX_BLOCKS), tokens.place)
    if "kv_blocks" in limits:
        blocks = limits["kv_blocks"]
        place = f"{blocks.place}, less the null block,"
        limits["kv_blocks"] = Limit(max(usable_blocks(blocks.value), 1), place)
