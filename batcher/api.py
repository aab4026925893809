"""`decode`: a list of requests in, a list of results out; `load_model`: the model for it."""

from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

import msgspec

from batcher.engine import Engine
from batcher.errors import BatchdecodeError, FieldProblem, RequestError
from batcher.events import TokenEvent
from batcher.models import loading
from batcher.models.base import Model
from batcher.models.callables import ModelNext
from batcher.models.simulated import SimulatedModel
from batcher.request import Request
from batcher.requests.lines import ParsedLine, RequestParser
from batcher.requests.validation import ModelCapabilities
from batcher.result import Result

if TYPE_CHECKING:
    from batcher.models.callables import LLM


def load_model(name: str, **settings: Any) -> Model:
    """Load the model called `name`, as `--model` does; you can use it any number of times.

    name: a checkpoint (a .gguf file, a folder or `smollm2`), `hf:` and a folder or Hub name,
    `simulated`, or `package.module:name` of a callable, a Model, an LLM or a class of one.
    settings: as in its section of the configuration: `weights`, `max_context` and
    others for a checkpoint; `device`, `dtype` and others for `hf:`; SimulatedSettings for the
    simulated model; CallSettings for an LLM.

    Raises:
        BatchdecodeError: the model does not exist or is damaged, or a setting is invalid.
    """
    return loading.load_model(name, settings)


def decode(
    requests: Iterable[Request | Mapping[str, Any]],
    *,
    model: "Model | ModelNext | LLM | str | None" = None,
    batch_size: int = 8,
    chat: bool = False,
    on_finish: Callable[[Result], object] | None = None,
    on_token: Callable[[TokenEvent], object] | None = None,
) -> list[Result]:
    """Decode `requests` in `batch_size` slots and return their results in input order.

    The results of one request are adjacent, by index; best_of samples and beams are sorted best
    first.

    requests: `Request` objects, or mappings with the fields of a requests file.
    model: a Model, for example from `load_model`, or a name that it takes; a
    `model_next(batch_prefixes) -> next_tokens`, an LLM object, or None for the simulated model.
    chat: treat a text prompt in a mapping as one user message.
    on_finish: called with each result when it is complete.
    on_token: called after each step with the new tokens of each sample, and the text that is final
    by then.

    Raises:
        BatchdecodeError: a request is invalid (a RequestError), the model or batch size does not
        exist, or the model lacks a chat template that a request needs.
    """
    engine = Engine(
        SimulatedModel() if model is None else model, batch_size, is_streaming=on_token is not None
    )
    capabilities = ModelCapabilities(
        chat_template=engine.capabilities.chat_template, takes_chats=chat
    )
    if chat and capabilities.chat_template is None:
        raise BatchdecodeError("chat needs a model with a chat template; this one has none")
    parser = RequestParser(capabilities)
    ranks: dict[str, tuple[int, bool]] = {}  # id -> (place, whether its results come ranked)
    for place, fields in enumerate(requests):
        request = fields if isinstance(fields, Request) else _request(fields, place + 1, parser)
        ranks[engine.add(request)] = place, request.best_of is not None

    def order(result: Result) -> tuple[int, int]:
        place, is_ranked = ranks[result.id]
        return place, 0 if is_ranked else result.index

    results: list[Result] = []
    while engine.has_work:
        outcome = engine.step()
        if on_token is not None:
            for event in outcome.tokens:
                on_token(event)
        for result in outcome.results:
            results.append(result)
            if on_finish is not None:
                on_finish(result)
    return sorted(results, key=order)


def _request(fields: Mapping[str, Any], number: int, parser: RequestParser) -> Request:
    """Return the request in a mapping, by the rules for a line of a requests file.

    The engine checks later what depends on the model.
    """
    try:
        _check_for_json(fields, "it")
        line = msgspec.json.encode(fields, enc_hook=_as_python)
    except (TypeError, ValueError) as error:
        raise BatchdecodeError(f"request {number}: {error}") from None
    except RecursionError:
        message = f"request {number}: it contains itself, or is nested too deeply"
        raise BatchdecodeError(message) from None
    parsed = parser.parse(line, number)
    if isinstance(parsed, ParsedLine):
        return parsed.request
    problems = [
        FieldProblem(p.code, (p.field,) if p.field else (), p.message, p.hint)
        for p in parsed.problems
    ]
    raise RequestError(parsed.id, problems)


def _check_for_json(value: Any, name: str) -> None:
    """Check that `value` has nothing that JSON would change.

    name: of the value, or of the list that it is in.

    Raises:
        TypeError, ValueError: it has.
        RecursionError: it is nested too deeply.
    """
    if isinstance(value, bytes | bytearray | memoryview | set | frozenset):
        raise TypeError(f"a {type(value).__name__} cannot be part of a request")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    if isinstance(value, Mapping):
        for key, part in value.items():
            _check_for_json(key, "a key")
            _check_for_json(part, f"`{key}`")
    elif isinstance(value, list | tuple) and {type(part) for part in value} != {int}:
        for part in value:
            _check_for_json(part, name)


def _as_python(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be part of a request")
