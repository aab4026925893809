"""A decode engine with continuous batching: requests in, results and a timeline of slots out.

The names below load on first use, so that `batchdecode --version` does not import numpy.
"""

from importlib import import_module

TYPE_CHECKING = False  # as in typing, which takes longer to import than all the rest of this
if TYPE_CHECKING:
    from batcher.api import decode, load_model
    from batcher.engine import Engine
    from batcher.errors import BatchdecodeError, InvariantError, ModelError, RequestError
    from batcher.events import TokenEvent
    from batcher.generation import generate, generate_many
    from batcher.models.base import Batch, Chunk, Model, ModelOutput, Tokenizer
    from batcher.models.callables import LLM, CallSettings, LLMModel
    from batcher.models.simulated import SimulatedModel, SimulatedSettings
    from batcher.models.tokenizers import ByteTokenizer
    from batcher.request import PromptSegment, Request, Transition
    from batcher.result import Result

__version__ = "0.1.0"

_NAMES_IN = {
    "batcher.api": ("decode", "load_model"),
    "batcher.engine": ("Engine",),
    "batcher.errors": ("BatchdecodeError", "InvariantError", "ModelError", "RequestError"),
    "batcher.events": ("TokenEvent",),
    "batcher.generation": ("generate", "generate_many"),
    "batcher.models.base": ("Batch", "Chunk", "Model", "ModelOutput", "Tokenizer"),
    "batcher.models.callables": ("LLM", "CallSettings", "LLMModel"),
    "batcher.models.simulated": ("SimulatedModel", "SimulatedSettings"),
    "batcher.models.tokenizers": ("ByteTokenizer",),
    "batcher.request": ("PromptSegment", "Request", "Transition"),
    "batcher.result": ("Result",),
}
_HOME_OF = {name: module for module, names in _NAMES_IN.items() for name in names}

__all__ = [
    "LLM",
    "Batch",
    "BatchdecodeError",
    "ByteTokenizer",
    "CallSettings",
    "Chunk",
    "Engine",
    "InvariantError",
    "LLMModel",
    "Model",
    "ModelError",
    "ModelOutput",
    "PromptSegment",
    "Request",
    "RequestError",
    "Result",
    "SimulatedModel",
    "SimulatedSettings",
    "TokenEvent",
    "Tokenizer",
    "Transition",
    "decode",
    "generate",
    "generate_many",
    "load_model",
]


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """Import the public name `name` from its module."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
