"""Whether settings of the scheduler make sense.

Rule: settings that do not go together are called as on the command line, where most of them come
from.
"""

from collections.abc import Callable, Collection, Sequence

from batcher.errors import BatchdecodeError
from batcher.scheduling.policies import LONGEST_PREFIX_MATCH, policy_of
from batcher.settings import DEFAULT_SCHEDULING, PreemptFor, SchedulingSettings

# Setting -> whether it has an effect beside others, and what it has none without.
_EFFECTS: dict[str, tuple[Callable[[SchedulingSettings], bool], str]] = {
    "block_size": (lambda settings: settings.is_paged, "--kv-blocks or --prefix-cache on"),
    "capacity": (lambda settings: settings.kv_blocks is not None, "--kv-blocks"),
    "watermark": (
        lambda settings: settings.kv_blocks is not None and settings.capacity == "watermark",
        "--kv-blocks and --capacity watermark",
    ),
    "aging": (
        lambda settings: settings.policy != DEFAULT_SCHEDULING.policy,
        "a --policy other than fcfs",
    ),
}


def check_settings(num_slots: int, settings: SchedulingSettings) -> None:
    """Make sure that `settings` make sense for `num_slots` slots.

    Raises:
        BatchdecodeError: they do not; the message says why and what would.
    """
    for name in ("max_batch_tokens", "long_prefill_threshold", "kv_blocks", "block_size"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise BatchdecodeError(f"{name} must be at least 1, not {value}")
    if not settings.aging > 0:
        raise BatchdecodeError(f"--aging must be more than 0 seconds, not {settings.aging}")
    if not 0 <= settings.watermark < 1:
        message = f"--watermark must be a share from 0 to less than 1, not {settings.watermark}"
        raise BatchdecodeError(message)
    policy_of(settings.policy)
    budget, block_size = settings.max_batch_tokens, settings.block_size
    if budget is not None and budget < num_slots:
        raise BatchdecodeError(
            f"--max-batch-tokens {budget} is less than the {num_slots} slots: "
            "a step could not give each of them a token"
        )
    if budget is not None and settings.is_paged and budget < block_size:
        raise BatchdecodeError(
            f"--max-batch-tokens {budget} is less than a block of {block_size} tokens"
        )
    if settings.policy == LONGEST_PREFIX_MATCH and not settings.has_prefix_cache:
        raise BatchdecodeError("the policy lpm needs a prefix cache: --prefix-cache on")
    if settings.preempt_for is not None:
        _check_preemption(settings, settings.preempt_for)
    if settings.capacity != DEFAULT_SCHEDULING.capacity and settings.kv_blocks is None:
        raise BatchdecodeError(f"--capacity {settings.capacity} has no effect without --kv-blocks")


def _check_preemption(settings: SchedulingSettings, measure: PreemptFor) -> None:
    """Make sure that somebody can be preempted.

    Raises:
        BatchdecodeError: nobody ever is.
    """
    for name, value in (("batching", "static"), ("capacity", "no-evict")):
        if getattr(settings, name) == value:
            raise BatchdecodeError(
                f"--preempt-for {measure} does not go with --{name} {value}, where nobody is "
                "preempted"
            )


def check_effects(given: Collection[str], alternatives: Sequence[SchedulingSettings]) -> None:
    """Make sure that each setting which was given has an effect in one of the `alternatives`.

    Raises:
        BatchdecodeError: one has not; the message says without what.
    """
    for name, (has_effect, needed) in _EFFECTS.items():
        if name in given and not any(map(has_effect, alternatives)):
            option = f"--{name.replace('_', '-')}"
            raise BatchdecodeError(f"{option} has no effect without {needed}")
