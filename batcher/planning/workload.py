"""Workloads: requests of which only times, lengths and shared contents matter."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.models.base import ANY_LENGTH, UNLIMITED, Context, Model, context_of
from batcher.prompts import (
    SegmentEnd,
    eviction_priority_of,
    has_segments,
    num_lasting_tokens,
    prefix_of,
)
from batcher.request import MAX_ANSWER, TO_THE_END, PromptInput, Request, is_plain
from batcher.tokens import NO_TOKENS, Tokens


class Piece(NamedTuple):
    """`length` tokens of a prompt or an output: those listed, or those that `symbol` stands for.

    Equal symbols are equal tokens from the first on or, where the symbol is GREEDY, equal tokens
    after equal ones.
    """

    length: int
    symbol: tuple[int | str, ...] = ()
    tokens: tuple[int, ...] | None = None


GREEDY: tuple[int | str, ...] = ("greedy",)


class Job(Struct, frozen=True, kw_only=True, gc=False):
    """One sample of a request.

    input_index: that of the request.  max_tokens: the limit that the scheduler knows;
    prompt: None if it shares nothing with another.
    num_lasting: first tokens that stay in a session when this turn is dropped.  has_siblings: the
    request has other samples.  draft_tokens: drafts per step, None for those of all.
    """

    id: str
    index: int = 0
    input_index: int
    arrival_time: float
    num_prompt_tokens: int
    max_tokens: int
    has_default_limit: bool = False
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    prompt: tuple[Piece, ...] | None = None
    output: Piece
    segment_ends: tuple[SegmentEnd, ...] = ()
    session: str | None = None
    think_time: float = 0.0
    num_lasting: int = 0
    has_siblings: bool = False
    draft_tokens: int | None = None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        if self.prompt is not None:
            return self.prompt
        return (Piece(self.num_prompt_tokens, ("prompt", self.input_index)),)


class Workload(Struct, frozen=True, gc=False):
    """Jobs in the order of the input.  context: what their rows may be."""

    jobs: list[Job]
    context: Context = ANY_LENGTH

    @property
    def num_samples(self) -> int:
        return len(self.jobs)

    @property
    def priorities(self) -> set[int]:
        return {job.priority for job in self.jobs}

    @property
    def num_output_tokens(self) -> int:
        return sum(job.output.length for job in self.jobs)

    @property
    def num_tokens(self) -> int:
        """The tokens computed of all there can be at once."""
        return sum(job.num_prompt_tokens + job.output.length for job in self.jobs)

    def num_blocks(self, block_size: int) -> int:
        """Return how many blocks hold all there can be at once, each turn with all before it."""
        total = 0
        histories: dict[str, int] = {}
        for job in self.jobs:
            num_held = job.num_prompt_tokens + job.max_tokens
            if job.session is not None:
                num_held += histories.get(job.session, 0)
            if job.has_default_limit:  # which the context limits, if any
                num_held = min(num_held, self.context.max_context)
            if job.session is not None:
                histories[job.session] = num_held
            total += -(-num_held // block_size)
        return total

    @property
    def shares_nothing(self) -> bool:
        """Whether no two jobs begin with the same tokens, as far as is known."""
        beginnings = set()
        for job in self.jobs:
            first = next(iter(job.pieces), None)
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
        """Arrivals per second; None if all come at once."""
        num_arrivals = sum(not job.index for job in self.jobs)
        return (num_arrivals - 1) / self.span if self.span else None

    def at_rate(self, rate: float) -> Self:
        """Return the workload with arrivals `rate` times as fast; deadlines move along."""
        if rate == 1:
            return self
        jobs = []
        for job in self.jobs:
            arrival = job.arrival_time / rate
            deadline = None if job.deadline is None else job.deadline - job.arrival_time + arrival
            jobs.append(replace(job, arrival_time=arrival, deadline=deadline))
        return replace(self, jobs=jobs)


def workload_of(
    requests: Iterable[Request],
    model: Model,
    outputs: Mapping[tuple[int, int], Sequence[int]] | None = None,
) -> Workload:
    """Return the workload of valid `requests`, as `model` reads their prompts.

    outputs: (input index of the request, index of the sample) -> its tokens, which never depend on
    the schedule.  Without it every request must end exactly at max_tokens.

    Raises:
        BatchdecodeError: a request has beams or cfg_scale, or an output of unknown length.
    """
    jobs: list[Job] = []
    sessions: set[str] = set()  # that have a turn by now
    context = context_of(model)
    for input_index, request in enumerate(requests):
        request_id = request.id if request.id is not None else str(input_index + 1)
        for field, plain in (("num_beams", 1), ("cfg_scale", 1.0)):
            value = getattr(request, field)
            if value != plain and request.output_limit:
                raise BatchdecodeError(
                    f"request {request_id!r}: {field} {value} cannot be simulated by lengths "
                    f"alone; only {field} {plain} can"
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
            output = _output(request, request_id, (input_index, index), outputs)
            jobs.append(
                Job(
                    id=request_id,
                    index=index,
                    input_index=input_index,
                    arrival_time=request.arrival_time,
                    num_prompt_tokens=num_prompt,
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


def _output(
    request: Request,
    request_id: str,
    key: tuple[int, int],
    outputs: Mapping[tuple[int, int], Sequence[int]] | None,
) -> Piece:
    if outputs is not None and key in outputs:
        tokens = tuple(outputs[key])
        return Piece(len(tokens), tokens=tokens)
    if not has_exact_length(request):
        raise BatchdecodeError(
            f"request {request_id!r} may end before max_tokens: set ignore_eos and no stops, "
            "or decode it once for the length of its output"
        )
    symbol = GREEDY if is_plain(request) else ("output", *key)
    return Piece(request.output_limit, symbol)


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
