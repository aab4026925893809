"""What a draft model takes of the memory that blocks are in, and how many of them it leaves.

Rule: memory is what the blocks of a deployment take for its model alone.  With a draft model its
weights go off that, and each block has room for the cells of both, as in `run --draft`.
"""

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.planning.deployments import AXES, Deployment
from batcher.timing.loading import model_shape_of
from batcher.timing.model_shape import load_model_shape


class DraftMemory(Struct, frozen=True):
    """What a draft model takes, in bytes, and the blocks that are left with it.

    weights, kv_per_token: of the draft model.  kv_per_token_without: of the model it drafts for.
    kv_blocks: how many are left; 0 if it does not fit in.
    """

    weights: int
    kv_per_token: int
    kv_per_token_without: int
    kv_blocks: int


def draft_memory_of(deployment: Deployment) -> DraftMemory | None:
    """Return what the draft model of `deployment` takes.

    None if it has none or no drafts, or memory without limit; or if a file has its replicas.

    Raises:
        BatchdecodeError: the model that its profile is of is not known.
    """
    num_blocks, size = deployment.scheduling.kv_blocks, deployment.scheduling.block_size
    if deployment.draft_model is None or deployment.drafts is None or num_blocks is None:
        return None
    if deployment.fleet is not None:
        return None
    shape, draft = model_shape_of(deployment.profile), load_model_shape(deployment.draft_model)
    if shape is None:
        raise BatchdecodeError(
            f"--draft-model needs a --profile of a known model, and {deployment.profile} tells none"
        )
    own, others = draft.kv_bytes_per_token, shape.kv_bytes_per_token
    memory = num_blocks * size * others - draft.weight_bytes
    num_left = max(memory, 0) // (size * (own + others))
    return DraftMemory(draft.weight_bytes, own, others, num_left)


def beside_draft(deployment: Deployment) -> Deployment:
    """Return `deployment` with the blocks that its draft model leaves, at least one."""
    memory = draft_memory_of(deployment)
    if memory is None:
        return deployment
    return AXES["kv_blocks"].set(deployment, max(memory.kv_blocks, 1))
