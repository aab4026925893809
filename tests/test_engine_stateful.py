"""Everything a program can do to a running engine, in any order, checked after each move."""

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import pytest
from control_requests import control_requests
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger import LedgerModel
from msgspec import structs
from reference import ENGLISH, decode_alone, english_requests

from batcher import Engine, Request, RequestError, Result
from batcher.engine import StepOutcome
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    DropEvent,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    RequestEvent,
)
from batcher.sequence import is_plain
from batcher.validation import num_slots_needed


class Row(NamedTuple):
    """A sequence: a sample, a beam or a negative prompt."""

    id: str
    index: int
    role: str


Unit = tuple[Row, ...]  # what is admitted and ends together, the leader first


def units_of(request: Request, request_id: str) -> list[Unit]:
    """Return what waits on behalf of a request, by the documentation."""
    if request.max_tokens == 0:
        return [(Row(request_id, index, "sample"),) for index in range(request.n)]
    if request.num_beams > 1:
        return [tuple(Row(request_id, index, "beam") for index in range(request.num_beams))]
    roles = ["sample"] if request.cfg_scale == 1 else ["sample", "negative"]
    return [
        tuple(Row(request_id, index, role) for role in roles)
        for index in range(request.best_of or request.n)
    ]


def decode_control_alone(request: Request, request_id: str) -> dict[int, Result]:
    """Return every sample or beam of a request that has a batch to itself, by index."""
    everything = structs.replace(
        request, id=request_id, arrival_time=0.0, n=request.best_of or request.n
    )
    engine = Engine(LedgerModel(), num_slots_needed(request))
    engine.add(everything)
    results: list[Result] = []
    while engine.has_work:
        results += engine.step().results
    return {result.index: timeless(result) for result in results}


def timeless(result: Result) -> Result:
    """Return a result without what tells of the batch; an error tells its step."""
    return structs.replace(result, slot=None, steps=None, error=None)  # type: ignore[arg-type]  # not needed here


def left_behind(engine: Engine) -> list[object]:
    """Return what the engine still keeps of rows."""
    decoder = engine._runner.decoder
    kept = [decoder._rows, decoder._beams, decoder._leaders]
    kept += [decoder._history._first_rows, decoder._history._aside]
    kept += [engine._runner._batch.slots.tolist(), decoder.logit_slots.tolist()]
    kept += [engine._slots.due, engine._roster._candidates]
    return [part for part in kept if part]


