"""The settings under which requests are decoded: a few by system, the others drawn from a seed.

Rule: a case follows from the requests, the seed and its number, never from how many there are.
"""

from collections.abc import Iterator, Sequence
from itertools import count, islice
from math import ceil
from random import Random
from typing import Any, Literal, get_args

from msgspec import Struct

from batcher.models.base import Model
from batcher.models.context import context_of
from batcher.models.loading import cache_windows_of
from batcher.prompts import count_tokens, prefix_of
from batcher.request import Request
from batcher.requests.validation import num_slots_needed
from batcher.scheduling.policies import LONGEST_PREFIX_MATCH, POLICIES
from batcher.settings import DEFAULT_BLOCK_SIZE, DEFAULT_SCHEDULING, PreemptFor, SchedulingSettings

Arrivals = Literal["given", "at-once", "shuffled", "scattered"]

LARGE_BATCH = 64
BATCHES_PER_UNIT = (1, 2, 3, 8)  # of the slots that the largest request needs
BLOCK_SIZES = (1, 2, 4, DEFAULT_BLOCK_SIZE, 32)  # tokens
SCARCITIES = (1.0, 1.25, 2.0, 4.0)  # of the blocks that the largest request needs
THRESHOLDS = (1, 3, 16)  # tokens
STEP_SECONDS = (0.25, 1.0, 3.0)


class Case(Struct, frozen=True, kw_only=True):
    """One way to decode all requests.

    number: from 1.  arrivals: "given" as the requests say, "at-once" all at 0, "shuffled" that in
    another order, "scattered" at times that are drawn.  step_seconds: how long a step takes.
    """

    number: int
    batch: int
    settings: SchedulingSettings
    arrivals: Arrivals = "given"
    step_seconds: float = 1.0
    is_streaming: bool = False


class Needs(Struct, frozen=True):
    """What the largest of the requests needs.

    num_slots: at once.  sizes: of each request the slots and the tokens of each of these at most.
    num_groups: how many block tables a row of the model has.
    """

    num_slots: int
    sizes: list[tuple[int, int]]
    num_groups: int = 1

    def num_blocks(self, block_size: int) -> int:
        """Return the least number of blocks that no request is too large for."""
        most = max((rows * ceil(tokens / block_size) for rows, tokens in self.sizes), default=1)
        return most * self.num_groups


def needs_of(requests: Sequence[Request], model: Model) -> Needs:
    """Return what `requests` need of a model; a turn of a session has all before it in its prompt.

    Raises:
        BatchdecodeError: the model does not say what its layers read.
    """
    tokenizer, num_groups = model.tokenizer, len(cache_windows_of(model))
    context = context_of(model)
    histories: dict[str, int] = {}
    sizes = []
    for request in requests:
        prompts = [request.prompt, request.negative_prompt or []]
        num_tokens = max(
            len(prefix_of(prompt, tokenizer)) + count_tokens(prompt, tokenizer)
            for prompt in prompts
        )
        num_tokens += context.output_limit(request.output_limit, num_tokens)
        if request.session is not None:
            num_tokens += histories.get(request.session, 0)
            histories[request.session] = num_tokens
        sizes.append((num_slots_needed(request), max(num_tokens, 1)))
    return Needs(max((rows for rows, _ in sizes), default=1), sizes, num_groups)


def make_cases(needs: Needs, num_cases: int, seed: int) -> list[Case]:
    """Return the first `num_cases` cases: those by system and those drawn take turns."""
    return list(islice(_cases(needs, seed), num_cases))


def _cases(needs: Needs, seed: int) -> Iterator[Case]:
    systematic = _systematic(needs)
    for number in count(1):
        fields = next(systematic, None) if number % 2 else None
        if fields is None:
            fields = _drawn(needs, Random(f"{seed}/{number}"))  # noqa: S311 - no secret
        yield _case(number, fields.pop("batch", 2 * needs.num_slots), **fields)


def _case(number: int, batch: int, **fields: Any) -> Case:
    """Return the case that `fields` describe, with as much in a step as it needs at least."""
    own = {name: fields.pop(name) for name in Case.__struct_fields__ if name in fields}
    budget = fields.get("max_batch_tokens")
    if budget is not None:
        is_paged = SchedulingSettings(**fields).is_paged
        block_size = fields.get("block_size", DEFAULT_BLOCK_SIZE) if is_paged else 1
        fields["max_batch_tokens"] = max(budget, batch, block_size)
    return Case(number=number, batch=batch, settings=SchedulingSettings(**fields), **own)


