"""Everything that decides a schedule, besides requests and batch size.

Rule: the first line of a trace holds these settings, so everything that changes a schedule is a
field here.  Options of the commands, their help, docs/reference/cli.md, the axes of comparisons and
the checks of values follow from this table.
"""

from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import Struct, to_builtins

from batcher.fields import FieldFacts, fields_of

Batching = Literal["continuous", "static"]
PrefillOrder = Literal["decode-first", "prefill-first"]
Capacity = Literal["watermark", "on-demand", "no-evict"]

PreemptFor = Literal["priority", "deadline"]

DEFAULT_BLOCK_SIZE = 16  # tokens
DEFAULT_AGING = 300.0  # seconds
GRAMMAR_TIMEOUT = 5.0  # seconds of processor time to compile a constraint
DEFAULT_WATERMARK = 0.0  # of all blocks
MAX_KV_BLOCKS, MAX_BLOCK_SIZE = 2**24, 2**20
MIN_AGING, MAX_AGING = 1e-6, 1e9  # seconds, as an option takes them

PREFIX_CACHE = {"on": True, "off": False, "auto": None}
PREFIX_CACHE_WORDS = {setting: word for word, setting in PREFIX_CACHE.items()}


class Setting(FieldFacts, frozen=True):
    """A setting: its option and its column in comparisons.

    metavar: of the option.  title, rank: of the column.  smallest, largest: range of a number.
    is_allowed, must_be: check of a fraction and its message; expected: message in comparisons, if
    different.  has_effect: whether it matters to these settings; without: what it needs to.
    is_common: whether the short help page shows it.
    """

    metavar: str
    title: str
    rank: int = 99
    smallest: float | None = None
    largest: float | None = None
    is_allowed: Callable[[float], bool] | None = None
    must_be: str = ""
    expected: str = ""
    has_effect: Callable[[Any], bool] | None = None
    without: str = ""
    is_common: bool = False

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def kind(self) -> Any:
        return self.parts[0]

    @property
    def is_optional(self) -> bool:
        return NoneType in get_args(self.type)

    @property
    def choices(self) -> dict[str, Any] | None:
        """The values by their words; None if the type has others."""
        if self.kind is bool:
            return PREFIX_CACHE
        if get_origin(self.kind) is not Literal:
            return None
        return {name: name for name in get_args(self.kind)}

    @property
    def takes_none(self) -> bool:
        """Whether "none" means None."""
        return self.is_optional and None not in (self.choices or {}).values()

    @property
    def shown_default(self) -> str:
        if self.kind is int and self.default is None:
            return "no limit"
        return "" if self.default is None and self.takes_none else self.shown(self.default)

    def read(self, given: Any) -> Any:
        return given if self.choices is None else self.choices.get(given, given)

    def shown(self, value: Any) -> str:
        for word, choice in (self.choices or {}).items():
            if choice == value:
                return word
        if value is None:
            return "none"
        return f"{value:g}" if isinstance(value, float) else str(value)


class SchedulingSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How requests are scheduled; docs/guide/scheduling.md explains each setting."""

    policy: Annotated[
        str,
        "admission order: `fcfs`, `priority`, `sjf`, `ljf`, `deadline`, `lpm`, or "
        "[`module:function`](../guide/policies.md#a-policy-of-your-own)",
        Setting("NAME", "policy", 2, is_common=True),
    ] = "fcfs"
    aging: Annotated[
        float,
        "waiting time after which a request is admitted first",
        Setting(
            "SECONDS",
            "aging",
            3,
            MIN_AGING,
            MAX_AGING,
            is_allowed=lambda value: value > 0,
            must_be="more than 0 seconds",
            expected="seconds above 0",
            has_effect=lambda settings: settings.policy != "fcfs",
            without="a --policy other than fcfs",
        ),
    ] = DEFAULT_AGING
    preempt_for: Annotated[
        PreemptFor | None,
        "preempt a running request for "
        "[a more urgent one](../guide/policies.md#preempt-for-a-more-urgent-request): "
        "by `priority` (lower is more urgent), or by `deadline` (if the waiting request would miss "
        "an earlier deadline)",
        Setting("WHAT", "preempt", 4),
    ] = None
    batching: Annotated[
        Batching,
        "slot refill: `continuous`, or `static` (only when all slots are empty)",
        Setting("KIND", "batching", 1),
    ] = "continuous"
    max_batch_tokens: Annotated[
        int | None,
        "token budget per step (prefill + decode); at least one token per slot",
        Setting("N", "budget", 11, 1, is_common=True),
    ] = None
    long_prefill_threshold: Annotated[
        int | None, "maximum prompt tokens per request and step", Setting("N", "threshold", 12, 1)
    ] = None
    prefill_order: Annotated[
        PrefillOrder,
        "order of prefill and decode: `decode-first`, or `prefill-first` (prompts get steps of "
        "their own, and running rows pause)",
        Setting("ORDER", "prefill", 5),
    ] = "decode-first"
    kv_blocks: Annotated[
        int | None,
        "number of KV blocks in memory",
        Setting("N", "blocks", 10, 1, MAX_KV_BLOCKS, is_common=True),
    ] = None
    block_size: Annotated[
        int,
        "tokens per KV block",
        Setting(
            "N",
            "block",
            9,
            1,
            MAX_BLOCK_SIZE,
            has_effect=lambda settings: settings.is_paged,
            without="--kv-blocks or --prefix-cache on",
        ),
    ] = DEFAULT_BLOCK_SIZE
    prefix_cache: Annotated[
        bool | None,
        "reuse KV blocks of identical prefixes: `on`, `off`, or `auto` (on with `--kv-blocks`)",
        Setting("WHEN", "cache", 6),
    ] = None
    capacity: Annotated[
        Capacity,
        "[free KV blocks required to admit a request](../guide/scheduling.md#capacity): "
        "`watermark`, `on-demand` or `no-evict`",
        Setting(
            "KIND",
            "capacity",
            7,
            has_effect=lambda settings: settings.kv_blocks is not None,
            without="--kv-blocks",
        ),
    ] = "watermark"
    watermark: Annotated[
        float,
        "share of blocks that `--capacity watermark` keeps free; less than 1",
        Setting(
            "SHARE",
            "watermark",
            8,
            0,
            is_allowed=lambda value: 0 <= value < 1,
            must_be="a share from 0 to less than 1",
            has_effect=lambda settings: (
                settings.kv_blocks is not None and settings.capacity == "watermark"
            ),
            without="--kv-blocks and --capacity watermark",
        ),
    ] = DEFAULT_WATERMARK

    @property
    def has_prefix_cache(self) -> bool:
        return self.kv_blocks is not None if self.prefix_cache is None else self.prefix_cache

    @property
    def sees_all(self) -> bool:
        """Whether the next request depends on all that have arrived, not only on their order."""
        return self.policy != "fcfs" or self.preempt_for is not None

    @property
    def beside_policy(self) -> dict[str, Any]:
        settings: dict[str, Any] = to_builtins(self)
        settings.pop("policy", None)
        return settings

    @property
    def is_paged(self) -> bool:
        return self.kv_blocks is not None or self.has_prefix_cache


CacheWindows = tuple[int | None, ...]
"""Attention window in tokens of each group of layers with a block table; None: unlimited."""

ONE_GROUP: CacheWindows = (None,)
DEFAULT_SCHEDULING = SchedulingSettings()
SETTINGS: dict[str, Setting] = fields_of(SchedulingSettings)
