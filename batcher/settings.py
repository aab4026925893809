"""What decides a schedule beside the requests and the batch size: limits, orders, memory, time.

Rule: the first line of a trace holds these, so whatever changes a schedule has a field here.
"""

from typing import Literal

from msgspec import Struct

Batching = Literal["continuous", "static"]
PrefillOrder = Literal["decode-first", "prefill-first"]
Capacity = Literal["watermark", "on-demand", "no-evict"]

PreemptFor = Literal["priority", "deadline"]

DEFAULT_BLOCK_SIZE = 16  # tokens
DEFAULT_AGING = 300.0  # seconds
GRAMMAR_TIMEOUT = 5.0  # seconds of processor time that compiling a constraint may take
DEFAULT_WATERMARK = 0.0  # of all blocks

# What a person says of the prefix cache -> the setting.
PREFIX_CACHE = {"on": True, "off": False, "auto": None}
PREFIX_CACHE_WORDS = {setting: word for word, setting in PREFIX_CACHE.items()}


class SchedulingSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How requests are scheduled; docs/scheduling.md says what each one means.

    policy: a name of batcher.scheduling.policies, or `module:function`.
    aging: seconds after which a request that waits goes before all that have waited less.
    preempt_for: what makes one that waits so urgent that one that runs gives way to it: a smaller
    priority, or an earlier deadline that it would miss otherwise; None: nothing.
    batching: "static" fills the slots only when all of them are empty.
    max_batch_tokens: the tokens a step computes at most, at least one for each slot.
    long_prefill_threshold: the prompt tokens of one sequence that a step computes at most.
    prefill_order: "prefill-first" computes prompts in steps of their own, while rows that decode
    stand still.
    kv_blocks: how many blocks of block_size tokens there are; None is no limit.
    prefix_cache: whether full blocks are found again by their tokens; None: where kv_blocks is set.
    capacity: when a sequence is let in: if all of it that is known has room and `watermark` of all
    blocks stay free ("watermark"), if what it computes next has ("on-demand"), or if all it can
    ever need has ("no-evict").
    """

    policy: str = "fcfs"
    aging: float = DEFAULT_AGING
    preempt_for: PreemptFor | None = None
    batching: Batching = "continuous"
    max_batch_tokens: int | None = None
    long_prefill_threshold: int | None = None
    prefill_order: PrefillOrder = "decode-first"
    kv_blocks: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    prefix_cache: bool | None = None
    capacity: Capacity = "watermark"
    watermark: float = DEFAULT_WATERMARK

    @property
    def has_prefix_cache(self) -> bool:
        """Whether blocks are found again by their tokens."""
        return self.kv_blocks is not None if self.prefix_cache is None else self.prefix_cache

    @property
    def sees_all(self) -> bool:
        """Whether who comes next depends on all that have arrived, and not on their order alone."""
        return self.policy != "fcfs" or self.preempt_for is not None

    @property
    def is_paged(self) -> bool:
        """Whether there are blocks at all."""
        return self.kv_blocks is not None or self.has_prefix_cache


DEFAULT_SCHEDULING = SchedulingSettings()
