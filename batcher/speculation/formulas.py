"""What drafts gain if all are accepted equally often (Leviathan et al. 2023, section 3)."""


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Return how many tokens a step gives on average: (1 - a^(k+1)) / (1 - a).

    acceptance: how likely a draft is accepted if all before it are, 0 to 1.
    """
    if acceptance == 1:
        return num_drafts + 1.0
    return float(1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)


def expected_speedup(acceptance: float, num_drafts: int, draft_cost: float) -> float:
    """Return how many times faster it is than without drafts where they are verified for nothing.

    draft_cost: what a draft costs, as a share of a step.  Theorem 3.8.
    """
    return expected_tokens(acceptance, num_drafts) / (1 + draft_cost * num_drafts)


def simple_return(acceptance: float, num_drafts: float, draft_cost: float) -> float:
    """Return the accepted drafts for what is paid, as if none depended on those before it.

    num_drafts: of a step, on average.
    """
    return num_drafts * acceptance / (1 + draft_cost)
