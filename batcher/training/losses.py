"""What a run tells of itself: how well the model learns, and how good it is on other texts."""

from collections.abc import Sequence
from math import cos, pi
from typing import NamedTuple

from batcher.training.data import TrainingSettings

# The learning rate of each step: linear warm-up, then half a cosine down to nothing.


def learning_rate(step: int, settings: TrainingSettings) -> float:
    """Return the learning rate of a step, the first of which is 0 (Loshchilov and Hutter, 2017).

    No step has a rate of 0: the first has a part of the warm-up, the last one of the cosine.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / (settings.steps - warmup)
    return settings.learning_rate * (1 + cos(pi * progress)) / 2


class Evaluation(NamedTuple):
    """How good a model is on texts that it has not learnt from, in means over their tokens.

    loss: its cross-entropy, in nats.
    divergence: KL(target, draft); acceptance: the sum of min(p, q) over the vocabulary, by which a
    token drafted at temperature 1 is accepted (Leviathan et al., 2023, section 3.2); agreement: how
    often the likeliest token is the same.  None where there is no target.
    """

    loss: float
    divergence: float | None = None
    acceptance: float | None = None
    agreement: float | None = None

    @property
    def objective(self) -> float:
        """What training makes less: the loss, or the divergence from a target."""
        return self.loss if self.divergence is None else self.divergence


class Losses(NamedTuple):
    """What a run has told so far; training: of each step.  held_out: after so many steps."""

    training: list[float]
    held_out: dict[int, Evaluation]


# The losses of a run as a picture: SVG, which needs nothing to be drawn.

WIDTH, HEIGHT, MARGIN = 720, 360, 48
_MAX_POINTS = 600  # of a line: each is the mean of as many steps
_TRAINING, _HELD_OUT = "#8da0cb", "#d95f02"

Point = tuple[float, float]


def loss_curve(losses: Losses) -> str:
    """Return the training loss, averaged over a few steps a point, and that of held-out text.

    Of a draft both are divergences.
    """
    size = -(-len(losses.training) // _MAX_POINTS)
    parts = [
        losses.training[start : start + size] for start in range(0, len(losses.training), size)
    ]
    training = [(n * size + len(part), sum(part) / len(part)) for n, part in enumerate(parts)]
    held_out = [(step, found.objective) for step, found in losses.held_out.items()]
    values = [value for _, value in (*training, *held_out)]
    low, high, num_steps = min(values), max(values), len(losses.training)

    def place(point: Point) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * point[0] / num_steps
        y = MARGIN + (HEIGHT - 2 * MARGIN) * (high - point[1]) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    def line(points: Sequence[Point], color: str) -> str:
        path = " ".join(map(place, points))
        return f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{path}"/>'

    def text(x: int, y: int, words: str, color: str = "#444") -> str:
        return f'<text x="{x}" y="{y}" fill="{color}">{words}</text>'

    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    picture = [
        f'{head} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        text(4, MARGIN, f"{high:.2f}"),
        text(4, HEIGHT - MARGIN, f"{low:.2f}"),
        text(MARGIN, HEIGHT - MARGIN // 2, "step 0"),
        text(WIDTH - 2 * MARGIN, HEIGHT - MARGIN // 2, f"{num_steps:,}"),
        text(MARGIN, MARGIN // 2, "training loss", _TRAINING),
        text(MARGIN + 100, MARGIN // 2, "held out", _HELD_OUT),
        line(training, _TRAINING),
        line(held_out, _HELD_OUT),
        "</svg>",
    ]
    return "\n".join(picture) + "\n"
