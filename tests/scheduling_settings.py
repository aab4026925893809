"""Scheduling settings that make trouble, and requests whose prompts have much in common, drawn."""

from hypothesis import strategies as st
from msgspec.structs import asdict, replace
from reference import ENGLISH, english_requests

from batcher.prompts import count_tokens
from batcher.request import PromptSegment, Request
from batcher.scheduling.queue import POLICIES
from batcher.settings import SchedulingSettings
from batcher.timing.profiles import step_time_of

BLOCK_SIZES = [1, 2, 3, 4, 16]


def blocks_needed(request, block_size):
    """Return how many blocks one admission of `request` needs at most, by the documentation.

    The last token that a row generates is never computed.
    """

    def of_row(num_prompt_tokens):
        max_tokens = max(request.output_limit, request.prompt_logprobs is not None)
        num_computed = max(num_prompt_tokens + max_tokens - 1, 1)
        return -(-num_computed // block_size)

    tokenizer = ENGLISH.tokenizer
    num_blocks = of_row(count_tokens(request.prompt, tokenizer)) * max(request.num_beams, 1)
    if request.cfg_scale != 1:
        num_blocks += of_row(count_tokens(request.negative_prompt or [], tokenizer))
    return num_blocks


@st.composite
def scheduling_settings(draw, num_slots, num_blocks, block_size):
    """Draw settings for `num_slots` slots and blocks of `block_size` tokens."""
    kv_blocks = draw(num_blocks)
    fields = {
        "policy": draw(st.sampled_from(list(POLICIES))),
        "aging": draw(st.sampled_from([4.0, 300.0])),
        "batching": draw(st.sampled_from(["continuous", "continuous", "continuous", "static"])),
        "prefill_order": draw(st.sampled_from(["decode-first", "prefill-first"])),
        "kv_blocks": kv_blocks,
        "block_size": block_size,
        "prefix_cache": draw(st.sampled_from([None, True, True, False])),
    }
    if fields["policy"] == "lpm":
        fields["prefix_cache"] = True
    capacities = ["on-demand", "watermark", "no-evict"]
    if draw(st.integers(0, 2)) == 0:
        fields["preempt_for"] = draw(st.sampled_from(["priority", "deadline"]))
        fields["batching"] = "continuous"
        capacities.remove("no-evict")
    if kv_blocks is not None:
        fields["capacity"] = draw(st.sampled_from(capacities))
        fields["watermark"] = draw(st.sampled_from([0.01, 0.4]))
    if draw(st.booleans()):
        fields["max_batch_tokens"] = max(num_slots, block_size) + draw(st.integers(0, 20))
    if draw(st.booleans()):
        fields["long_prefill_threshold"] = draw(st.integers(1, 12))
    return SchedulingSettings(**fields)


def step_times():
    return st.sampled_from([None, None, step_time_of("rtx4090_llama3.1-8b")])


@st.composite
def sharing(draw, requests):
    """Draw one of `requests` to be scheduled in one way or another, many with a common prompt."""
    request = draw(requests)
    changes = {
        "priority": draw(st.integers(0, 2)),
        "cache_salt": draw(st.sampled_from([None, None, "a", "b"])),
        "deadline": draw(st.sampled_from([None, request.arrival_time + 5.0])),
    }
    if not (request.heal or request.echo) and draw(st.booleans()):
        changes["prompt"] = draw(st.one_of(common_prompts(), segmented_prompts()))
    return replace(request, **changes)


def requests_of_all_kinds():
    """Draw requests, some of several outputs."""
    sampled, no_stops = {"temperature": 1.0}, dict.fromkeys(("stop", "stop_token", "stop_sequence"))
    several = [{}, {}, sampled | {"n": 2}, sampled | {"best_of": 3}, no_stops | {"num_beams": 3}]
    more = st.sampled_from(several)
    return st.builds(lambda one, more: Request(**asdict(one) | more), english_requests(), more)


def common_prompts():
    return st.builds(
        lambda shared, own: [*range(10, 10 + shared), *own],
        st.integers(0, 40),
        st.lists(st.integers(3, 9), max_size=3),
    )


def segmented_prompts():
    """Draw up to four segments, each one of a few of its length, the first nearly always equal."""
    segment = st.builds(
        PromptSegment,
        length=st.integers(1, 13),
        seed=st.sampled_from([0, 0, 0, 1]),
        type=st.sampled_from(["system", "user", "assistant", None]),
        pin=st.booleans(),
    )
    return st.lists(segment, min_size=1, max_size=4)
