"""`batcher.decode`: a list of requests in, a list of results out."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from batcher.engine import Engine
from batcher.errors import BatchdecodeError, FieldProblem, RequestError
from batcher.formats.requests import ParsedLine, RequestParser
from batcher.models.base import Model
from batcher.models.callable import ModelNext
from batcher.models.simulated import SimulatedModel
from batcher.request import Request, Result


def decode(
    requests: Iterable[Request | Mapping[str, Any]],
    *,
    model: Model | ModelNext | None = None,
    batch_size: int = 8,
    on_finish: Callable[[Result], object] | None = None,
) -> list[Result]:
    """Decode `requests` in `batch_size` slots and return their results in input order.

    requests: `Request` objects, or mappings with the fields of a requests file.
    model: a Model, a `model_next(batch_prefixes) -> next_tokens`, or None for the simulated model.
    on_finish: called with each result as soon as it is there.

    Raises:
        BatchdecodeError: a request is not valid (a RequestError), or there is no such model or
        batch size.
    """
    engine = Engine(SimulatedModel() if model is None else model, batch_size)
    for number, request in enumerate(requests, 1):
        engine.add(request if isinstance(request, Request) else _request(request, number))
    results: list[Result] = []
    while engine.has_work:
        for result in engine.step().results:
            results.append(result)
            if on_finish is not None:
                on_finish(result)
    return sorted(results, key=lambda result: result.index)


def _request(fields: Mapping[str, Any], number: int) -> Request:
    """Return the request a mapping states, by the rules for a line that holds it."""
    try:
        _refuse_bytes(fields)
        line = msgspec.json.encode(fields, enc_hook=_as_python)
    except (TypeError, ValueError) as error:
        raise BatchdecodeError(f"request {number}: {error}") from None
    parsed = RequestParser(vocab_size=None).parse(line, number)
    if isinstance(parsed, ParsedLine):
        return parsed.request
    problems = [
        FieldProblem(
            problem.code, (problem.field,) if problem.field else (), problem.message, problem.hint
        )
        for problem in parsed.problems
    ]
    raise RequestError(parsed.id, problems)


def _refuse_bytes(value: object) -> None:
    """Make sure that `value` holds nothing that JSON would take for something else.

    Raises:
        TypeError: it does.
    """
    if isinstance(value, bytes | bytearray | memoryview | set | frozenset):
        raise TypeError(f"a {type(value).__name__} cannot be part of a request")
    if isinstance(value, Mapping):
        _refuse_bytes([*value.values()])
    elif isinstance(value, list | tuple) and {type(part) for part in value} != {int}:
        for part in value:
            _refuse_bytes(part)


def _as_python(value: Any) -> Any:
    """Return the numbers of an array (numpy's, torch's), which know how to become Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be part of a request")
