"""Decoding all requests: one at a time, or under the settings of a case."""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from batcher.engine import Engine
from batcher.errors import InvariantError
from batcher.events import AdmitEvent, PreemptEvent, PrefillEvent
from batcher.models.base import Model
from batcher.models.simulated import SimulatedModel
from batcher.request import Request
from batcher.result import Result
from batcher.timing.formulas import ConstantStepTime
from batcher.validation import num_slots_needed
from batcher.verifying.cases import Case
from batcher.verifying.outputs import Outputs

ModelMaker = Callable[[], Model]
Group = list[Request]


class Exercised(Struct):
    """How often what might go wrong was done: what a proof rests on.

    preemptions: rows that lost their slot.  cached_tokens: found in blocks.  chunks: of prompts
    that took more than one step.
    """

    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    chunks: int = 0


class Told(NamedTuple):
    """What token events have told of an output."""

    tokens: list[int]
    texts: list[str]


class StreamError(Exception):
    """Token events do not make up the result that follows them.

    key: id of the request and index of the output.
    """

    def __init__(self, key: tuple[str, int], told: Told) -> None:
        super().__init__(key)
        self.key, self.told = key, told


def groups_of(requests: Sequence[Request]) -> list[Group]:
    """Return the requests in groups that may be decoded in any order: the turns of a session."""
    sessions: dict[str, Group] = {}
    groups: list[Group] = []
    for request in requests:
        if request.session is None:
            groups.append([request])
            continue
        if request.session not in sessions:
            sessions[request.session] = []
            groups.append(sessions[request.session])
        sessions[request.session].append(request)
    return groups


def decode_alone(groups: Sequence[Group], make_model: ModelMaker) -> Outputs:
    """Return the outputs of all requests, each decoded with nothing beside it.

    Those that need as many slots are decoded in one engine, one after the other.
    """
    engines: dict[int, Engine] = {}
    outputs: dict[tuple[str, int], Result] = {}
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
) -> Outputs:
    """Return the outputs of all requests under the settings of `case`; count in `exercised`.

    Raises:
        InvariantError: a block is lost, shared wrongly or held by who does not run.
        StreamError: the stream told something else than a result.
    """
    model = make_model()
    if isinstance(model, SimulatedModel):
        model.is_attentive = True
    step_time = None
    if case.step_seconds != 1.0:
        step_time = ConstantStepTime(case.step_seconds)
    engine = Engine(
        model,
        case.batch,
        settings=case.settings,
        step_time=step_time,
        is_streaming=case.is_streaming,
        is_checked=True,
    )
    for request in arranged(case, requests, seed):
        engine.enqueue(request)
    outputs: dict[tuple[str, int], Result] = {}
    told: dict[tuple[str, int], Told] = {}
    while engine.has_work:
        events, results, tokens = engine.step()
        for event in events:
            exercised.preemptions += type(event) is PreemptEvent
            exercised.chunks += type(event) is PrefillEvent
            if type(event) is AdmitEvent:
                exercised.cached_tokens += event.cached
        for token in tokens:
            of_output = told.setdefault((token.id, token.index), Told([], []))
            of_output.tokens.extend(token.tokens)
            of_output.texts.append(token.text)
        _keep(outputs, results)
    exercised.steps += engine.num_steps
    if case.is_streaming:
        _check_stream(requests, outputs, told)
    return outputs


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


def _keep(outputs: dict[tuple[str, int], Result], results: Sequence[Result]) -> None:
    for result in results:
        key = result.id, result.index
        if key in outputs:
            raise InvariantError(f"two results {result.index} of request {result.id!r}")
        outputs[key] = result


def _check_stream(
    requests: Sequence[Request], outputs: Outputs, told: dict[tuple[str, int], Told]
) -> None:
    """Make sure that what was streamed of an output is the output.

    Raises:
        StreamError: it is not.
    """
    streamed = {
        request.id: request
        for request in requests
        if request.best_of is None and request.num_beams == 1 and request.max_tokens
    }
    for key, result in outputs.items():
        request = streamed.get(key[0])
        if request is None:
            continue
        of_output = told.get(key, Told([], []))
        text = result.text
        if result.segments is not None:  # without the markers, as it is streamed
            text = "".join(segment.text for segment in result.segments)
        has_text = "".join(of_output.texts) == text or request.echo
        if of_output.tokens != result.tokens or not has_text:
            raise StreamError(key, of_output)
