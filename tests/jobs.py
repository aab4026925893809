"""Jobs that are no more than arrivals and lengths."""

import numpy as np

from batcher.planning.workload import GREEDY, Job, Piece, Workload


def workload_of_jobs(arrivals, outputs, num_prompt=1):
    jobs = [
        Job(
            id=str(number),
            input_index=number,
            arrival_time=float(arrival),
            num_prompt_tokens=num_prompt,
            max_tokens=int(num_output),
            prompt=(Piece(num_prompt, ("prompt", number)),),
            output=Piece(int(num_output), GREEDY),
        )
        for number, (arrival, num_output) in enumerate(zip(arrivals, outputs, strict=True))
    ]
    return Workload(jobs)


def poisson(rate, number, seed=0):
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, number))
