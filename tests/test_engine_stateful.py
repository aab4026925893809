"""Everything a program can do to a running engine, in any order, checked after each move."""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs
from reference import ENGLISH, decode_alone, english_requests, place_of

from batcher import Engine, Request, Result, SimulatedModel
from batcher.events import AdmitEvent, ArriveEvent, FinishEvent, RequestEvent


class EngineMachine(RuleBasedStateMachine):
    """Adds, aborts and steps; keeps a model of what must be true from events and results alone."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, Request] = {}
        self.added: dict[int, int] = {}  # index -> the step before which it was added
        self.results: dict[int, Result] = {}
        self.events: list[RequestEvent] = []
        self.aborted: set[int] = set()
        self.holders: dict[int, int] = {}  # slot -> index
        self.times = [0.0]

    @initialize(batch_size=st.sampled_from([1, 2, 3, 7]))
    def start(self, batch_size: int) -> None:
        self.engine = Engine(SimulatedModel(), batch_size)

    @rule(request=english_requests(), delay=st.sampled_from([-5.0, 0.0, 0.5, 3.0]))
    def add(self, request: Request, delay: float) -> None:
        index = len(self.requests)
        arrival = max(0.0, self.engine.now + delay)
        self.requests[index] = structs.replace(request, arrival_time=arrival)
        self.engine.add(self.requests[index])
        self.added[index] = self.engine.num_steps

    @precondition(lambda self: len(self.results) + len(self.aborted) < len(self.requests))
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        running = sorted(set(self.requests) - set(self.results) - self.aborted)
        index = data.draw(st.sampled_from(running))
        self.engine.abort(str(index + 1))
        self.aborted.add(index)

    @rule()
    def step(self) -> None:
        had_work = self.engine.has_work
        steps, held = self.engine.num_steps, self.engine.num_running
        outcome = self.engine.step()
        for event in outcome.events:
            self.follow(event)
        for result in outcome.results:
            assert place_of(result) not in self.results, "two results for one request"
            self.results[place_of(result)] = result
        progress = outcome.events or self.engine.num_steps > steps
        assert progress or not had_work, "a step with work left did nothing (invariant 6)"
        assert self.engine.num_steps in (steps, steps + 1)
        assert held == 0 or self.engine.num_steps == steps + 1

    def follow(self, event: RequestEvent) -> None:
        self.events.append(event)
        if isinstance(event, AdmitEvent):
            assert event.slot not in self.holders, "a slot with two sequences (invariant 2)"
            assert place_of(event) not in self.holders.values(), (
                "a sequence with two slots (invariant 2)"
            )
            self.holders[event.slot] = place_of(event)
        elif isinstance(event, FinishEvent) and event.slot is not None:
            assert self.holders.pop(event.slot) == place_of(event)
        if not isinstance(event, ArriveEvent) and event.slot is not None:
            self.times.append(event.time)  # the others happen at an arrival, which may be long past

    @invariant()
    def time_never_goes_back(self) -> None:
        if hasattr(self, "engine"):
            assert self.times == sorted(self.times), "invariant 4"
            assert self.engine.now >= self.times[-1]

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        assert engine.num_running <= engine.batch_size
        unfinished = engine.num_running + engine.num_waiting + engine.num_pending
        assert unfinished == len(self.requests) - len(self.results) - len(
            self.aborted - set(self.results)
        )

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(10_000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        assert sorted(self.results) == sorted(self.requests), "invariant 1"
        for index, result in self.results.items():
            self.check(self.requests[index], result)
        self.check_work_conserving()

    def check(self, request: Request, result: Result) -> None:
        alone = decode_alone(request, ENGLISH)
        if result.finish_reason == "aborted":
            assert result.tokens == alone.tokens[: len(result.tokens)], "invariant 7"
        else:
            got = (result.tokens, result.text, result.finish_reason, result.stop_reason)
            assert got == alone, "invariant 7"

    def check_work_conserving(self) -> None:
        """Invariant 5, from the results: whoever waited in a step found every slot taken in it."""
        spans = [
            range(result.steps.admitted, result.steps.finished + 1)
            for result in self.results.values()
            if result.slot is not None
        ]
        busy = Counter(step for span in spans for step in span)
        for index, result in self.results.items():
            if result.slot is not None:
                for step in range(
                    max(result.steps.arrived, self.added[index]), result.steps.admitted
                ):
                    assert busy[step] == self.engine.batch_size, "invariant 5"


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
