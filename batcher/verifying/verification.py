"""The proof: all requests one at a time, twice, and then under one case after the other."""

from collections.abc import Callable, Sequence
from random import Random

from msgspec import Struct, field
from msgspec.structs import replace

from batcher.engine import Engine
from batcher.errors import InvariantError
from batcher.events import AcceptEvent, AdmitEvent, PreemptEvent, PrefillEvent, RollbackEvent
from batcher.models.base import Model
from batcher.models.simulated import SimulatedModel
from batcher.request import Request
from batcher.requests.validation import num_slots_needed
from batcher.result import Result
from batcher.speculation.settings import SpeculationSettings
from batcher.timing.formulas import ConstantStepTime
from batcher.verifying.cases import Case
from batcher.verifying.outputs import (
    Difference,
    Key,
    Outputs,
    StreamedOutput,
    first_difference,
    stream_difference,
)

ModelMaker = Callable[[], Model]
Group = list[Request]


class Exercised(Struct):
    """How often what might go wrong was done: what a proof rests on.

    preemptions: rows that lost their slot.  cached_tokens: found in blocks.  chunks: of prompts
    that took more than one step.  accepted_drafts, rejected_drafts: tokens.
    """

    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    chunks: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0


class Verdict(Struct, kw_only=True):
    """What was found.

    num_settings: under how many the outputs were the same.  difference: the first that is not;
    case: the one it was found under, None if that was decoding alone a second time.
    """

    num_requests: int
    num_outputs: int = 0
    num_tokens: int = 0
    num_settings: int = 0
    exercised: Exercised = field(default_factory=Exercised)
    difference: Difference | None = None
    case: Case | None = None

    @property
    def is_deterministic(self) -> bool:
        """Whether decoding alone gives the same twice."""
        return self.difference is None or self.case is not None


def verify(
    requests: Sequence[Request],
    make_model: ModelMaker,
    cases: Sequence[Case],
    seed: int,
    on_case: Callable[[int], object],
    speculation: SpeculationSettings | None = None,
) -> Verdict:
    """Decode `requests` alone and under all `cases`, up to the first difference.

    The second time alone they come in the opposite order, so that a model which keeps something of
    a sequence that has ended is found out.

    on_case: called with the number of cases that are done.
    speculation: of the cases; alone, there are no drafts.

    Raises:
        BatchdecodeError: the model cannot decode them.
        InvariantError: the engine is wrong; the message names the case.
    """
    groups, order = groups_of(requests), [str(request.id) for request in requests]
    verdict = Verdict(num_requests=len(requests))
    alone = decode_alone(groups, make_model)
    again = decode_alone(groups[::-1], make_model)
    verdict.num_outputs = len(alone)
    verdict.num_tokens = sum(len(result.token_ids) for result in alone.values())
    verdict.difference = first_difference(order, alone, again)
    if verdict.difference is not None:
        return verdict
    for case in cases:
        try:
            here, told = decode_under(
                case, requests, make_model, seed, verdict.exercised, speculation
            )
        except InvariantError as error:
            raise InvariantError(f"{error} (under setting {case.number})") from error
        if case.is_streaming:
            verdict.difference = stream_difference(requests, alone, here, told)
        if verdict.difference is None:
            verdict.difference = first_difference(order, alone, here)
        if verdict.difference is not None:
            verdict.case = case
            return verdict
        verdict.num_settings += 1
        on_case(verdict.num_settings)
    return verdict


def groups_of(requests: Sequence[Request]) -> list[Group]:
    """Return the requests in groups that may be decoded in any order: the turns of a session."""
    sessions: dict[str, Group] = {}
    groups: list[Group] = []
    for request in requests:
        if request.session is None:
            groups.append([request])
            continue
        if request.session not in sessions:
            groups.append(sessions.setdefault(request.session, []))
        sessions[request.session].append(request)
    return groups


def decode_alone(groups: Sequence[Group], make_model: ModelMaker) -> Outputs:
    """Return the outputs of all requests, each decoded with nothing beside it.

    Those that need as many slots are decoded in one engine, one after the other.
    """
    engines: dict[int, Engine] = {}
    outputs: dict[Key, Result] = {}
    for group in groups:
        num_slots = max(map(num_slots_needed, group))
        engine = engines.get(num_slots)
        if engine is None:
            engine = engines[num_slots] = Engine(make_model(), num_slots)
        for request in group:
            engine.enqueue(replace(request, arrival_time=0.0, think_time=0.0))
            while engine.has_work:
                _keep(outputs, engine.step().results)
    return outputs


def decode_under(
    case: Case,
    requests: Sequence[Request],
    make_model: ModelMaker,
    seed: int,
    exercised: Exercised,
    speculation: SpeculationSettings | None = None,
) -> tuple[Outputs, dict[Key, StreamedOutput]]:
    """Return the outputs of all requests under the settings of `case`, and what events told.

    exercised: where is counted what was done.

    Raises:
        InvariantError: a block is lost, shared wrongly or held by who does not run.
    """
    model = make_model()
    if isinstance(model, SimulatedModel):
        model.is_attentive = True
    step_time = None if case.step_seconds == 1.0 else ConstantStepTime(case.step_seconds)
    engine = Engine(
        model,
        case.batch,
        settings=case.settings,
        step_time=step_time,
        is_streaming=case.is_streaming,
        is_checked=True,
        speculation=speculation,
    )
    for request in arranged(case, requests, seed):
        engine.enqueue(request)
    outputs: dict[Key, Result] = {}
    told: dict[Key, StreamedOutput] = {}
    while engine.has_work:
        events, results, tokens = engine.step()
        for event in events:
            exercised.preemptions += type(event) is PreemptEvent
            exercised.chunks += type(event) is PrefillEvent
            if type(event) is AcceptEvent:
                exercised.accepted_drafts += event.tokens
            if type(event) is RollbackEvent:
                exercised.rejected_drafts += event.tokens
            if type(event) is AdmitEvent:
                exercised.cached_tokens += event.cached
        for token in tokens:
            of_output = told.setdefault((token.id, token.index), StreamedOutput([], []))
            of_output.tokens.extend(token.tokens or ())
            of_output.texts.append(token.text)
        _keep(outputs, results)
    exercised.steps += engine.num_steps
    return outputs, told


def arranged(case: Case, requests: Sequence[Request], seed: int) -> Sequence[Request]:
    """Return all requests in the order, and with the arrival times, that `case` wants.

    The turns of a session keep their order.
    """
    if case.arrivals == "given":
        return requests
    random = Random(f"{seed}/{case.number}/arrivals")  # noqa: S311 - no secret
    groups = groups_of(requests)
    if case.arrivals != "at-once":
        random.shuffle(groups)
    horizon = 0.0
    if case.arrivals == "scattered":
        horizon = 2.0 * len(groups) * case.step_seconds
    return [
        replace(request, arrival_time=round(random.uniform(0, horizon), 2), think_time=0.0)
        for group in groups
        for request in group
    ]


def _keep(outputs: dict[Key, Result], results: Sequence[Result]) -> None:
    for result in results:
        key = result.id, result.index
        if key in outputs:
            raise InvariantError(f"two results {result.index} of request {result.id!r}")
        outputs[key] = result
