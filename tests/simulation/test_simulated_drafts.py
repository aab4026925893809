"""Drafts in simulations: against an engine whose drafts are as right, and against theory."""

from random import Random

import pytest
from examples import examples, mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from jobs import engine_of, simulate
from simulated_workloads import STEP_TIMES, random_settings, run_engine
from test_simulator import LoggedSimulation, outcome, recomputed, workload_from

from batcher import Request, SimulatedModel
from batcher.models.simulated import SimulatedSettings
from batcher.planning.simulator import AssumedDrafts
from batcher.planning.workload import Turns, workload_of
from batcher.settings import SchedulingSettings
from batcher.speculation.settings import (
    DEFAULT_DRAFT_TOKENS,
    Proposal,
    expected_speedup,
    expected_tokens,
)
from batcher.timing.step_time import ConstantStepTime

ANY = 17  # a token: nobody asks for those behind the end of an output


class AssumedDrafter:
    """A drafter whose drafts are right exactly where a simulation assumes they are.

    It knows what rows will be given, by the first token of their prompts, and where it is wrong.
    """

    def __init__(self, workload, drafts):
        self._drafts = drafts
        self._jobs = {}
        for job in workload.jobs:
            (piece,) = job.prompt
            assert piece.tokens is not None
            assert job.output.tokens is not None
            self._jobs[piece.tokens[0]] = job, len(piece.tokens), list(job.output.tokens)
        assert len(self._jobs) == len(workload.jobs)
        self._rows = {}

    def open(self, slot, tokens):
        first = tokens[0]
        self._rows[slot] = first, len(tokens) - self._jobs[first][1]

    def extend(self, given):
        for slot, tokens in given.items():
            first, num_given = self._rows[slot]
            self._rows[slot] = first, num_given + len(tokens)

    def propose(self, num_wanted):
        proposed = {}
        for slot, num in num_wanted.items():
            first, place = self._rows[slot]
            job, _, output = self._jobs[first]
            coming = (output[place:] + [ANY] * num)[:num]
            for number in range(num):
                if not self._drafts.num_accepted(job, place + number, 1):
                    coming[number] = 3 if coming[number] != 3 else 4
            proposed[slot] = Proposal(coming)
        return proposed

    def close(self, slot, *, has_ended):
        del has_ended, self._rows[slot]


def drafted_requests(random, *, may_stop=True):
    """Some requests, no two of which begin alike; some have a number of drafts of their own."""
    return [
        Request(
            id=f"r{number}",
            prompt=[100 + number, *random.choices([3, 4, 5], k=random.randint(0, 40))],
            max_tokens=random.choice([0, 1, 2, 3, 5, 17, 40, 90]),
            ignore_eos=True,
            stop_token=random.choices(range(3, 500), k=30 if may_stop else 0),
            arrival_time=random.choice([0.0, 0.0, 0.5, 3.0, 3.25, 10.0, 33.3]),
            priority=random.randint(0, 2),
            deadline=random.choice([None, None, 70.0, 200.0]),
            speculate=random.random() < 0.9,
            draft_tokens=random.choice([None, None, None, 1, 9]),
        )
        for number in range(random.randint(1, 10))
    ]


ACCEPTANCES = st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0])


def check(drawn, num_slots, chosen, step_time, acceptance):
    """Make sure that an engine whose drafts are as right does the same in the same time."""
    model = SimulatedModel(SimulatedSettings(eos_rate=0))  # an engine cuts drafts behind EOS
    workload = workload_from(drawn, model)
    drafts = AssumedDrafts(num_tokens=DEFAULT_DRAFT_TOKENS, acceptance=acceptance)
    drafter = AssumedDrafter(workload, drafts)
    engine = run_engine(drawn, num_slots, chosen, step_time, model, drafter)
    simulation = LoggedSimulation(Turns(workload), engine_of(num_slots, chosen, step_time, drafts))
    result = simulation.run()
    assert simulation.log == engine.log
    assert simulation.ends == engine.ends
    if chosen.is_paged:  # an engine that speculates always has blocks
        assert simulation.blocks == engine.blocks
    assert result.totals.recomputed_tokens == recomputed(engine.log)


