"""From a checkpoint to what computes it: this process, or several, each with its columns."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from batcher.errors import BatchdecodeError
from batcher.transformer.checkpoint import Checkpoint, open_checkpoint
from batcher.transformer.layers import FloatArray
from batcher.transformer.linears import Linears, WholeLinears
from batcher.transformer.settings import TransformerSettings
from batcher.transformer.transformer import EMBEDDING, CausalModel, ReadWeight, Transformer, Watch

if TYPE_CHECKING:  # what is for several processes is loaded where there are several
    from batcher.transformer.rank_group import RankGroup


def decoder_of(
    checkpoint: Checkpoint, path: Path, settings: TransformerSettings, watch: Watch
) -> CausalModel:
    """Return what computes a checkpoint, which was opened from `path`.

    Raises:
        BatchdecodeError: its weights are damaged, or a process was killed.
    """
    if settings.low_memory:
        _check_low_memory(settings)
    if settings.tensor_parallel == 1:
        linears = _linears_of(checkpoint, settings)
        return Transformer(
            checkpoint.config, _reader(checkpoint, path, watch), linears, settings.layout
        )
    from batcher.transformer.rank_processes import RankProcesses  # noqa: PLC0415 - see above

    make = partial(make_rank, path, settings)
    return RankProcesses(checkpoint.config, make, settings.tensor_parallel, watch)


def _check_low_memory(settings: TransformerSettings) -> None:
    """Raise a BatchdecodeError if weights cannot be kept packed."""
    if settings.weights == "fp32":
        raise BatchdecodeError(
            "--low-memory keeps integers packed: give --weights int8-channel, too"
        )
    if settings.tensor_parallel > 1:
        raise BatchdecodeError(
            "--low-memory is for one process, and --tensor-parallel asks for more"
        )


def _linears_of(checkpoint: Checkpoint, settings: TransformerSettings) -> Linears:
    """Return what makes products in this process."""
    if not settings.low_memory:
        return WholeLinears(settings.weights, is_fast=settings.fast_math)
    from batcher.transformer.packed import PackedLinears  # noqa: PLC0415 - as above

    return PackedLinears(settings.weights, partial(checkpoint.read_rows, EMBEDDING))


def make_rank(
    path: Path,
    settings: TransformerSettings,
    group: "RankGroup",
    watch: Watch,
) -> Transformer:
    """Return what one of several processes computes of a checkpoint."""
    from batcher.transformer.tensor_parallel import ColumnParallelLinears  # noqa: PLC0415 - as above

    checkpoint = open_checkpoint(path)
    linears = ColumnParallelLinears(settings.weights, group, is_fast=settings.fast_math)
    read = _reader(checkpoint, path, watch)
    return Transformer(checkpoint.config, read, linears, settings.layout)


def _reader(checkpoint: Checkpoint, path: Path, watch: Watch) -> ReadWeight:
    """Return what reads the weights of a checkpoint, and makes sure that they are numbers."""
    num_read = 0

    def read(name: str) -> FloatArray:
        nonlocal num_read
        watch(min(num_read, len(checkpoint.names) - 1), len(checkpoint.names))
        num_read += 1
        with np.errstate(all="ignore"):  # of which more is said below
            weight = checkpoint.read(name)
        if not np.isfinite(weight).all():
            raise BatchdecodeError(f"{path}: {name} is damaged: not all of it are numbers")
        return weight

    return read
