"""The losses of a run as a picture: SVG, which needs nothing to be drawn."""

from collections.abc import Sequence

from batcher.training.losses import Losses

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
