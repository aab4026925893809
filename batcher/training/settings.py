"""What a training run is made of: the sizes of the model, and how it is trained.

Rule: what decides a byte of the trained model is here, but for the corpus and a target.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError

Precision = Literal["fp32", "bf16", "fp16"]
MIN_VOCABULARY = 257  # all bytes, and the end of a text
Size = Annotated[int, Meta(ge=1, le=2**16)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TrainingSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a run; docs/training.md says what each one means.

    Raises:
        BatchdecodeError: they do not go together.
    """

    vocab_size: Annotated[int, Meta(ge=MIN_VOCABULARY, le=2**16)] = 1024
    num_layers: Annotated[int, Meta(ge=1, le=64)] = 4
    hidden_size: Size = 128
    num_heads: Size = 4
    intermediate_size: Size = 352
    seq_length: Annotated[int, Meta(ge=2, le=2**14)] = 256
    batch_size: Annotated[int, Meta(ge=1, le=2**12)] = 16
    accumulate: Annotated[int, Meta(ge=1, le=2**12)] = 1
    precision: Precision = "fp32"
    steps: Count = 1000
    warmup_steps: Annotated[int, Meta(ge=0, le=2**31)] = 50
    learning_rate: Annotated[float, Meta(gt=0, le=1)] = 3e-3
    weight_decay: Annotated[float, Meta(ge=0, le=1)] = 0.1
    max_grad_norm: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    holdout: Annotated[float, Meta(gt=0, le=0.5)] = 0.05
    save_every: Count = 100
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise BatchdecodeError(
                f"hidden_size {self.hidden_size} does not divide into {self.num_heads} heads of an "
                "even size, as RoPE turns pairs"
            )
        if self.warmup_steps >= self.steps:
            raise BatchdecodeError(
                f"warmup_steps {self.warmup_steps} leaves nothing of {self.steps} steps"
            )