@examples(100)
@given(st.integers(0, 2**32), ACCEPTANCES)
def test_it_is_the_engine_with_drafts_as_right_step_for_step_and_tick_for_tick(seed, acceptance):
    random = Random(seed)
    drawn, step_time = drafted_requests(random), random.choice(STEP_TIMES)
    num_slots, chosen = random_settings(random)
    check(drawn, num_slots, chosen, step_time, acceptance)


@examples(100)
@given(st.integers(0, 2**32), ACCEPTANCES)
def test_from_event_to_event_it_is_the_same_as_step_by_step(seed, acceptance):
    random = Random(seed)
    workload = workload_of(drafted_requests(random, may_stop=False), SimulatedModel())
    num_slots, chosen = random_settings(random)
    step_time = random.choice(STEP_TIMES)
    drafts = AssumedDrafts(
        num_tokens=random.choice([1, 2, 8]),
        acceptance=acceptance,
        cost=random.choice([0.0, 0.05, 2.5]),
    )
    one = LoggedSimulation(Turns(workload), engine_of(num_slots, chosen, step_time, drafts)).run()
    assert outcome(simulate(workload, num_slots, chosen, step_time, drafts=drafts)) == outcome(one)


def served_alone(num_tokens):
    return workload_of(
        [Request(prompt=[3], max_tokens=num_tokens, ignore_eos=True)], SimulatedModel()
    )


@pytest.mark.parametrize("acceptance", mostly_heavy([0.0, 0.3, 0.7, 0.9, 1.0], 0.7))
@pytest.mark.parametrize("drafted", mostly_heavy([(1, 0.3), (4, 0.05), (8, 0.0)], (4, 0.05)))
def test_a_row_alone_gains_what_theory_says(acceptance, drafted):
    num_drafts, cost = drafted
    num_tokens = 30_000
    drafts = AssumedDrafts(num_tokens=num_drafts, acceptance=acceptance, cost=cost)
    workload = served_alone(num_tokens)
    result = simulate(workload, 1, SchedulingSettings(), ConstantStepTime(), drafts=drafts)
    expected = expected_speedup(acceptance, num_drafts, cost)
    assert num_tokens / result.makespan == pytest.approx(expected, rel=0.02)
    per_step = 1 + result.totals.num_accepted / result.totals.num_draft_rows
    assert per_step == pytest.approx(expected_tokens(acceptance, num_drafts), rel=0.02)


def test_drafts_take_what_verifying_and_making_them_takes():
    never = AssumedDrafts(num_tokens=4, acceptance=0.0)
    result = simulate(served_alone(50), 1, SchedulingSettings(), ConstantStepTime(), never)
    assert result.makespan == 50
    # none behind the first token, which its prompt gives, nor in the place of the last one
    assert (result.totals.num_drafts, result.totals.num_accepted) == (4 * 45 + 3 + 2 + 1, 0)
    always = AssumedDrafts(num_tokens=4, acceptance=1.0, cost=0.25)
    result = simulate(served_alone(11), 1, SchedulingSettings(), ConstantStepTime(), always)
    assert result.makespan == 1 + 2 * (1 + 4 * 0.25)  # a share of a step, one after the other


def test_luck_belongs_to_the_place_in_the_output_and_not_to_the_schedule():
    requests = [Request(prompt=[3] * 9, max_tokens=60, ignore_eos=True)] * 6
    workload = workload_of(requests, SimulatedModel())
    drafts = AssumedDrafts(num_tokens=4, acceptance=0.6)
    steps = [
        simulate(workload, num_slots, SchedulingSettings(), ConstantStepTime(), drafts=drafts)
        for num_slots in (1, 6)
    ]
    totals = [(run.totals.num_drafts, run.totals.num_accepted) for run in steps]
    assert totals[0] == totals[1]
    lengths = {sequence.end_ticks - sequence.admitted_ticks for sequence in steps[0].sequences}
    assert len(lengths) > 1, "each sample has a luck of its own"
