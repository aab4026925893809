"""The simulation against the engine with a model, and from event to event against step by step."""

from random import Random

from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from jobs import engine_of, simulate
from simulated_workloads import (
    STEP_TIMES,
    BoundedModel,
    random_requests,
    random_settings,
    run_engine,
)

from batcher import decode
from batcher.planning.simulator import Replica
from batcher.planning.workload import Turns, workload_of


class LoggedSimulation(Replica):
    """A simulation that tells of its steps, each taken by itself, what an engine's events tell."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.log = []
        self.ends = []
        self.blocks = []

    def _note(self, plan):
        super()._note(plan)
        for preemption in plan.preempted:
            self._log("preempt", preemption.first, preemption.num_computed_tokens[preemption.first])
        for sequence in plan.admitted:
            self._log("admit", sequence, sequence.num_cached_tokens)

    def _before_news(self, until):
        del until
        return self.now

    def _take_steps(self):
        num_steps, block_steps = self._step, self.result.block_steps
        self.start = self.now
        super()._take_steps()
        if self._step > num_steps:
            self.blocks.append(self.result.block_steps - block_steps)

    def _advance(self, num_steps, ticks, num_tokens):
        super()._advance(num_steps, ticks, num_tokens)
        self.ends.append(self.now)

    def _note_over(self, sequences):
        for one in sequences:
            if one.admitted_ticks >= 0:
                row = ("finish", self._step - 1, one.id, one.index, self.start)
                self.log.append((*row, one.num_output_tokens))
        super()._note_over(sequences)

    def _log(self, what, sequence, num_tokens):
        self.log.append((what, self._step, sequence.id, sequence.index, self.now, num_tokens))


def workload_from(drawn, model):
    """The workload of requests that have been decoded once."""
    places = {request.id: place for place, request in enumerate(drawn)}
    results = decode(drawn, model=model, batch_size=64)
    outputs = {(places[result.id], result.index): result.tokens for result in results}
    return workload_of(drawn, model, outputs)


CONTEXTS = st.sampled_from([None, None, 30, 60, 100])


@examples(100)
@given(st.integers(0, 2**32), CONTEXTS, st.sampled_from(["error", "drop-oldest"]))
@example(seed=2187, max_context=30, session_overflow="error")  # one has an empty prompt
def test_a_simulation_is_the_engine_step_for_step_and_tick_for_tick(
    seed, max_context, session_overflow
):
    random = Random(seed)
    drawn = random_requests(random)
    num_slots, chosen = random_settings(random)
    step_time = random.choice(STEP_TIMES)
    model = BoundedModel(max_context, session_overflow)
    engine = run_engine(drawn, num_slots, chosen, step_time, model)
    chosen_engine = engine_of(num_slots, chosen, step_time)
    simulation = LoggedSimulation(Turns(workload_from(drawn, model)), chosen_engine)
    result = simulation.run()
    assert simulation.log == engine.log
    assert simulation.ends == engine.ends
    assert simulation.blocks == engine.blocks
    assert result.totals.recomputed_tokens == recomputed(engine.log)
    for sequence in result.sequences:
        ended = engine.results[sequence.id, sequence.index]
        assert sequence.has_failed == (ended.finish_reason == "error")


def recomputed(log):
    """How many tokens were lost by preemptions and not found at the next admissions."""
    lost = {}
    total = 0
    for what, _, request_id, index, _, num_tokens in log:
        if what == "preempt":
            lost[request_id, index] = num_tokens
        elif what == "admit":
            total += max(0, lost.pop((request_id, index), 0) - num_tokens)
    return total


def outcome(result):
    """All that a simulation tells."""
    times = [
        (
            sequence.id,
            sequence.index,
            sequence.arrival_time,
            sequence.admitted_ticks,
            sequence.first_token_ticks,
            sequence.end_ticks,
            sequence.has_failed,
            sequence.num_cached_at_first,
            sequence.num_preemptions,
        )
        for sequence in result.sequences
    ]
    return times, result.totals


class PlannedSimulation(Replica):
    """A simulation that lets the scheduler plan every step."""

    def _take_steps(self):
        self._take_step()


def simulate_steps(workload, num_slots, chosen, step_time):
    return PlannedSimulation(Turns(workload), engine_of(num_slots, chosen, step_time)).run()


@examples(200)
@given(st.integers(0, 2**32), CONTEXTS)
@example(505, None)  # one arrives that others give way to
@example(661, None)  # the reason told for who waits changes
@example(7158, None)  # a row that grows evicts what one that waits would have found
def test_from_event_to_event_is_exactly_step_by_step(seed, max_context):
    random = Random(seed)
    drawn = random_requests(random, may_stop=False)
    if random.random() < 0.5:  # all of them have to be admitted, and none waits for another one
        drawn = [one for one in drawn if one.max_tokens and one.session is None]
    num_slots, chosen = random_settings(random)
    step_time = random.choice(STEP_TIMES)
    workload = workload_of(drawn, BoundedModel(max_context))
    planned = outcome(simulate_steps(workload, num_slots, chosen, step_time))
    assert outcome(simulate(workload, num_slots, chosen, step_time)) == planned
