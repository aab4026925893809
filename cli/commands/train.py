"""`batchdecode train`: trains a small model on texts, or a draft model for another."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from batcher.errors import BatchdecodeError
from batcher.requests.validation import misfit
from batcher.training.data import STATE, TrainingSettings, loss_curve, write_model, write_whole

from ..command import OUTPUT, REQUIRED, argument, command, flag, option
from ..config import settings_in
from ..run.files import print_text
from ..run.problems import say
from ..screen.terminal import can_animate, printable, progress_bar, shell_line
from ..signals import StopSignals
from .run import continuing_command

if TYPE_CHECKING:
    from batcher.training.data import Evaluation

TRAINING = "Training"
_NEEDED_MODULES = ("torch", "tokenizers", "safetensors")
LOSS_CURVE = "loss.svg"
_OVERRIDING = ("steps", "accumulate", "precision", "seed")

Show = Callable[[int, float, "Evaluation | None"], None]
"""Called with how many steps are done, the loss of the last one, and how good the model is now."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `batchdecode train`, None where not given; see docs/guide/training.md."""

    corpus: str = argument(
        "Training text: a file in UTF-8, or a folder of .txt files.", "CORPUS", default=REQUIRED
    )
    config: str | None = option(
        TRAINING, "YAML file with model sizes and training settings.", "FILE"
    )
    distill: str | None = option(
        TRAINING, "Distill this trained model into a draft model for it.", "TARGET"
    )
    steps: int | None = option(TRAINING, "Number of optimizer steps.  [default: 1000]", "N", min=1)
    accumulate: int | None = option(
        TRAINING, "Number of batches whose gradients make up one step.  [default: 1]", "N", min=1
    )
    precision: Literal["fp32", "bf16", "fp16"] | None = option(
        TRAINING, "Precision of products; weights are fp32.  [default: fp32]", "KIND"
    )
    seed: int | None = option(
        TRAINING, "Seed of the initial weights and the data order.  [default: 0]", "N", min=0
    )
    output: str = option(
        OUTPUT, "Folder for the model; pass it to --model.", "FOLDER", "-o", default=REQUIRED
    )
    resume: bool = flag(OUTPUT, "Resume the training in the folder.")
    force: bool = flag(OUTPUT, "Write into a folder that is not empty.")
    quiet: bool = flag(OUTPUT, "Show only problems, no progress.", "-q")


def train(options: TrainOptions) -> int:
    """Train a small Llama on texts, or a draft model for one; needs the extra `train`."""
    settings = settings_of(options)
    if any(find_spec(module) is None for module in _NEEDED_MODULES):
        raise BatchdecodeError(
            "training needs torch: install it with `pip install 'batchdecode[train]'`"
        )
    folder = Path(options.output)
    try:
        is_filled = folder.exists() and next(folder.iterdir(), None) is not None
    except OSError as error:
        raise BatchdecodeError(f"cannot write {folder}: {error.strerror}") from None
    if is_filled and not (options.resume or options.force):
        raise BatchdecodeError(
            f"--output {folder}: the folder is not empty: use --resume to continue its "
            "training, or --force to write into it"
        )
    from batcher.training.data import read_material  # noqa: PLC0415 - optional
    from batcher.training.trainer import Trainer  # noqa: PLC0415 - optional

    target = None if options.distill is None else Path(options.distill)
    trainer = Trainer(settings, read_material(Path(options.corpus), settings, target))
    if options.resume and (folder / STATE).exists():
        trainer.load(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with StopSignals() as stop:
        try:
            with _showing(settings.steps, options) as show:
                while not (trainer.is_done or stop.received):
                    loss = trainer.advance()
                    if trainer.step % settings.save_every == 0 or trainer.is_done:
                        trainer.evaluate()
                        trainer.save(folder)
                        write_whole(folder / LOSS_CURVE, loss_curve(trainer.losses).encode())
                    show(trainer.step, loss, trainer.losses.held_out.get(trainer.step))
            material, model = trainer.material, trainer.model
            if trainer.is_done:
                weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
                write_model(folder, model.config, weights, material.tokenizer)
            else:
                trainer.save(folder)
        except KeyboardInterrupt:  # a second signal
            return stop.exit_status
        if not trainer.is_done:
            again = f"continue with: {shell_line(continuing_command(sys.argv[1:]))}"
            say(f"stopped after {trainer.step:,} of {settings.steps:,} steps; {again}\n")
            return stop.exit_status
    found = trainer.losses.held_out[trainer.step]
    num_tokens = sum(map(len, material.held_out))
    bits = found.loss / log(2) * num_tokens / material.num_held_out_bytes
    name = printable(options.output)
    print_text(
        f"{name}: {trainer.num_parameters:,} parameters, {trainer.step:,} steps\n"
        f"  held out: {_words_of(found)} ({bits:.3f} bits a byte)\n"
    )
    return 0


def settings_of(options: TrainOptions) -> TrainingSettings:
    said = {} if options.config is None else settings_in(options.config, TrainingSettings)
    given = {name: getattr(options, name) for name in _OVERRIDING}
    given = {name: value for name, value in given.items() if value is not None}
    wrong = misfit(TrainingSettings, given)
    if wrong is not None:
        raise BatchdecodeError(f"--{wrong}")
    return msgspec.convert(said | given, TrainingSettings)


@contextmanager
def _showing(num_steps: int, options: TrainOptions) -> Iterator[Show]:
    """Yield a function that shows progress: a bar on a terminal, else a line per evaluation."""
    if options.quiet or not can_animate(2):

        def print_line(step: int, loss: float, held_out: "Evaluation | None") -> None:
            if held_out is not None and not options.quiet:
                found = _words_of(held_out)
                say(f"step {step:,} of {num_steps:,}: loss {loss:.3f}; held out {found}\n")

        yield print_line
        return
    last = ""
    with progress_bar("{task.description}", "training", num_steps) as show:

        def show_step(step: int, loss: float, held_out: "Evaluation | None") -> None:
            nonlocal last
            last = last if held_out is None else f", held out {held_out.loss:.3f}"
            show(completed=step, description=f"loss {loss:.3f}{last}")

        yield show_step


def _words_of(found: "Evaluation") -> str:
    words = f"{found.loss:.3f} nats a token"
    if found.acceptance is None:
        return words
    agreement = f"the same likeliest token {found.agreement:.1%}"
    return f"{words}; acceptance {found.acceptance:.1%}, {agreement}"


COMMANDS = {
    "train": command(
        train,
        TrainOptions,
        examples=(
            "batchdecode train plays/ --config tiny.yaml -o tiny",
            "batchdecode train plays/ --config draft.yaml --distill tiny -o draft",
            "batchdecode run requests.jsonl --model tiny",
        ),
        notes=(
            (
                "Exit codes: 0 trained; 1 the model cannot be written; 2 bad input or usage; 130 "
                "Ctrl-C; 143 SIGTERM."
            ),
        ),
    )
}
