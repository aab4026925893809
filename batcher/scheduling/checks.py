"""Whether settings of the scheduler make sense.

Rule: settings that do not go together are called as on the command line, where most of them come
from.
"""

from collections.abc import Collection, Sequence

from batcher.errors import BatchdecodeError
from batcher.fields import check_types
from batcher.scheduling.policies import LONGEST_PREFIX_MATCH, policy_of
from batcher.settings import DEFAULT_SCHEDULING, SETTINGS, PreemptFor, SchedulingSettings

_COUNTS = [name for name, setting in SETTINGS.items() if setting.kind is int]
_FRACTIONS = [
    (name, setting, setting.is_allowed)
    for name, setting in SETTINGS.items()
    if setting.is_allowed is not None
]


def check_settings(num_slots: int, settings: SchedulingSettings) -> None:
    """Make sure that `settings` make sense for `num_slots` slots.

    Raises:
        BatchdecodeError: they do not; the message says why and what would.
    """
    _check_values(settings)
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


def _check_values(settings: SchedulingSettings) -> None:
    """Make sure that each setting by itself has a value that it may have.

    Raises:
        BatchdecodeError: one has not.
    """
    check_types(settings, SETTINGS)
    for name in _COUNTS:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise BatchdecodeError(f"{name} must be at least 1, not {value}")
    for name, setting, is_allowed in _FRACTIONS:
        value = getattr(settings, name)
        if not is_allowed(value):
            raise BatchdecodeError(f"{setting.option} must be {setting.must_be}, not {value}")


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
    for name, setting in SETTINGS.items():
        if name not in given or setting.has_effect is None:
            continue
        if not any(map(setting.has_effect, alternatives)):
            raise BatchdecodeError(f"{setting.option} has no effect without {setting.without}")
