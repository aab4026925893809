"""Dynamic-batching decode engine: requests in, results and a slot-by-slot timeline out.

The names below load on first use, so that `batchdecode --version` need not import numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batcher.api import decode
    from batcher.engine import Engine
    from batcher.errors import BatchdecodeError, InvariantError, ModelError, RequestError
    from batcher.models.base import Batch, Chunk, Model, ModelOutput, Tokenizer
    from batcher.models.callable import ByteTokenizer
    from batcher.models.simulated import SimulatedModel, SimulatedSettings
    from batcher.request import Request, Result

__version__ = "0.1.0"

_HOME_OF = {
    "Batch": "batcher.models.base",
    "BatchdecodeError": "batcher.errors",
    "ByteTokenizer": "batcher.models.callable",
    "Chunk": "batcher.models.base",
    "Engine": "batcher.engine",
    "InvariantError": "batcher.errors",
    "Model": "batcher.models.base",
    "ModelError": "batcher.errors",
    "ModelOutput": "batcher.models.base",
    "Request": "batcher.request",
    "RequestError": "batcher.errors",
    "Result": "batcher.request",
    "SimulatedModel": "batcher.models.simulated",
    "SimulatedSettings": "batcher.models.simulated",
    "Tokenizer": "batcher.models.base",
    "decode": "batcher.api",
}

__all__ = [
    "Batch",
    "BatchdecodeError",
    "ByteTokenizer",
    "Chunk",
    "Engine",
    "InvariantError",
    "Model",
    "ModelError",
    "ModelOutput",
    "Request",
    "RequestError",
    "Result",
    "SimulatedModel",
    "SimulatedSettings",
    "Tokenizer",
    "decode",
]


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public name `name` from the module that holds it."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
