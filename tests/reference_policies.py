"""The sort key of each policy, by its definition in docs/guide/policies.md; smallest first."""

from math import inf


def policy_key(policy, *, num_prompt_tokens, max_tokens, priority, deadline, num_cached_tokens=0):
    size = num_prompt_tokens + max_tokens
    keys = {
        "fcfs": 0,
        "priority": priority,
        "sjf": size,
        "ljf": -size,
        "deadline": inf if deadline is None else deadline,
        "lpm": -num_cached_tokens,
    }
    return keys[policy]
