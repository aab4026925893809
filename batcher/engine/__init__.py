"""The decode loop, and what it does with requests before, in and after the batch."""

from batcher.engine.driven import DrivenEngine, StepOutcome
from batcher.engine.engine import MAX_BATCH_SIZE, Engine

__all__ = ["MAX_BATCH_SIZE", "DrivenEngine", "Engine", "StepOutcome"]
