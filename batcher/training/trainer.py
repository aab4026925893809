"""A training run, from a corpus to a model, and its saved state.

Settings, corpus, target and the number of a step decide the step, so that a resumed run writes the
same bytes as an uninterrupted one.
"""

from collections.abc import Callable, Sequence
from io import BytesIO
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional

from batcher.errors import BatchdecodeError
from batcher.models.checkpoints import Checkpoint
from batcher.training.data import (
    NO_TARGET,
    STATE,
    Evaluation,
    Losses,
    Material,
    PackedRows,
    Packing,
    Precision,
    TrainingSettings,
    learning_rate,
    write_whole,
)
from batcher.transformer.config import RopeSettings, TransformerConfig
from batcher.transformer.stored import about

# A Llama in torch with Hugging Face's parameter names: RMSNorm, RoPE of halves, grouped heads,
# SwiGLU, as batcher/transformer computes it in numpy.

INITIAL_STD = 0.02  # as in GPT-2; smaller for weights that write to the residual stream, by depth


class Llama(nn.Module):
    """A Llama, initialised as GPT-2 is (Radford et al., 2019, section 2.3)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        is_plain = config.rope == RopeSettings(config.rope.theta) and config.activation == "silu"
        if config.architecture != "llama" or not is_plain:
            raise BatchdecodeError("it is not a Llama with SiLU and unscaled RoPE of halves")
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def products(**sizes: tuple[int, int]) -> nn.ModuleDict:
            return nn.ModuleDict(
                {f"{name}_proj": nn.Linear(*size, bias=False) for name, size in sizes.items()}
            )

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden, config.rms_norm_eps)

        self.config, table = config, nn.Embedding(config.vocab_size, hidden)
        layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "input_layernorm": norm(),
                    "self_attn": products(
                        q=(hidden, queries), k=(hidden, keys), v=(hidden, keys), o=(queries, hidden)
                    ),
                    "post_attention_layernorm": norm(),
                    "mlp": products(gate=(hidden, inner), up=(hidden, inner), down=(inner, hidden)),
                }
            )
            for _ in range(config.num_layers)
        )
        self.model: Any = nn.ModuleDict({"embed_tokens": table, "layers": layers, "norm": norm()})
        if not config.ties_embeddings:
            self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        small = INITIAL_STD / sqrt(2 * config.num_layers)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=small if writes else INITIAL_STD)

    def forward(self, tokens: Any, documents: Any) -> Any:
        """Return the logits of the token after each one: [rows, length, vocab]."""
        x, config, table = (
            self.model["embed_tokens"](tokens),
            self.config,
            self.model["embed_tokens"],
        )
        rows, length = tokens.shape
        is_same = documents[:, None, :, None] == documents[:, None, None, :]
        mask = torch.where(is_same.tril(), 0.0, float("-inf"))  # [rows, 1, queries, keys]
        powers = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(length), config.rope.theta**-powers)
        cosines, sines = angles.repeat(1, 2).cos(), angles.repeat(1, 2).sin()  # [length, head_dim]

        def turned(heads: Any) -> Any:  # pair i is i and i + half
            first, second = heads.chunk(2, dim=-1)
            return heads * cosines + torch.cat((-second, first), dim=-1) * sines

        for layer in self.model["layers"]:
            attention, network = layer["self_attn"], layer["mlp"]
            normed = layer["input_layernorm"](x)
            queries, keys, values = (  # [rows, heads, length, head_dim]
                attention[f"{name}_proj"](normed)
                .view(rows, length, -1, config.head_dim)
                .transpose(1, 2)
                for name in "qkv"
            )
            scores = turned(queries) @ turned(keys).transpose(2, 3) * config.head_dim**-0.5 + mask
            mixed = scores.softmax(dim=-1) @ values
            x = x + attention["o_proj"](mixed.transpose(1, 2).reshape(rows, length, -1))
            normed = layer["post_attention_layernorm"](x)
            activated = functional.silu(network["gate_proj"](normed)) * network["up_proj"](normed)
            x = x + network["down_proj"](activated)
        head = table if config.ties_embeddings else self.lm_head
        return functional.linear(self.model["norm"](x), head.weight)

    def load(self, checkpoint: Checkpoint) -> None:
        self.load_state_dict(
            {
                name: torch.from_numpy(kept.read().copy())
                for name, kept in checkpoint.tensors.items()
            }
        )


# A training step. Weights are always float32; products are computed in the given precision under
# autocast (Micikevicius et al., 2018), and loss scaling keeps small gradients in fp16.

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def loss_scaler(precision: Precision) -> Any:
    """Return what scales losses in fp16, so that small gradients do not vanish."""
    return torch.amp.GradScaler("cpu", enabled=precision == "fp16")


def accumulate_gradients(
    batches: Sequence[PackedRows], loss_sum: Callable[[PackedRows], Any], scaler: Any
) -> float:
    """Add up the gradients of the mean loss of all batches together; return that loss.

    The mean is over tokens, so the gradients are those of one large batch, though the last batch
    may have fewer rows, and rows fewer targets.
    """
    num_targets = sum(batch.num_targets for batch in batches)
    mean = 0.0
    for batch in batches:
        loss = loss_sum(batch) / num_targets
        scaler.scale(loss).backward()
        mean += loss.item()
    return mean


def update(model: nn.Module, optimizer: Any, scaler: Any, max_grad_norm: float) -> None:
    """Update the weights by the gradients, whose norm is clipped, and clear the gradients."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def log_probabilities(model: nn.Module, rows: PackedRows) -> Any:
    """Return the log-probabilities at each target: [targets, vocab] float32."""
    is_target = torch.from_numpy(rows.targets != NO_TARGET)
    logits = model(torch.from_numpy(rows.tokens), torch.from_numpy(rows.documents))
    return logits[is_target].float().log_softmax(dim=-1)


