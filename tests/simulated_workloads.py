"""Random requests and settings for simulations, and what an engine says of them."""

from typing import NamedTuple

from engine_runs import drained
from msgspec.structs import replace

from batcher import Engine, Request, SimulatedModel
from batcher.errors import BatchdecodeError
from batcher.events import AdmitEvent, FinishEvent, PreemptEvent, StepsEvent
from batcher.request import PromptSegment
from batcher.result import Result
from batcher.scheduling.queue import POLICIES
from batcher.scheduling.scheduler import check_settings
from batcher.settings import SchedulingSettings
from batcher.timing.profiles import shipped_profiles, step_time_of
from batcher.timing.step_time import ConstantStepTime, ProfileStepTime

Logged = tuple[str, int, str, int, float, int]
"""What happened, in which step, to which sample, when, and with how many tokens."""

TERMS = {"t0": 300, "w": 100, "f": 20, "g": 10, "d": 1.5, "h": 2, "e": 0.01}
STEP_TIMES = [
    ConstantStepTime(),
    ConstantStepTime(0.25),
    step_time_of("rtx4090_llama3.1-8b"),
    ProfileStepTime("steep", TERMS),
    ProfileStepTime(
        "jagged",
        {"t0": 30, "w": 100, "f": 20, "g": 10, "d": 1.5, "h": 2, "e": 0.01},
        ((2, 90.5), (3, 407.3), (5, 300), (40, 999)),
    ),
    step_time_of("roofline:llama-3.1-8b:h100-sxm"),
    replace(shipped_profiles()["h100_qwen3-30b-a3b"], pipeline_parallel=3).step_time("staged"),
    step_time_of("roofline:mixtral-8x7b:h100-sxm:2"),
    ProfileStepTime("experts", TERMS | {"x": 900}, (), (8, 2)),
]


class EngineRun(NamedTuple):
    """log: admissions, preemptions and ends.  ends: of each step, in seconds."""

    log: list[Logged]
    ends: list[float]
    blocks: list[int]
    results: dict[tuple[str, int], Result]


class BoundedModel(SimulatedModel):
    """The simulated model, with a context of so many tokens; it then needs a prompt, too."""

    def __init__(self, max_context, session_overflow="error"):
        super().__init__()
        self.max_context, self.needs_prompt = max_context, max_context is not None
        self.session_overflow = session_overflow


def run_engine(requests, num_slots, settings, step_time, model, drafter=None):
    """Return what the engine does with a simulated model, which ends nothing early."""
    engine = Engine(
        model,
        num_slots,
        settings=settings,
        step_time=step_time,
        is_measured=True,
        speculation=drafter,
    )
    done = drained(engine, requests)
    log = []
    ends = []
    blocks = []
    for event in done.events:
        if isinstance(event, AdmitEvent):
            log.append(("admit", event.step, event.id, event.index, event.time, event.cached))
        elif isinstance(event, PreemptEvent):
            log.append(("preempt", event.step, event.id, event.index, event.time, event.tokens))
        elif isinstance(event, FinishEvent) and event.slot is not None:
            log.append(("finish", event.step, event.id, event.index, event.time, event.tokens))
        elif isinstance(event, StepsEvent):
            ends += event.ends
            blocks += event.blocks
    return EngineRun(log, ends, blocks, {(r.id, r.index): r for r in done.results})


def random_requests(random, *, may_stop=True):
    """Some requests: shared prefixes, samples, sessions, priorities, deadlines, salts."""
    base = random.choices([3, 4, 5], k=random.randint(0, 40))
    drawn = []
    for number in range(random.randint(1, 12)):
        session = random.choice([None, None, None, "s", "t"])
        more = {}
        if may_stop and random.random() < 0.2:
            more["stop_token"] = random.choices(range(3, 500), k=30)
        if session is None and random.random() < 0.2:
            more |= {"n": random.randint(2, 3), "temperature": 1.0}
        if random.random() < 0.2:
            more["cache_salt"] = random.choice("ab")
        tail = random.choices(range(3, 500), k=random.randint(0, 12))
        prompt = base[: random.randint(0, len(base))] + tail
        if random.random() < 0.25:
            prompt = [
                PromptSegment(tokens=(base + [7] * 20)[: random.randint(1, 20)], type="system")
                for _ in range(random.randint(1, 3))
            ]
        drawn.append(
            Request(
                id=f"r{number}",
                prompt=prompt,
                max_tokens=random.choice([0, 1, 2, 5, 17, 40, 90]),
                ignore_eos=True,
                arrival_time=random.choice([0.0, 0.0, 0.5, 3.0, 3.25, 10.0, 33.3, 60.0]),
                priority=random.randint(0, 2),
                deadline=random.choice([None, None, 70.0, 200.0]),
                session=session,
                think_time=random.choice([0.0, 1.5]) if session else 0.0,
                **more,
            )
        )
    return drawn


def random_settings(random):
    """A number of slots and settings under which some requests can run."""
    num_slots = random.randint(1, 6)
    settings = SchedulingSettings(
        policy=random.choice(list(POLICIES)),
        aging=random.choice([0.5, 2.0, 7.5, 300.0]),
        preempt_for=random.choice([None, None, "priority", "deadline"]),
        batching=random.choice(["continuous", "continuous", "static"]),
        prefill_order=random.choice(["decode-first", "prefill-first"]),
        max_batch_tokens=random.choice([None, None, 16, 20, 40]),
        long_prefill_threshold=random.choice([None, None, 3, 11]),
        block_size=random.choice([1, 2, 4, 16]),
        kv_blocks=random.choice([None, 10, 40, 60, 120, 300]),
        prefix_cache=random.choice([None, True, False, False]),
        capacity=random.choice(["on-demand", "on-demand", "no-evict", "watermark"]),
    )
    try:
        check_settings(num_slots, settings)
    except BatchdecodeError:
        return num_slots, SchedulingSettings(kv_blocks=settings.kv_blocks)
    return num_slots, settings
