"""What a second tier of the KV cache is of a deployment: its size, and how soon it is read.

Rule: what it takes to read a block follows from what its profile says of the model and the GPUs.
"""

from collections.abc import Collection, Iterable

from batcher.errors import BatchdecodeError
from batcher.planning.deployments import Deployment
from batcher.planning.simulator import KVOffload
from batcher.timing.loading import ticks_of_loading


def offload_of(deployment: Deployment) -> KVOffload | None:
    """Return the second tier of one engine, None if it has none.

    Raises:
        BatchdecodeError: it is not known what reading a block takes.
    """
    num_blocks, profile = deployment.kv_offload_blocks, deployment.profile
    scheduling = deployment.scheduling
    if num_blocks is None or scheduling.kv_blocks is None or not scheduling.has_prefix_cache:
        return None
    ticks = ticks_of_loading(profile, scheduling.block_size)
    if ticks is None:
        raise BatchdecodeError(
            "--kv-offload-blocks needs a --profile of a known model on a GPU whose data sheet has "
            f"host_gb_s, and {profile} tells none"
        )
    return KVOffload(num_blocks, ticks)


def check_offload(given: Collection[str], alternatives: Iterable[Deployment]) -> None:
    """Make sure that a second tier has an effect where it is given, and is known.

    Raises:
        BatchdecodeError: it is not.
    """
    tiers = [*map(offload_of, alternatives)]
    if "kv_offload_blocks" in given and not any(tiers):
        raise BatchdecodeError(
            "--kv-offload-blocks has no effect without --kv-blocks, or with --prefix-cache off"
        )
