"""How long outputs are that only the model knows: requests are decoded once, whatever the batch.

Rule: tokens never depend on the schedule, so one run tells what every deployment gives.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from batcher.engine import Engine
from batcher.errors import FIT_ERROR_CODES, BatchdecodeError
from batcher.models.base import Model
from batcher.planning.workload import has_exact_length
from batcher.request import Request

LARGE_BATCH = 256
_WITHOUT_OUTPUT = {*FIT_ERROR_CODES, "session-failed"}

Outputs = dict[tuple[int, int], Sequence[int]]


def num_unknown(requests: Sequence[Request]) -> int:
    """Return how many of valid `requests` may end before max_tokens."""
    return sum(not has_exact_length(request) for request in requests)


def decoded_outputs(requests: Sequence[Request], model: Model) -> Outputs:
    """Return the tokens of each sample of valid `requests`, by the place of its request and index.

    One that does not fit into the context has none, nor do turns of its session that follow.

    Raises:
        BatchdecodeError: a sample failed otherwise.
    """
    engine = Engine(model, LARGE_BATCH)
    places: dict[str, int] = {}
    for place, request in enumerate(requests):
        # Without what only delays it, and with a result for each of its samples.
        samples = {"n": request.best_of or request.n, "best_of": None}
        at_once = replace(request, arrival_time=0.0, think_time=0.0, deadline=None, **samples)
        places[engine.enqueue(at_once, input_index=place)] = place
    outputs: Outputs = {}
    while engine.has_work:
        for result in engine.step().results:
            if result.error is not None and result.error.code not in _WITHOUT_OUTPUT:
                raise BatchdecodeError(
                    f"request {result.id!r}: the length of its output is not known, since "
                    f"decoding it failed: {result.error.message}"
                )
            outputs[places[result.id], result.index] = result.token_ids
    return outputs
