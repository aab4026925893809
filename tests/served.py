"""Workloads whose schedules can be worked out by hand, and what a deployment makes of them."""

from batcher.models.simulated import SimulatedModel
from batcher.planning.deployments import AXES, Deployment, grid_of
from batcher.planning.measure import Question, measure
from batcher.planning.workload import workload_of
from batcher.request import Request
from batcher.settings import SchedulingSettings

MODEL = SimulatedModel()


def requests_of(*rows):
    """Requests of rows (arrival, prompt tokens, output tokens); no two prompts begin alike."""
    return [
        Request(
            prompt=[place + 1] * num_prompt,
            max_tokens=num_output,
            ignore_eos=True,
            arrival_time=float(arrival),
        )
        for place, (arrival, num_prompt, num_output) in enumerate(rows)
    ]


def question_of(*rows, slo=None, asked=1.0):
    return Question(workload_of(requests_of(*rows), MODEL), slo, asked)


def deployment_of(batch, profile="constant", **scheduling):
    return Deployment(batch=batch, profile=profile, scheduling=SchedulingSettings(**scheduling))


def grid(**texts):
    return grid_of({name: AXES[name].values(text) for name, text in texts.items()}, Deployment())


def outcome_of(*rows, slo=None, **deployment):
    return measure(question_of(*rows, slo=slo), deployment_of(**deployment))


def driving(simulate):
    """Return what runs chains, one after the other, that ask for deployments."""

    def drive(chain):
        try:
            deployment = next(chain)
            while True:
                deployment = chain.send(simulate(deployment))
        except StopIteration as stop:
            return stop.value

    return lambda chains: list(map(drive, chains))