def cross_entropy(said: Any, rows: PackedRows) -> Any:
    targets = torch.from_numpy(rows.targets[rows.targets != NO_TARGET])
    return functional.nll_loss(said, targets, reduction="sum")


class Objective:
    """Cross-entropy with a corpus, or the KL divergence from a target's distribution.

    It is the forward divergence (Hinton et al., 2015): the draft should cover everything that the
    target may generate.
    """

    def __init__(
        self, model: nn.Module, precision: Precision, target: nn.Module | None = None
    ) -> None:
        self._model, self._target, self._precision = model, target, precision

    def loss_sum(self, rows: PackedRows) -> Any:
        """Return the sum of the losses of all targets in `rows`, as a tensor."""
        wanted, kind = None, TYPES[self._precision]
        with torch.autocast("cpu", kind, enabled=self._precision != "fp32"):
            if self._target is not None:
                with torch.no_grad():
                    wanted = log_probabilities(self._target, rows)
            said = log_probabilities(self._model, rows)
        if wanted is None:
            return cross_entropy(said, rows)
        return functional.kl_div(said, wanted, reduction="sum", log_target=True)

    @torch.no_grad()
    def evaluate(self, batches: list[PackedRows]) -> Evaluation:
        """Return the quality of the model on other rows, in float32."""
        sums = torch.zeros(1 if self._target is None else 4, dtype=torch.float64)
        for rows in batches:
            said = log_probabilities(self._model, rows)
            found = [cross_entropy(said, rows)]
            if self._target is not None:
                wanted = log_probabilities(self._target, rows)
                found += [
                    functional.kl_div(said, wanted, reduction="sum", log_target=True),
                    torch.minimum(said, wanted).exp().sum(),
                    (said.argmax(-1) == wanted.argmax(-1)).sum(),
                ]
            sums += torch.stack(found)
        return Evaluation(*(sums / sum(rows.num_targets for rows in batches)).tolist())


_BETAS = 0.9, 0.95  # as in GPT-3 and Llama


class Trainer:
    """A model in training."""

    def __init__(self, settings: TrainingSettings, material: Material) -> None:
        self.settings, self.material = settings, material
        self.step, self.losses = 0, Losses([], {})
        torch.manual_seed(settings.seed)
        self.model = Llama(
            TransformerConfig(
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
        )
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
            self._packing = Packing(material.training, settings.seq_length)
        with about("what is held out of the corpus"):
            held_out = Packing(material.held_out, settings.seq_length)
        self._held_out = held_out.in_order().batches(settings.batch_size)
        target = None
        if material.target is not None:
            with about("the target"):
                target = Llama(material.target.config)
                context = target.config.max_position_embeddings
                if context < settings.seq_length:
                    raise BatchdecodeError(
                        f"its context of {context:,} tokens is shorter than rows of seq_length "
                        f"{settings.seq_length:,}"
                    )
            target.load(material.target)
            target.eval()
        self._objective = Objective(self.model, settings.precision, target)

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def is_done(self) -> bool:
        return self.step == self.settings.steps

    def advance(self) -> float:
        """Do a step; return its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.settings)
        batches = self._packing.of_step(self.step, self.settings)
        loss = accumulate_gradients(batches, self._objective.loss_sum, self._scaler)
        if not isfinite(loss):
            raise BatchdecodeError(
                f"the loss of step {self.step + 1:,} is {loss}: use a smaller learning_rate than "
                f"{self.settings.learning_rate:g}, or more warmup_steps than "
                f"{self.settings.warmup_steps:,}"
            )
        update(self.model, self._optimizer, self._scaler, self.settings.max_grad_norm)
        self.step += 1
        self.losses.training.append(loss)
        return loss

    def evaluate(self) -> Evaluation:
        found: Evaluation = self._objective.evaluate(self._held_out)
        self.losses.held_out[self.step] = found
        return found

    def save(self, folder: Path) -> None:
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
        except Exception as error:  # torch raises anything for a damaged file
            raise BatchdecodeError(f"{path}: it is damaged: {type(error).__name__}") from error
        if different:
            name = different[0]
            raise BatchdecodeError(
                f"{path} belongs to another run: its {name} is {run[name]}, not {self._run()[name]}"
            )

    def _run(self) -> dict[str, Any]:
        target = self.material.target
        return {
            **msgspec.structs.asdict(self.settings),
            "corpus": self.material.digest,
            "target": None if target is None else target.digest(),
        }
