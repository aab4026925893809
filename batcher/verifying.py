"""Verify batch invariance: decode all requests alone, twice, and under one case after another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from math import ceil
from random import Random
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from batcher.engine import Engine
from batcher.errors import InvariantError
from batcher.events import AcceptEvent, AdmitEvent, PreemptEvent, PrefillEvent, RollbackEvent
from batcher.models.base import Model, context_of
from batcher.models.loading import cache_windows_of
from batcher.models.simulated import SimulatedModel
from batcher.prompts import count_tokens, prefix_of
from batcher.request import Request
from batcher.requests.validation import num_slots_needed
from batcher.result import NUM_DIGITS, ErrorInfo, Result
from batcher.scheduling.queue import LONGEST_PREFIX_MATCH, POLICIES
from batcher.settings import DEFAULT_BLOCK_SIZE, DEFAULT_SCHEDULING, PreemptFor, SchedulingSettings
from batcher.speculation.settings import SpeculationSettings
from batcher.timing.step_time import ConstantStepTime

# The fields of a result that must not depend on the batch.

Key = tuple[str, int]
"""The id of a request and the index of one of its outputs."""
Outputs = Mapping[Key, Result]
Unlike = tuple[str, int | None, Any, Any]
"""A field that is not the same, the position of a token if it is about one, and both values."""

_SAME = (
    *("text", "finish_reason", "stop_reason", "limit"),
    *("segments", "constraint", "constraint_check", "constraint_verified"),
)
_UNIT = 1.5 * 10.0**-NUM_DIGITS  # the last digit may be rounded either way


class StreamedOutput(NamedTuple):
    """The tokens and texts of the token events of an output."""

    tokens: list[int]
    texts: list[str]


class Difference(Struct, frozen=True):
    """The first difference: the output, the field, and both values.

    position: of the first different token, None for other fields.
    alone_tokens, here_tokens: all tokens of the output. alone_error, here_error: why it ended
    early, which explains the rest.
    """

    id: str
    index: int
    field: str
    position: int | None
    alone: Any
    here: Any
    alone_tokens: list[int]
    here_tokens: list[int]
    alone_error: ErrorInfo | None = None
    here_error: ErrorInfo | None = None


def first_difference(order: Sequence[str], alone: Outputs, here: Outputs) -> Difference | None:
    """Return the first difference, or None."""
    places = {request_id: place for place, request_id in enumerate(order)}
    for key in sorted(alone.keys() | here.keys(), key=lambda key: (places[key[0]], key[1])):
        one, other = alone.get(key), here.get(key)
        if one is not None and other is not None:
            found = next(_compare(one, other), None)
        else:
            first, second = ("none" if r is None else r.finish_reason for r in (one, other))
            found = "result", None, first, second
        if found is not None:
            return _difference(key, found, one, other)
    return None


def stream_difference(
    requests: Sequence[Request], alone: Outputs, here: Outputs, told: Mapping[Key, StreamedOutput]
) -> Difference | None:
    """Return the first output `here` whose token events, in `told`, differ from its result."""
    streamed = {
        request.id: request
        for request in requests
        if request.best_of is None and request.num_beams == 1 and request.output_limit
    }
    for key, result in here.items():
        request = streamed.get(key[0])
        if request is None:
            continue
        tokens, texts = told.get(key, StreamedOutput([], []))
        streamed_text, text = "".join(texts), result.text
        if result.segments is not None:  # without the markers, as it is streamed
            text = "".join(segment.text for segment in result.segments)
        if tokens != result.tokens or not (streamed_text == text or request.echo):
            unlike = "stream", None, alone[key].text, streamed_text
            difference = _difference(key, unlike, alone[key], None)
            return replace(difference, here_tokens=tokens)
    return None


def _difference(key: Key, unlike: Unlike, one: Result | None, other: Result | None) -> Difference:
    return Difference(
        *key,
        *unlike,
        [] if one is None else one.token_ids,
        [] if other is None else other.token_ids,
        None if one is None else one.error,
        None if other is None else other.error,
    )


def _compare(one: Result, other: Result) -> Iterator[Unlike]:
    """Yield differences, tokens first."""
    for position, (token, other_token) in enumerate(zip_longest(one.token_ids, other.token_ids)):
        if token != other_token:
            yield "tokens", position, token, other_token
            return
    same = [(field, getattr(one, field), getattr(other, field)) for field in _SAME]
    codes = [None if result.error is None else result.error.code for result in (one, other)]
    for name, value, other_value in [*same, ("error", codes[0], codes[1])]:
        if value != other_value:
            yield name, None, value, other_value
    pairs = zip_longest(one.logprobs or (), other.logprobs or ())
    for position, (told, other_told) in enumerate(pairs):  # equal up to the reported digits
        is_alike = told is other_told
        if told is not None and other_told is not None:
            entries = [(told, other_told), *zip_longest(told.top, other_told.top)]
            is_alike = all(
                a is not None
                and b is not None
                and a.token == b.token
                and _are_close(a.logprob, b.logprob, 1)
                for a, b in entries
            )
        if not is_alike:
            yield "logprobs", position, told, other_told
    for name in ("cumulative_logprob", "score"):
        value, other_value = getattr(one, name), getattr(other, name)
        if not _are_close(value, other_value, max(len(one.token_ids), 1)):
            yield name, None, value, other_value


def _are_close(one: float | None, other: float | None, num_terms: int) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= _UNIT * num_terms


# Cases: a few systematic ones, then random ones.  A case depends on the requests, the seed and its
# number alone.

Arrivals = Literal["given", "at-once", "shuffled", "scattered"]

LARGE_BATCH = 64
BATCHES_PER_UNIT = (1, 2, 3, 8)  # of the slots that the largest request needs
BLOCK_SIZES = (1, 2, 4, DEFAULT_BLOCK_SIZE, 32)  # tokens
SCARCITIES = (1.0, 1.25, 2.0, 4.0)  # of the blocks that the largest request needs
THRESHOLDS = (1, 3, 16)  # tokens
STEP_SECONDS = (0.25, 1.0, 3.0)


class Case(Struct, frozen=True, kw_only=True):
    """Settings under which all requests are decoded.

    number: from 1. arrivals: "given" by the requests, "at-once" all at 0, "shuffled" the same in
    another order, "scattered" at random times. step_seconds: duration of a step.
    """

    number: int
    batch: int
    settings: SchedulingSettings
    arrivals: Arrivals = "given"
    step_seconds: float = 1.0
    is_streaming: bool = False


class Needs(Struct, frozen=True):
    """The needs of the largest request.

    num_slots: at once. sizes: slots and tokens per slot of each request, at most.
    num_groups: block tables of a row of the model.
    """

    num_slots: int
    sizes: list[tuple[int, int]]
    num_groups: int = 1

    def num_blocks(self, block_size: int) -> int:
        most = max((rows * ceil(tokens / block_size) for rows, tokens in self.sizes), default=1)
        return most * self.num_groups


def needs_of(requests: Sequence[Request], model: Model) -> Needs:
    """Return the needs of `requests`; the prompt of a turn includes all turns before it."""
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
    systematic, cases = _systematic(needs), []
    for number in range(1, num_cases + 1):
        fields = next(systematic, None) if number % 2 else None
        if fields is None:
            fields = _drawn(needs, Random(f"{seed}/{number}"))  # noqa: S311 - no secret
        fields.setdefault("batch", 2 * needs.num_slots)
        own = {name: fields.pop(name) for name in Case.__struct_fields__ if name in fields}
        budget = fields.get("max_batch_tokens")
        if budget is not None:  # as much in a step as the case needs at least
            is_paged = SchedulingSettings(**fields).is_paged
            block_size = fields.get("block_size", DEFAULT_BLOCK_SIZE) if is_paged else 1
            fields["max_batch_tokens"] = max(budget, own["batch"], block_size)
        cases.append(Case(number=number, settings=SchedulingSettings(**fields), **own))
    return cases


def _systematic(needs: Needs) -> Iterator[dict[str, Any]]:
    """Yield one case for each setting, the most revealing ones first."""
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


ModelMaker = Callable[[], Model]
Group = list[Request]


class Exercised(Struct):
    """Counts of risky operations in a verification.

    preemptions: of rows. cached_tokens: prefix cache hits. chunks: of prompts that took more than
    one step. accepted_drafts, rejected_drafts: tokens.
    """

    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    chunks: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0


class Verdict(Struct, kw_only=True):
    """The result of a verification.

    num_settings: cases with equal outputs. difference: the first one;
    case: of that difference, None for the second run alone.
    """

    num_requests: int
    num_outputs: int = 0
    num_tokens: int = 0
    num_settings: int = 0
    exercised: Exercised = field(default_factory=Exercised)
    difference: Difference | None = None
    case: Case | None = None

    @property
    def is_deterministic(self) -> bool:
        return self.difference is None or self.case is not None


def verify(
    requests: Sequence[Request],
    make_model: ModelMaker,
    cases: Sequence[Case],
    seed: int,
    on_case: Callable[[int], object],
    speculation: SpeculationSettings | None = None,
) -> Verdict:
    """Decode `requests` alone and under all `cases`, up to the first difference.

    The second run alone is in reverse order, to detect a model that keeps state of finished
    sequences.

    on_case: called with the number of finished cases.
    speculation: of the cases; alone, there are no drafts.

    Raises:
        BatchdecodeError: the model cannot decode the requests.
        InvariantError: the engine is wrong; the message names the case.
    """
    groups, order = groups_of(requests), [str(request.id) for request in requests]
    verdict = Verdict(num_requests=len(requests))
    alone = decode_alone(groups, make_model)
    again = decode_alone(groups[::-1], make_model)
    verdict.num_outputs = len(alone)
    verdict.num_tokens = sum(len(result.token_ids) for result in alone.values())
    verdict.difference = first_difference(order, alone, again)
    if verdict.difference is not None:
        return verdict
    for case in cases:
        try:
            here, told = decode_under(
                case, requests, make_model, seed, verdict.exercised, speculation
            )
        except InvariantError as error:
            raise InvariantError(f"{error} (under setting {case.number})") from error
        if case.is_streaming:
            verdict.difference = stream_difference(requests, alone, here, told)
        if verdict.difference is None:
            verdict.difference = first_difference(order, alone, here)
        if verdict.difference is not None:
            verdict.case = case
            return verdict
        verdict.num_settings += 1
        on_case(verdict.num_settings)
    return verdict


def groups_of(requests: Sequence[Request]) -> list[Group]:
    """Return groups of requests that may be decoded in any order: the turns of a session."""
    sessions: dict[str, Group] = {}
    groups: list[Group] = []
    for request in requests:
        if request.session is None:
            groups.append([request])
            continue
        if request.session not in sessions:
            groups.append(sessions.setdefault(request.session, []))
        sessions[request.session].append(request)
    return groups


def decode_alone(groups: Sequence[Group], make_model: ModelMaker) -> Outputs:
    """Return the outputs of all requests, each decoded alone."""
    engines: dict[int, Engine] = {}
    outputs: dict[Key, Result] = {}
    for group in groups:
        num_slots = max(map(num_slots_needed, group))
        engine = engines.get(num_slots)
        if engine is None:
            engine = engines[num_slots] = Engine(make_model(), num_slots)
        for request in group:
            engine.enqueue(replace(request, arrival_time=0.0, think_time=0.0))
            while engine.has_work:
                _keep(outputs, engine.step().results)
    return outputs


def decode_under(
    case: Case,
    requests: Sequence[Request],
    make_model: ModelMaker,
    seed: int,
    exercised: Exercised,
    speculation: SpeculationSettings | None = None,
) -> tuple[Outputs, dict[Key, StreamedOutput]]:
    """Return the outputs of all requests under `case`, and those of token events."""
    model = make_model()
    if isinstance(model, SimulatedModel):
        model.is_attentive = True
    step_time = None if case.step_seconds == 1.0 else ConstantStepTime(case.step_seconds)
    engine = Engine(
        model,
        case.batch,
        settings=case.settings,
        step_time=step_time,
        is_streaming=case.is_streaming,
        is_checked=True,
        speculation=speculation,
    )
    for request in arranged(case, requests, seed):
        engine.enqueue(request)
    outputs: dict[Key, Result] = {}
    told: dict[Key, StreamedOutput] = {}
    while engine.has_work:
        events, results, tokens = engine.step()
        for event in events:
            exercised.preemptions += type(event) is PreemptEvent
            exercised.chunks += type(event) is PrefillEvent
            if type(event) is AcceptEvent:
                exercised.accepted_drafts += event.tokens
            if type(event) is RollbackEvent:
                exercised.rejected_drafts += event.tokens
            if type(event) is AdmitEvent:
                exercised.cached_tokens += event.cached
        for token in tokens:
            of_output = told.setdefault((token.id, token.index), StreamedOutput([], []))
            of_output.tokens.extend(token.tokens or ())
            of_output.texts.append(token.text)
        _keep(outputs, results)
    exercised.steps += engine.num_steps
    return outputs, told


def arranged(case: Case, requests: Sequence[Request], seed: int) -> Sequence[Request]:
    """Return all requests in the order, and with the arrival times, of `case`."""
    if case.arrivals == "given":
        return requests
    random = Random(f"{seed}/{case.number}/arrivals")  # noqa: S311 - no secret
    groups = groups_of(requests)
    if case.arrivals != "at-once":
        random.shuffle(groups)
    horizon = 0.0
    if case.arrivals == "scattered":
        horizon = 2.0 * len(groups) * case.step_seconds
    return [
        replace(request, arrival_time=round(random.uniform(0, horizon), 2), think_time=0.0)
        for group in groups
        for request in group
    ]


def _keep(outputs: dict[Key, Result], results: Sequence[Result]) -> None:
    for result in results:
        key = result.id, result.index
        if key in outputs:
            raise InvariantError(f"two results {result.index} of request {result.id!r}")
        outputs[key] = result
