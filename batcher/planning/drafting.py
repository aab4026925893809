"""What drafts gain: against the same without any, and from which batch on they do not any more.

Rule: a gain is measured, by two simulations that differ in the drafts alone; what theory expects
(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023) stands beside
it, and knows neither what verifying costs nor that requests wait.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.planning.deployments import AXES, MAX_BATCH, Deployment, Value
from batcher.planning.measure import Outcome
from batcher.speculation.settings import expected_speedup, simple_return

_NEEDED_BY = ("draft_acceptance", "draft_cost")


class Gain(Struct, frozen=True, kw_only=True):
    """The gain of drafts in a deployment.

    tokens_per_s, without: measured with and without drafts; speedup: their quotient.  expected,
    simple: by the formulas (1-a^(k+1))/((1-a)(1+ck)) and ka/(1+c).  off_from: the least batch
    tried, each twice the one before, from which on drafts gain nothing; None if all gain.
    """

    tokens_per_s: float
    without: float
    speedup: float
    expected: float
    simple: float
    off_from: int | None


def without_drafts(deployment: Deployment) -> Deployment:
    return replace(deployment, draft_tokens=None, draft_acceptance=0.0, draft_cost=0.0)


def beside_none(values: Sequence[Value]) -> list[Value]:
    """Return numbers of draft tokens with none before them, for comparison."""
    return [*values] if None in values else [None, *values]


def check_drafts(given: Collection[str], alternatives: Iterable[Deployment]) -> None:
    """Raise a BatchdecodeError if an option of drafts has no effect or is missing."""
    has_drafts = any(each.draft_tokens is not None for each in alternatives)
    for name in _NEEDED_BY:
        if name in given and not has_drafts:
            option = AXES[name].option
            raise BatchdecodeError(f"{option} has no effect without --draft-tokens of at least 1")
    if has_drafts and "draft_acceptance" not in given:
        raise BatchdecodeError(
            "--draft-tokens needs --draft-acceptance, the share of drafts that are accepted"
        )


def speedups(cells: Sequence[tuple[Deployment, Outcome | None]]) -> list[float | None]:
    """Return the speedup of each cell over the same without drafts, None where unknown."""
    base: dict[Deployment, float] = {}
    for deployment, outcome in cells:
        if deployment.draft_tokens is None and outcome is not None:
            base[without_drafts(deployment)] = outcome.tokens_per_s
    found: list[float | None] = []
    for deployment, outcome in cells:
        without = base.get(without_drafts(deployment), 0.0)
        is_known = deployment.draft_tokens is not None and without > 0
        found.append(outcome.tokens_per_s / without if is_known and outcome is not None else None)
    return found


def off_from(gains: Iterable[tuple[int, float]]) -> int | None:
    """Return the least batch from which on no speedup is above 1; gains: (batch, speedup)."""
    least = None
    for batch, speedup in sorted(gains, reverse=True):
        if speedup > 1:
            break
        least = batch
    return least


def gain_of(
    deployment: Deployment, most_slots: int, tokens_per_s: Callable[[Deployment], float]
) -> Gain | None:
    """Return the gain of drafts in `deployment`, None without drafts or tokens, or for fleet files.

    most_slots: how many are of any use.  tokens_per_s: measures a deployment.
    """
    drafts = deployment.drafts
    if drafts is None or deployment.fleet is not None:
        return None

    def measured(batch: int) -> tuple[float, float]:
        sized = AXES["batch"].set(deployment, batch)
        return tokens_per_s(sized), tokens_per_s(without_drafts(sized))

    own = measured(deployment.batch)
    if not own[1]:
        return None
    gains = [(deployment.batch, own[0] / own[1])]
    batch, budget = deployment.batch, deployment.scheduling.max_batch_tokens
    most = min(most_slots, MAX_BATCH, MAX_BATCH if budget is None else budget)
    while gains[-1][1] > 1 and batch < most:
        batch = min(2 * batch, most)
        with_drafts, without = measured(batch)
        gains.append((batch, with_drafts / without if without else 1.0))
    terms = (drafts.acceptance, drafts.num_tokens, drafts.cost)
    return Gain(
        tokens_per_s=own[0],
        without=own[1],
        speedup=own[0] / own[1],
        expected=expected_speedup(*terms),
        simple=simple_return(*terms),
        off_from=off_from(gains),
    )