class EngineMachine(RuleBasedStateMachine):
    """Adds, aborts and steps; keeps a model of what must be true from events and results alone."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.results: dict[str, list[Result]] = defaultdict(list)
        self.drops: Counter[str] = Counter()
        self.pending: dict[Row, Unit] = {}  # by leader, as the next two
        self.waiting: dict[Row, Unit] = {}  # in order
        self.running: dict[Row, Unit] = {}
        self.holders: dict[int, Row] = {}  # slot -> sequence
        self.admitted: dict[Row, AdmitEvent] = {}
        self.jumped: Counter[Row] = Counter()
        self.told: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.text: dict[tuple[str, int], str] = defaultdict(str)
        self.to_admit: list[Row] = []  # what is left of a unit that is being admitted,
        self.to_end: list[Row] = []  # and of one that is ending
        self.times = [0.0]

    @initialize(batch_size=st.sampled_from([1, 2, 3, 7]), is_streaming=st.booleans())
    def start(self, *, batch_size: int, is_streaming: bool) -> None:
        self.model = LedgerModel()
        self.is_streaming = is_streaming
        self.engine = Engine(self.model, batch_size, is_streaming=is_streaming)

    @rule(
        request=st.one_of(english_requests(), control_requests()),
        delay=st.sampled_from([-5.0, 0.0, 0.5, 3.0]),
    )
    def add(self, request: Request, delay: float) -> None:
        arrival = max(0.0, self.engine.now + delay)
        request = structs.replace(request, arrival_time=arrival)
        if num_slots_needed(request) > self.engine.batch_size:
            with pytest.raises(RequestError, match="slots"):
                self.engine.add(request)
            return
        request_id = self.engine.add(request)
        assert request_id == str(len(self.requests) + 1)
        self.requests[request_id] = request
        self.pending |= {unit[0]: unit for unit in units_of(request, request_id)}

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from(self.living()))
        self.engine.abort(request_id)
        self.aborted.add(request_id)

    def living(self) -> list[str]:
        """Return the ids of the requests of which something has not ended."""
        leaders = [*self.pending, *self.waiting, *self.running]
        return sorted({leader.id for leader in leaders} - self.aborted, key=int)

    @rule()
    def step(self) -> None:
        had_work = self.engine.has_work
        step, held = self.engine.num_steps, self.engine.num_running
        outcome = self.engine.step()
        is_planned = False
        for event in outcome.events:
            if isinstance(event, FinishEvent) and event.slot is not None and event.step == step:
                if not is_planned:
                    self.check_no_slot_is_wasted()
                is_planned = True
            assert not (is_planned and isinstance(event, ArriveEvent | AdmitEvent))
            self.follow(event)
        if not is_planned:
            self.check_no_slot_is_wasted()
        self.check_arrivals(outcome)
        self.take(outcome)
        progress = outcome.events or self.engine.num_steps > step
        assert progress or not had_work, "a step with work left did nothing (invariant 6)"
        assert self.engine.num_steps in (step, step + 1)
        assert held == 0 or self.engine.num_steps == step + 1

    def follow(self, event: RequestEvent) -> None:
        assert isinstance(
            event, ArriveEvent | AdmitEvent | FinishEvent | JumpEvent | ForkEvent | DropEvent
        )
        assert not self.to_admit or isinstance(event, AdmitEvent), "a unit was torn apart"
        if isinstance(event, ArriveEvent):
            leader = next(row for row in self.pending if row[:2] == (event.id, event.index))
            self.waiting[leader] = self.pending.pop(leader)
        elif isinstance(event, AdmitEvent):
            self.follow_admission(event)
        elif isinstance(event, FinishEvent):
            self.follow_end(event)
        elif isinstance(event, DropEvent):
            self.drops[event.id] += 1
        else:
            row = self.holders[event.slot]
            assert row[:2] == (event.id, event.index)
            if isinstance(event, JumpEvent):
                self.jumped[row] += event.tokens
            else:
                beams = self.running[row._replace(index=0)]
                assert beams[event.parent] in self.holders.values()
        if isinstance(event, AdmitEvent | JumpEvent | ForkEvent) or (
            isinstance(event, FinishEvent) and event.slot is not None
        ):
            self.times.append(event.time)  # the others happen at an arrival, which may be long past

    def follow_admission(self, event: AdmitEvent) -> None:
        row = Row(event.id, event.index, event.role)
        if not self.to_admit:
            assert row == next(iter(self.waiting)), "not the first of the queue (invariant 5)"
            self.running[row] = self.waiting.pop(row)
            self.to_admit = list(self.running[row])
        assert row == self.to_admit.pop(0), "companions are admitted together, in order"
        assert event.slot not in self.holders, "a slot with two sequences (invariant 2)"
        assert row not in self.holders.values(), "a sequence with two slots (invariant 2)"
        free = set(range(self.engine.batch_size)) - set(self.holders)
        assert event.slot == min(free), "not the lowest free slot"
        self.holders[event.slot] = row
        self.admitted[row] = event

    def follow_end(self, event: FinishEvent) -> None:
        row = Row(event.id, event.index, event.role)
        if event.slot is None:
            is_leader = row in self.pending or row in self.waiting
            assert is_leader or row.role == "beam"
            is_empty = row in self.waiting and self.requests[row.id].max_tokens == 0
            assert event.reason == "aborted" or is_empty, "not a legal move (invariant 3)"
            self.pending.pop(row, None)
            self.waiting.pop(row, None)
            return
        assert self.holders.pop(event.slot) == row, "not who held it (invariant 3)"
        unit = self.running.get(row)
        if unit is not None:
            del self.running[row]
            self.to_end = list(unit)
        assert row == self.to_end.pop(0), "companions end together, in order"
        if row.role == "negative" or (row.role == "beam" and row.index >= self.requests[row.id].n):
            assert (event.reason, event.tokens) == ("unused", 0)
        elif row.role == "sample" and event.reason != "error":
            num_steps = event.step - self.admitted[row].step + 1
            assert event.tokens == num_steps + self.jumped[row]

    def take(self, outcome: StepOutcome) -> None:
        for told in outcome.tokens:
            assert self.is_streaming
            self.told[told.id, told.index] += told.tokens
            self.text[told.id, told.index] += told.text
        for result in outcome.results:
            others = {other.index for other in self.results[result.id]}
            assert result.index not in others, "two results for one output (invariant 1)"
            self.results[result.id].append(result)
            assert len(others) < self.requests[result.id].n, "too many results (invariant 1)"
            self.check_stream(self.requests[result.id], result)

    def check_arrivals(self, outcome: StepOutcome) -> None:
        arrivals = [event for event in outcome.events if isinstance(event, ArriveEvent)]
        order = [(event.time, int(event.id), event.index) for event in arrivals]
        assert order == sorted(order)

    def check_no_slot_is_wasted(self) -> None:
        num_free = self.engine.batch_size - len(self.holders)
        for unit in list(self.waiting.values())[:1]:
            assert len(unit) > num_free, "a slot is empty for no reason (invariant 5)"

    def check_stream(self, request: Request, result: Result) -> None:
        is_told = self.is_streaming and request.best_of is None and request.num_beams == 1
        told = self.told[result.id, result.index]
        assert told == (result.tokens if is_told else [])
        if is_told and result.slot is not None:
            text = "".join(segment.text for segment in result.segments or [])
            if result.segments is None:
                prompt = str(request.prompt) if request.echo else ""
                text = result.text.removeprefix(prompt)
            assert self.text[result.id, result.index] == text

    @invariant()
    def time_never_goes_back(self) -> None:
        if hasattr(self, "engine"):
            assert self.times == sorted(self.times), "invariant 4"
            assert self.engine.now >= self.times[-1]

    @invariant()
    def slots_and_places_agree_with_the_events(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine, ended = self.engine, self.aborted
        assert self.to_admit + self.to_end == [], "a unit was torn apart"
        held = [slot for slot, row in sorted(self.holders.items()) if row.id not in ended]
        holders = engine._slots.sequences
        assert [slot for slot, holder in enumerate(holders) if holder is not None] == held
        assert engine.num_running == len(held) <= engine.batch_size, "invariant 2"
        samples = {slot for slot in held if self.holders[slot].role != "beam"}
        assert samples <= set(self.model.rows) <= set(held)
        unfinished = [leader for leader in (*self.pending, *self.waiting) if leader.id not in ended]
        assert engine.num_waiting + engine.num_pending == len(unfinished)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(10_000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        assert self.pending | self.waiting | self.running == {}
        assert self.holders == {}
        assert self.model.rows == {}
        assert left_behind(self.engine) == []
        for request_id, request in self.requests.items():
            results = self.results[request_id]
            assert len(results) == request.n, "invariant 1"
            num_samples = (request.best_of or request.n) if request.max_tokens else request.n
            assert self.drops[request_id] == num_samples - request.n
            if is_plain(request):
                self.check_plain(request, results[0])
            else:
                self.check_control(request, results)

    def check_plain(self, request: Request, result: Result) -> None:
        alone = decode_alone(request, ENGLISH)
        if result.finish_reason == "aborted":
            assert result.tokens == alone.tokens[: len(result.tokens)], "invariant 7"
        else:
            got = (result.tokens, result.text, result.finish_reason, result.stop_reason)
            assert got == alone, "invariant 7"

    def check_control(self, request: Request, results: list[Result]) -> None:
        alone = decode_control_alone(request, results[0].id)
        for result in results:
            if result.finish_reason != "aborted":
                assert timeless(result) == alone[result.index], "invariant 7"
            elif request.num_beams == 1:
                tokens = alone[result.index].tokens
                assert result.tokens == tokens[: len(result.tokens)], "invariant 7"
        if (request.best_of or 1) > request.n and results[0].id not in self.aborted:
            best = sorted(alone.values(), key=lambda r: (-(r.cumulative_logprob or 0.0), r.index))
            assert [r.index for r in results] == [r.index for r in best[: request.n]]


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