def _systematic(needs: Needs) -> Iterator[dict[str, Any]]:
    """Yield one case for each thing that may be set, the most telling ones first."""
    unit = needs.num_slots
    yield {"batch": max(LARGE_BATCH, unit)}
    yield {"block_size": 4, "kv_blocks": needs.num_blocks(4), "batch": 8 * unit}
    yield {"long_prefill_threshold": 3, "max_batch_tokens": 1, "arrivals": "shuffled"}
    yield {"prefix_cache": True, "block_size": 1, "arrivals": "scattered"}
    yield {"prefill_order": "prefill-first", "batch": 8 * unit}
    yield {"is_streaming": True, "block_size": 2, "kv_blocks": needs.num_blocks(2)}
    yield {"batching": "static"}
    for multiple in BATCHES_PER_UNIT:
        yield {"batch": multiple * unit, "arrivals": "at-once"}
    for block_size in BLOCK_SIZES:
        tight = {"block_size": block_size, "kv_blocks": needs.num_blocks(block_size)}
        yield tight | {"batch": 8 * unit, "prefix_cache": False}
        yield tight | {"batch": 3 * unit, "prefill_order": "prefill-first"}
    for name in POLICIES:
        cache = {"prefix_cache": True} if name == LONGEST_PREFIX_MATCH else {}
        yield {"policy": name, "batch": 3 * unit, **cache}
    for capacity in ({"capacity": "no-evict"}, {"capacity": "on-demand"}, {"watermark": 0.2}):
        yield {**capacity, "kv_blocks": 2 * needs.num_blocks(DEFAULT_BLOCK_SIZE)}
    for measure in get_args(PreemptFor):
        yield {"preempt_for": measure, "batch": unit}
        yield {
            "preempt_for": measure,
            "batch": 3 * unit,
            "kv_blocks": needs.num_blocks(DEFAULT_BLOCK_SIZE),
        }
    for threshold in THRESHOLDS:
        yield {"long_prefill_threshold": threshold, "batch": 8 * unit}
    for num_more in (0, 1, 16):
        yield {"batch": 4 * unit, "max_batch_tokens": 4 * unit + num_more}


def _drawn(needs: Needs, random: Random) -> dict[str, Any]:
    """Return a case of which everything is drawn."""
    pick, unit = random.choice, needs.num_slots
    batch = pick([*(multiple * unit for multiple in BATCHES_PER_UNIT), max(LARGE_BATCH, unit)])
    block_size = pick(BLOCK_SIZES)
    fields: dict[str, Any] = {
        "batch": batch,
        "arrivals": pick(["given", "at-once", "shuffled", "scattered"]),
        "step_seconds": pick(STEP_SECONDS),
        "is_streaming": random.random() < 1 / 4,
        "batching": pick(["continuous", "continuous", "continuous", "static"]),
        "prefill_order": pick(["decode-first", "decode-first", "prefill-first"]),
        "long_prefill_threshold": pick([None, *THRESHOLDS]),
        "max_batch_tokens": pick([None, batch, batch + 1, 2 * batch, batch + 16]),
        "block_size": block_size,
        "prefix_cache": pick([None, True, False]),
        "aging": pick([3.0, 300.0]),
    }
    if random.random() < 3 / 4:
        fields["kv_blocks"] = ceil(needs.num_blocks(block_size) * pick(SCARCITIES))
        fields["capacity"] = pick(["on-demand", "on-demand", "watermark", "no-evict"])
    if fields["batching"] == "continuous" and fields.get("capacity") != "no-evict":
        fields["preempt_for"] = pick([None, None, *get_args(PreemptFor)])
    has_cache = SchedulingSettings(
        kv_blocks=fields.get("kv_blocks"), prefix_cache=fields["prefix_cache"]
    ).has_prefix_cache
    fields["policy"] = pick(
        [name for name in POLICIES if has_cache or name != LONGEST_PREFIX_MATCH]
    )
    if fields["policy"] == DEFAULT_SCHEDULING.policy:
        del fields["aging"]  # it would have no effect
    if "kv_blocks" not in fields and not has_cache:
        del fields["block_size"]  # as above
    return fields
