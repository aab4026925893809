"""The decode loop, and what it does with requests before, in and after the batch."""

from batcher.engine.engine import MAX_BATCH_SIZE, Engine, StepOutcome

__all__ = ["MAX_BATCH_SIZE", "Engine", "StepOutcome"]
