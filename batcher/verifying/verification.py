"""The proof: all requests one at a time, twice, and then under one case after the other."""

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from batcher.errors import InvariantError
from batcher.request import Request
from batcher.verifying.cases import Case
from batcher.verifying.decoding import (
    Exercised,
    ModelMaker,
    StreamError,
    decode_alone,
    decode_under,
    groups_of,
)
from batcher.verifying.outputs import Difference, Outputs, first_difference


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
) -> Verdict:
    """Decode `requests` alone and under all `cases`, up to the first difference.

    The second time alone they come in the opposite order, so that a model which keeps something of
    a sequence that has ended is found out.

    on_case: called with the number of cases that are done.

    Raises:
        BatchdecodeError: the model cannot decode them.
        InvariantError: the engine is wrong; the message names the case.
    """
    groups, order = groups_of(requests), [str(request.id) for request in requests]
    verdict = Verdict(num_requests=len(requests))
    alone = decode_alone(groups, make_model)
    again = decode_alone(groups[::-1], make_model)
    verdict.num_outputs = len(alone)
    verdict.num_tokens = sum(len(result.tokens) for result in alone.values())
    verdict.difference = first_difference(order, alone, again)
    if verdict.difference is not None:
        return verdict
    for case in cases:
        verdict.difference = _difference_under(
            case, requests, order, alone, make_model, seed, verdict.exercised
        )
        if verdict.difference is not None:
            verdict.case = case
            return verdict
        verdict.num_settings += 1
        on_case(verdict.num_settings)
    return verdict


def _difference_under(
    case: Case,
    requests: Sequence[Request],
    order: Sequence[str],
    alone: Outputs,
    make_model: ModelMaker,
    seed: int,
    exercised: Exercised,
) -> Difference | None:
    try:
        here = decode_under(case, requests, make_model, seed, exercised)
    except InvariantError as error:
        raise InvariantError(f"{error} (under setting {case.number})") from error
    except StreamError as error:
        result = alone[error.key]
        return Difference(
            id=error.key[0],
            index=error.key[1],
            field="stream",
            position=None,
            alone=result.text,
            here="".join(error.told.texts),
            alone_tokens=result.tokens,
            here_tokens=error.told.tokens,
            alone_error=result.error,
        )
    return first_difference(order, alone, here)
