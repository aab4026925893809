"""The learning rate of each step: linear warm-up, then half a cosine down to nothing."""

from math import cos, pi

from batcher.training.settings import TrainingSettings


def learning_rate(step: int, settings: TrainingSettings) -> float:
    """Return the learning rate of a step, the first of which is 0 (Loshchilov and Hutter, 2017).

    No step has a rate of 0: the first has a part of the warm-up, the last one of the cosine.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / (settings.steps - warmup)
    return settings.learning_rate * (1 + cos(pi * progress)) / 2
