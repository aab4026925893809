"""Workloads: the times, lengths and shared contents of requests.

A file is read as a whole; a synthetic workload is drawn as its requests arrive, with the same
requests that `batchdecode workload` writes.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice, takewhile
from math import ceil
from typing import Any, ClassVar, Self

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.fields import read_number
from batcher.models.base import ANY_LENGTH, UNLIMITED, Context, Model, context_of
from batcher.planning import synthetic
from batcher.planning.simulated_sequence import GREEDY, Piece, SimulatedSequence
from batcher.planning.synthetic import Distribution, PriorityShares, draw_lengths, make_generator
from batcher.planning.workload_traces import DEFAULT_NAME, WorkloadError
from batcher.prompts import (
    SegmentEnd,
    eviction_priority_of,
    has_segments,
    num_lasting_tokens,
    prefix_of,
)
from batcher.request import MAX_ANSWER, MAX_LENGTH, TO_THE_END, PromptInput, Request, is_plain
from batcher.scheduling.queue import ARRIVAL_ORDER
from batcher.timing.catalog import hint_at
from batcher.tokens import NO_TOKENS, Tokens


class Workload(Struct, frozen=True, gc=False):
    """Jobs in the order of the input, of which simulations run copies."""

    jobs: list[SimulatedSequence]
    context: Context = ANY_LENGTH

    @property
    def num_samples(self) -> int:
        return len(self.jobs)

    exact_num_samples = num_samples

    @property
    def priorities(self) -> set[int]:
        return {job.priority for job in self.jobs}

    @property
    def num_output_tokens(self) -> int:
        return sum(job.output.length for job in self.jobs)

    @property
    def num_tokens(self) -> int:
        return sum(job.num_prompt_tokens + job.output.length for job in self.jobs)

    def num_blocks(self, block_size: int) -> int:
        """Return the number of blocks that hold all jobs, each turn with its history."""
        total = 0
        histories: dict[str | None, int] = {}  # by session
        for job in self.jobs:
            num_held = histories.get(job.session, 0) + job.num_prompt_tokens + job.max_tokens
            if job.has_default_limit:  # limited by the context
                num_held = min(num_held, self.context.max_context)
            if job.session is not None:
                histories[job.session] = num_held
            total += -(-num_held // block_size)
        return total

    @property
    def shares_nothing(self) -> bool:
        """Whether it is certain that no two jobs begin with the same tokens."""
        beginnings = set()
        for job in self.jobs:
            first = next(iter(job.own_prompt), None)
            if first is None or first.tokens is not None or job.session is not None:
                return False
            beginnings.add(first.symbol)
        return len(beginnings) == len(self.jobs)

    @property
    def span(self) -> float:
        arrivals = [job.arrival_time for job in self.jobs]
        return max(arrivals, default=0.0) - min(arrivals, default=0.0)

    @property
    def mean_rate(self) -> float | None:
        num_arrivals = sum(not job.index for job in self.jobs)
        return (num_arrivals - 1) / self.span if self.span else None

    def at_rate(self, rate: float) -> Self:
        """Return the workload with arrivals and deadlines `rate` times as fast."""
        if rate == 1:
            return self
        jobs = []
        for job in self.jobs:
            arrival, deadline = job.arrival_time / rate, job.deadline
            deadline = None if deadline is None else deadline - job.arrival_time + arrival
            jobs.append(replace(job, arrival_time=arrival, deadline=deadline))
        return replace(self, jobs=jobs)


def workload_of(
    requests: Iterable[Request],
    model: Model,
    outputs: Mapping[tuple[int, int], Sequence[int]] | None = None,
) -> Workload:
    """Return the workload of valid `requests`, as `model` reads their prompts.

    outputs: (input index, index of the sample) -> its tokens, required unless it ends at
    max_tokens.

    Raises:
        BatchdecodeError: a request has beams or cfg_scale, or an output of unknown length.
    """
    jobs: list[SimulatedSequence] = []
    sessions: set[str] = set()  # that have a turn by now
    context = context_of(model)
    for input_index, request in enumerate(requests):
        request_id = request.id if request.id is not None else str(input_index + 1)
        for field, plain in (("num_beams", 1), ("cfg_scale", 1.0)):
            value = getattr(request, field)
            if value != plain and request.output_limit:
                raise BatchdecodeError(
                    f"request {request_id!r}: {field} {value} cannot be simulated; only "
                    f"{field} {plain} can"
                )
        prefix = prefix_of(request.prompt, model.tokenizer)
        if request.session is not None:
            prefix = NO_TOKENS if request.session in sessions else prefix
            sessions.add(request.session)
        prompt, segment_ends = _read(request.prompt, model, prefix)
        num_prompt = sum(piece.length for piece in prompt)
        num_lasting = len(prefix) + num_lasting_tokens(request.prompt, model.tokenizer)
        max_tokens = request.output_limit
        if max_tokens == TO_THE_END and context.max_context == UNLIMITED:
            max_tokens = MAX_ANSWER
        num_samples = (request.best_of or request.n) if max_tokens else request.n
        for index in range(num_samples):
            if outputs is not None and (input_index, index) in outputs:
                tokens = tuple(outputs[input_index, index])
                output = Piece(len(tokens), tokens=tokens)
            elif has_exact_length(request):
                symbol = GREEDY if is_plain(request) else ("output", input_index, index)
                output = Piece(request.output_limit, symbol)
            else:
                raise BatchdecodeError(
                    f"request {request_id!r} may end before max_tokens: set ignore_eos and no "
                    "stops, or decode it once for the length of its output"
                )
            jobs.append(
                SimulatedSequence(
                    id=request_id,
                    index=index,
                    input_index=input_index,
                    arrival_time=request.arrival_time,
                    num_prompt_tokens=num_prompt,
                    num_tokens=num_prompt,
                    max_tokens=max_tokens,
                    has_default_limit=request.max_tokens in {None, TO_THE_END},
                    priority=request.priority,
                    deadline=request.deadline,
                    cache_salt=request.cache_salt,
                    prompt=prompt,
                    output=output,
                    segment_ends=segment_ends,
                    session=request.session,
                    think_time=request.think_time,
                    num_lasting=num_lasting,
                    has_siblings=num_samples > 1,
                    draft_tokens=request.draft_tokens if request.speculate else 0,
                )
            )
    return Workload(jobs, context)


def has_exact_length(request: Request) -> bool:
    return request.max_tokens == 0 or (
        request.ignore_eos
        and request.max_tokens != TO_THE_END
        and not (request.stop or request.stop_sequence)
        and request.stop_token in (None, [])
        and not (request.states or request.heal or request.json_schema is not None)
        and not (request.regex or request.choice or request.lark or request.gbnf)
    )


def _read(
    prompt: PromptInput, model: Model, prefix: Tokens
) -> tuple[tuple[Piece, ...], tuple[SegmentEnd, ...]]:
    if isinstance(prompt, str):
        return _listed([*prefix, *model.tokenizer.encode(prompt)]), ()
    if not has_segments(prompt):
        return _listed(prompt), ()  # type: ignore[arg-type]  # of ids, then
    pieces: list[Piece] = []
    ends: list[SegmentEnd] = []
    end = 0
    for segment in prompt:
        if segment.text is not None:
            before = () if pieces else prefix
            found = _listed([*before, *model.tokenizer.encode(segment.text)])
        elif segment.tokens is not None:
            found = _listed(segment.tokens)
        else:
            found = (Piece(segment.length or 0, ("seed", segment.seed)),)
        num_tokens = sum(piece.length for piece in found)
        if num_tokens:
            pieces += found
            end += num_tokens
            ends.append((end, eviction_priority_of(segment)))
    return tuple(pieces), tuple(ends)


def _listed(tokens: Iterable[int]) -> tuple[Piece, ...]:
    kept = tuple(tokens)
    return (Piece(len(kept), tokens=kept),) if kept else ()


# -- synthetic workloads -------------------------------------------------------------------------

PREFIX = "synthetic:"
FORM = (
    "synthetic:rate=R,duration=SECONDS,prompt=D,output=D, optionally burstiness=B (1 for Poisson, "
    "or constant), priority=N:SHARE:N:SHARE (0), seed=N (0); separate the numbers of a "
    "distribution with :"
)
MAX_RATE, MAX_DURATION, MAX_REQUESTS = 1e6, 1e9, 10**9
_NUM_SAMPLED = 4096  # lengths, to estimate their mean
_MAX_DIGITS = 18


class StreamedWorkload(Struct, frozen=True, kw_only=True):
    """Requests that arrive for `span` seconds at `mean_rate` per second; none shares a prefix.

    It has the numbers of a Workload; those of tokens and samples are estimates.
    prompt, output: distributions of lengths, as text.  burstiness: see gamma; None: equal gaps.
    """

    mean_rate: float
    span: float
    prompt: str
    output: str
    burstiness: float | None = 1.0
    shares: PriorityShares = {}
    seed: int = 0
    shares_nothing: ClassVar = True

    @property
    def num_samples(self) -> int:
        return max(round(self.mean_rate * self.span), 1)

    @property
    def priorities(self) -> set[int]:
        return set(self.shares) or {0}

    @property
    def num_output_tokens(self) -> int:
        return round(self.num_samples * _mean(self.output, "output"))

    @property
    def num_tokens(self) -> int:
        return self.num_output_tokens + round(self.num_samples * _mean(self.prompt, "prompt"))

    def num_blocks(self, block_size: int) -> int:
        return self.num_samples + ceil(self.num_tokens / block_size)

    def at_rate(self, rate: float) -> Self:
        return replace(self, mean_rate=self.mean_rate * rate, span=self.span / rate)

    @property
    def exact_num_samples(self) -> int:
        return _num_times(self.mean_rate, self.span, self.burstiness, self.seed)

    def arrivals(self) -> Iterator[SimulatedSequence]:
        prompts, outputs, chances = (
            make_generator(self.seed, stream)
            for stream in (synthetic.PROMPTS, synthetic.OUTPUTS, synthetic.PRIORITIES)
        )
        prompt_lengths = draw_lengths(_distribution(self.prompt, "prompt"), prompts)
        output_lengths = draw_lengths(_distribution(self.output, "output"), outputs)
        priorities = synthetic.draw_priorities(self.shares, chances)
        times = _times(self.mean_rate, self.span, self.burstiness, self.seed)
        rows = zip(times, prompt_lengths, output_lengths, priorities, strict=False)
        for number, (arrival, num_prompt, num_output, priority) in enumerate(rows):
            yield SimulatedSequence(
                id=f"{DEFAULT_NAME}{number}",
                input_index=number,
                arrival_time=arrival,
                num_prompt_tokens=num_prompt,
                num_tokens=num_prompt,
                max_tokens=num_output,
                priority=priority,
                output=Piece(num_output, GREEDY),
            )

    @property
    def most_tokens(self) -> tuple[int, int]:
        """The tokens of the longest possible prompt and output."""

        def most(text: str) -> int:
            constant = text.removeprefix("constant:")
            is_number = constant.isascii() and constant.isdecimal()
            return min(max(int(constant), 1), MAX_LENGTH) if is_number else MAX_LENGTH

        return most(self.prompt), most(self.output)


AnyWorkload = Workload | StreamedWorkload


def _distribution(text: str, name: str) -> Distribution:
    return synthetic.parse_distribution(text, f"{name} of {PREFIX}", synthetic.LENGTHS)


def _times(rate: float, duration: float, burstiness: float | None, seed: int) -> Iterator[float]:
    arrivals = synthetic.poisson(rate)
    if burstiness is None:
        arrivals = synthetic.constant(rate)
    elif burstiness != 1:
        arrivals = synthetic.gamma(rate, burstiness)
    return takewhile(duration.__gt__, arrivals(make_generator(seed, synthetic.ARRIVALS)))


@cache
def _num_times(rate: float, duration: float, burstiness: float | None, seed: int) -> int:
    return sum(1 for _ in _times(rate, duration, burstiness, seed))


@cache
def _mean(text: str, name: str) -> float:
    lengths = draw_lengths(_distribution(text, name), make_generator(0, 0))
    return sum(islice(lengths, _NUM_SAMPLED)) / _NUM_SAMPLED


def parse_streamed(text: str) -> StreamedWorkload:
    """Return the workload of `text`, in FORM, or raise a WorkloadError."""
    given: dict[str, str] = {}
    for part in text.removeprefix(PREFIX).split(","):
        name, equals, value = part.partition("=")
        problem = None
        if not equals:
            problem = "expected NAME=VALUE"
        elif name not in _READERS:
            problem = f"unknown name {name}{hint_at(name, _READERS)}"
        elif name in given:
            problem = f"{name} is repeated"
        if problem is not None:
            raise WorkloadError(f"{text}: {part!r}: {problem}; expected {FORM}")
        given[name] = value
    missing = [name for name in ("rate", "duration", "prompt", "output") if name not in given]
    if missing:
        raise WorkloadError(f"{text}: {missing[0]} is missing; expected {FORM}")
    values = {name: _READERS[name](value, f"{text}: {name}") for name, value in given.items()}
    times = {"mean_rate": values.pop("rate"), "span": values.pop("duration")}
    workload = StreamedWorkload(**times, shares=values.pop("priority", {}), **values)
    if workload.num_samples > MAX_REQUESTS:
        raise WorkloadError(f"{text}: more than {MAX_REQUESTS:,} requests")
    for length, name in ((workload.prompt, "prompt"), (workload.output, "output")):
        _distribution(length, name)
    return workload


def _number(most: float, text: str, place: str) -> float:
    try:
        number = read_number(text, float)
    except ValueError:
        number = -1.0
    if not 0 < number <= most:  # true of nan as well
        raise WorkloadError(f"{place} {text!r}: expected a number above 0, up to {most:,.0f}")
    return number


def _seed(text: str, place: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise WorkloadError(f"{place} {text!r}: expected a whole number")
    return int(text)


_READERS: dict[str, Callable[[str, str], Any]] = {
    "rate": partial(_number, MAX_RATE),
    "duration": partial(_number, MAX_DURATION),
    "prompt": lambda text, _: text,
    "output": lambda text, _: text,
    "burstiness": lambda text, place: (
        None if text == "constant" else _number(MAX_RATE, text, place)
    ),
    "priority": synthetic.parse_priorities,
    "seed": _seed,
}


# -- the turns of sessions -----------------------------------------------------------------------


class Turns:
    """The sequences of a workload; at most one of a session has arrived and not ended.

    sequences: one per job; turns that have not begun have no history.  all_wait: every job needs a
    slot, and none waits for another.  longest: the sequence with the most tokens, or None.
    """

    def __init__(self, workload: AnyWorkload) -> None:
        self._streamed = workload if isinstance(workload, StreamedWorkload) else None
        self._jobs: list[SimulatedSequence] = []
        self._context = ANY_LENGTH
        if isinstance(workload, Workload):
            self._jobs, self._context = workload.jobs, workload.context
        self.sequences = [job.copy_behind((), self._context) for job in self._jobs]
        self._waiting: dict[str | None, deque[int]] = {}  # places of later turns, by session
        self._past: defaultdict[str, list[SimulatedSequence]] = defaultdict(list)  # ended turns
        self._kept: defaultdict[str, list[Piece]] = defaultdict(list)  # of dropped turns
        self.has_siblings = any(job.has_siblings for job in self._jobs)
        self.has_sessions = any(job.session is not None for job in self._jobs)
        self.all_wait = not self.has_sessions and all(
            turn.fits and turn.max_tokens for turn in self.sequences
        )
        self.longest: SimulatedSequence | None = max(
            self.sequences,
            key=lambda sequence: sequence.num_prompt_tokens + sequence.max_tokens,
            default=None,
        )
        if self._streamed is not None:
            num_prompt, num_output = self._streamed.most_tokens
            self.longest = SimulatedSequence(
                id="longest",
                num_prompt_tokens=num_prompt,
                num_tokens=num_prompt,
                max_tokens=num_output,
                output=Piece(num_output, GREEDY),
            )

    @property
    def longest_request(self) -> int:
        longest = self.longest
        return 0 if longest is None else longest.num_prompt_tokens + longest.max_tokens

    def arrivals(self) -> Iterable[SimulatedSequence]:
        if self._streamed is not None:
            return self._streamed.arrivals()
        return sorted(self.begin(), key=ARRIVAL_ORDER)

    def begin(self) -> list[SimulatedSequence]:
        """Return the sequences that wait for no other."""
        first = []
        for place, sequence in enumerate(self.sequences):
            if sequence.session in self._waiting:
                self._waiting[sequence.session].append(place)
                continue
            if sequence.session is not None:
                self._waiting[sequence.session] = deque()
            first.append(sequence)
        return first

    def next_turn(self, ended: SimulatedSequence, now: float) -> SimulatedSequence | None:
        """Return the turn after an ended or failed one, or None; it has failed if that has."""
        name = ended.session
        if name is None or not self._waiting[name]:
            return None
        place, past, kept = self._waiting[name].popleft(), self._past[name], self._kept[name]
        job = self._jobs[place]
        past.append(ended)
        if self._context.drops_oldest:
            num_more = job.num_prompt_tokens + self._context.num_reserved(job.max_tokens)
            _drop_oldest(past, kept, num_more, self._context)
        own = (piece for turn in past for piece in (*turn.own_prompt, turn.own_output))
        history = tuple(piece for piece in (*kept, *own) if piece.length)
        turn = job.copy_behind(history, self._context)
        turn.arrival_time = max(job.arrival_time, now + job.think_time)
        turn.has_failed = ended.has_failed
        self.sequences[place] = turn
        return turn


def _drop_oldest(
    past: list[SimulatedSequence], kept: list[Piece], num_more: int, context: Context
) -> None:
    """Drop the oldest turns until `num_more` tokens fit behind the rest."""
    lengths = [
        (sum(piece.length for piece in (*turn.own_prompt, turn.own_output)), turn.num_lasting)
        for turn in past
    ]
    num_kept = sum(piece.length for piece in kept)
    for _ in range(context.num_dropped(lengths, num_kept + num_more)):
        turn = past.pop(0)
        num_left = turn.num_lasting
        for length, symbol, tokens in turn.own_prompt:
            stays = min(length, num_left)
            if stays:
                kept.append(Piece(stays, symbol, None if tokens is None else tokens[:stays]))
            num_left -= stays
