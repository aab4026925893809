"""Jobs that are no more than arrivals and lengths, and the simulation of one engine."""

import numpy as np

from batcher.planning.simulated_sequence import GREEDY, Piece, SimulatedSequence
from batcher.planning.simulator import ReplicaSettings
from batcher.planning.simulator import simulate as simulate_engine
from batcher.planning.workload import Workload


def job_of(number, num_prompt, num_output, arrival=0.0, prompt=None, output=None):
    return SimulatedSequence(
        id=str(number),
        input_index=number,
        arrival_time=float(arrival),
        num_prompt_tokens=num_prompt,
        max_tokens=int(num_output),
        prompt=prompt or (Piece(num_prompt, ("prompt", number)),),
        output=output or Piece(int(num_output), GREEDY),
    )


def workload_of_jobs(arrivals, outputs, num_prompt=1):
    rows = enumerate(zip(arrivals, outputs, strict=True))
    return Workload([job_of(number, num_prompt, output, at) for number, (at, output) in rows])


def engine_of(num_slots, scheduling, step_time, drafts=None):
    return ReplicaSettings(
        num_slots=num_slots, scheduling=scheduling, step_time=step_time, drafts=drafts
    )


def simulate(workload, *engine, **more):
    return simulate_engine(workload, engine_of(*engine, **more))


def poisson(rate, number, seed=0):
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, number))
