"""Least squares with coefficients that are not negative, exactly, for a handful of columns."""

from itertools import combinations
from typing import Any

import numpy as np

_SAME = 1e-9  # of the loss: less is noise of the arithmetic, and fewer columns are better


def fit_nonnegative(columns: Any, target: Any) -> tuple[Any, float]:
    """Return the coefficients [columns], none below 0, that fit `target` best, and the loss.

    columns: [rows, columns].  target: [rows].  The loss is the sum of squares of what is left.
    The best fit is a plain one to some of the columns, so all their subsets are tried, on the
    triangle of a QR decomposition, which keeps the lengths and has only as many rows as columns.
    """
    scales = np.sqrt((columns * columns).sum(axis=0))
    scales[scales == 0] = 1.0
    triangle: Any = np.linalg.qr(np.column_stack([columns / scales, target]), mode="r")
    matrix, goal = triangle[:, :-1], triangle[:, -1]
    found, _, rank, _ = np.linalg.lstsq(matrix, goal, rcond=None)
    if rank == len(scales) and (found >= 0).all():  # nothing is better than the best of all
        return found / scales, float(((goal - matrix @ found) ** 2).sum())
    best, least = np.zeros(len(scales)), float(goal @ goal)
    smallest = _SAME**2 * least
    for size in range(1, len(scales) + 1):
        for chosen in combinations(range(len(scales)), size):
            part = matrix[:, chosen]
            found = np.linalg.lstsq(part, goal, rcond=None)[0]
            if (found < 0).any():
                continue
            rest = goal - part @ found
            loss = float(rest @ rest)
            if loss < least * (1 - _SAME) - smallest:
                best, least = np.zeros(len(scales)), loss
                best[list(chosen)] = found
    return best / scales, least
