"""`batchdecode train`: from texts to a small model that `--model` reads, or to a draft for one."""

from dataclasses import dataclass
from typing import Literal

from ..help import OUTPUT, REQUIRED, argument, flag, option
from ..options import as_command

TRAINING = "Training"
EXAMPLES = (
    "batchdecode train plays/ --config tiny.yaml -o tiny",
    "batchdecode train plays/ --config draft.yaml --distill tiny -o draft",
    "batchdecode run requests.jsonl --model tiny",
)
NOTES = ("Exit codes: 0 trained; 1 it could not be written; 2 bad input or usage; 130 stopped.",)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `batchdecode train`, None where not given; docs/training.md has the rest."""

    corpus: str = argument(
        "What is learnt: a text in UTF-8, or a folder of .txt files.", "CORPUS", REQUIRED
    )
    config: str | None = option(
        TRAINING, "YAML: the sizes of the model, and how it is trained.", "FILE"
    )
    distill: str | None = option(
        TRAINING, "Learn what a trained model says of the corpus, as its draft.", "TARGET"
    )
    steps: int | None = option(TRAINING, "Updates of the weights.  [default: 1000]", "N", min=1)
    accumulate: int | None = option(
        TRAINING, "Batches whose gradients make one step.  [default: 1]", "N", min=1
    )
    precision: Literal["fp32", "bf16", "fp16"] | None = option(
        TRAINING, "What products are computed in; weights are fp32.  [default: fp32]", "KIND"
    )
    seed: int | None = option(
        TRAINING, "Seed of the weights, and of the order.  [default: 0]", "N", min=0
    )
    output: str = option(OUTPUT, "The folder that --model reads.", "FOLDER", "-o", default=REQUIRED)
    resume: bool = flag(OUTPUT, "Go on from where the folder says that a run was.")
    force: bool = flag(OUTPUT, "Write into a folder that holds something.")
    quiet: bool = flag(OUTPUT, "No progress, only problems.", "-q")


def train(options: TrainOptions) -> int:
    """Train a small Llama on texts, or a draft for one; needs the extra `train`."""
    from ..train import train_model  # noqa: PLC0415 - heavy

    return train_model(options)


COMMAND = as_command(train, TrainOptions, examples=EXAMPLES, notes=NOTES)
