"""Events for tests in few words: those of a step have its number as their time."""

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    DropEvent,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    RunEvent,
    StepsEvent,
)
from batcher.metrics.summary import RunMetrics
from batcher.trace.files import read_numbered_trace

RUN = RunEvent(batch=2, model="test", settings={})


def read_trace(lines, name="trace", complaint=lambda _: None):
    return read_numbered_trace(enumerate(lines, 1), name, complaint)


def metrics_of(events, *limits, **more):
    metrics = RunMetrics(*limits, **more)
    metrics.observe(events)
    return metrics


def arrive(name, step=0, index=0, *, prompt=5):
    return ArriveEvent(step, float(step), name, index, "input", prompt, 9)


def admit(name, slot, step=0, index=0, role="sample", **fields):
    return AdmitEvent(step, float(step), name, index, slot, "empty", role, **fields)


def finish(name, slot, step=0, index=0, role="sample", *, reason="length", tokens=1):
    return FinishEvent(step, float(step), name, index, slot, reason, None, tokens, role)


def preempt(name, slot, step, index=0, role="sample", *, generated=2):
    return PreemptEvent(step, float(step), name, index, slot, "kv", "z", 0, 5, generated, role=role)


def prefill(name, slot, step, tokens, left):
    return PrefillEvent(step, float(step), name, 0, slot, tokens, left)


def jump(name, slot, step=0, index=0, tokens=2):
    return JumpEvent(step, float(step), name, index, slot, tokens)


def fork(name, slot, parent, step=0, index=0):
    return ForkEvent(step, float(step), name, index, slot, parent)


def drop(name, step=0, reason="length", index=0):
    return DropEvent(step, float(step), name, index, reason)


def hold(name, step):
    return BlockedEvent(step, float(step), name, 0, "kv", 3)


def steps(step, ends, decodes=None):
    ones = [1] * len(ends)
    return StepsEvent(step, ends, ones if decodes is None else decodes, *[ones] * 5)


def by_step(stretches):
    return [num for start, stop, num in stretches for _ in range(start, stop)]
