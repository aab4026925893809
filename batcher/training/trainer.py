"""A training run, step by step: from a corpus to a model, with all that a later process goes on by.

Rule: what a step does follows from the settings, the corpus, the target and the number of the step,
so that a run that was resumed writes the bytes of one that was not.
"""

from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import torch

from batcher.errors import BatchdecodeError
from batcher.training.files import STATE, write_whole
from batcher.training.llama import Llama
from batcher.training.losses import Evaluation, Losses
from batcher.training.material import Material
from batcher.training.objectives import Distillation, NextToken, Objective
from batcher.training.packing import BatchGroups, Packing
from batcher.training.schedule import learning_rate
from batcher.training.settings import TrainingSettings
from batcher.training.updates import accumulate_gradients, loss_scaler, update
from batcher.transformer.config import RopeSettings, TransformerConfig
from batcher.transformer.files import about

_BETAS = 0.9, 0.95  # as GPT-3 and Llama were trained


class Trainer:
    """A model, and what it learns.

    step: how many steps are done.  losses: what came of them.
    """

    def __init__(self, settings: TrainingSettings, material: Material) -> None:
        self.settings, self.material = settings, material
        self.step, self.losses = 0, Losses([], {})
        torch.manual_seed(settings.seed)
        self.model = Llama(config_of(settings, material))
        decayed = [weight for weight in self.model.parameters() if weight.ndim > 1]
        others = [weight for weight in self.model.parameters() if weight.ndim == 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            betas=_BETAS,
        )
        self._scaler = loss_scaler(settings.precision)
        with about("the corpus"):
            self._groups = BatchGroups(Packing(material.training, settings.seq_length), settings)
        with about("what is held out of the corpus"):
            held_out = Packing(material.held_out, settings.seq_length)
        self._held_out = held_out.in_order().batches(settings.batch_size)
        self._objective = self._make_objective()

    def _make_objective(self) -> Objective:
        checkpoint, precision = self.material.target, self.settings.precision
        if checkpoint is None:
            return NextToken(self.model, precision)
        with about("the target"):
            target = Llama(checkpoint.config)
            context = checkpoint.config.max_position_embeddings
            if context < self.settings.seq_length:
                raise BatchdecodeError(
                    f"its context of {context:,} tokens is shorter than rows of seq_length "
                    f"{self.settings.seq_length:,}"
                )
        target.load(checkpoint)
        return Distillation(self.model, target.eval(), precision)

    @property
    def num_parameters(self) -> int:
        """How many numbers the model learns."""
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self.step == self.settings.steps

    def advance(self) -> float:
        """Do a step; return its loss.

        Raises:
            BatchdecodeError: the loss is not a number; the weights are as they were.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.settings)
        batches = self._groups.of_step(self.step)
        loss = accumulate_gradients(batches, self._objective.loss_sum, self._scaler)
        if not isfinite(loss):
            raise BatchdecodeError(
                f"the loss of step {self.step + 1:,} is {loss}: give a smaller learning_rate than "
                f"{self.settings.learning_rate:g}, or more warmup_steps than "
                f"{self.settings.warmup_steps:,}"
            )
        update(self.model, self._optimizer, self._scaler, self.settings.max_grad_norm)
        self.step += 1
        self.losses.training.append(loss)
        return loss

    def evaluate(self) -> Evaluation:
        """Return how good the model is on what was held out."""
        found = self.losses.held_out[self.step] = self._objective.evaluate(self._held_out)
        return found

    # -- from one process to the next --------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write all that another process goes on by.

        Raises:
            OSError: it cannot be written; what was there before is there.
        """
        state = BytesIO()
        torch.save(
            {
                "run": self._run(),
                "step": self.step,
                "losses": msgspec.json.encode(self.losses),
                "model": self.model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "scaler": self._scaler.state_dict(),
            },
            state,
        )
        write_whole(folder / STATE, state.getvalue())

    def load(self, folder: Path) -> None:
        """Go on where a run that was saved was.

        Raises:
            BatchdecodeError: it is damaged, or it was another run.
        """
        path = folder / STATE
        try:
            state = torch.load(path, weights_only=True)
            run = state["run"]
            different = [name for name, value in self._run().items() if run[name] != value]
            if not different:
                self.model.load_state_dict(state["model"])
                self._optimizer.load_state_dict(state["optimizer"])
                self._scaler.load_state_dict(state["scaler"])
                self.losses = msgspec.json.decode(state["losses"], type=Losses)
                self.step = state["step"]
        except Exception as error:  # torch raises anything of a damaged file
            raise BatchdecodeError(f"{path}: it is damaged: {type(error).__name__}") from error
        if different:
            name = different[0]
            raise BatchdecodeError(
                f"{path}: another run: its {name} is {run[name]}, not {self._run()[name]}"
            )

    def _run(self) -> dict[str, Any]:
        """Return what has to be equal for one run to be the continuation of another."""
        target = self.material.target
        return {
            **msgspec.structs.asdict(self.settings),
            "corpus": self.material.digest,
            "target": None if target is None else target.digest(),
        }


def config_of(settings: TrainingSettings, material: Material) -> TransformerConfig:
    """Return the sizes of the model that is trained."""
    return TransformerConfig(
        "llama",
        vocab_size=material.vocab_size,
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_heads,
        head_dim=settings.hidden_size // settings.num_heads,
        intermediate_size=settings.intermediate_size,
        rms_norm_eps=1e-5,
        max_position_embeddings=settings.seq_length,
        rope=RopeSettings(),
        ties_embeddings=True,
        eos_token_ids=(material.end_id,),
    )
