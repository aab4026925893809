"""Everything that is wrong with a request: field by field, together, and for a model.

Rule: what a field asks for is done or refused, never dropped.  What the table of fields says to
exclude another one, or to need it, is refused, and so is what find_conflicts has rules for;
docs/requests-and-results.md shows them all.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import (
    BatchdecodeError,
    EncodingError,
    FieldProblem,
    GrammarError,
    Path,
    not_encoded,
)
from batcher.fields import Field
from batcher.request import (
    CONSTRAINT_FIELDS,
    REQUEST_FIELDS,
    ConstraintField,
    PromptSegment,
    Request,
    ServerRequest,
)
from batcher.requests.stops import (
    bounded,
    check_states,
    check_stop,
    check_stop_sequence,
    check_stop_token,
    check_total_length,
    find_doubled_markers,
    find_unreachable,
)
from batcher.requests.values import (
    Check,
    ModelCapabilities,
    Problems,
    check_allowed,
    check_bad_words,
    check_choice,
    check_json_schema,
    check_logit_bias,
    check_negative_prompt,
    check_number,
    check_object,
    check_prompt,
    check_string,
    check_texts_to_choose,
    quote,
)

MAX_PROBLEMS = 100  # of one field
MAX_MODELS = 8  # of a server, in a message
OF_STREAMS = {"n", "best_of", "stream", "stream_options"}  # which nobody but the engine decides

_DEFAULTS = {name: field.default for name, field in REQUEST_FIELDS.items()} | {"prompt": ""}

# The fields whose values are made of others; of all others the type tells how they are checked.
_CHECKS: dict[str, Check] = {
    "prompt": check_prompt,
    "stop_token": bounded(check_stop_token),
    "stop_sequence": bounded(check_stop_sequence),
    "stop": bounded(check_stop),
    "logit_bias": check_logit_bias,
    "allowed_token_ids": check_allowed,
    "bad_words": bounded(check_bad_words),
    "negative_prompt": check_negative_prompt,
    "json_schema": check_json_schema,
    "choice": check_texts_to_choose,
    "states": bounded(check_states),
    "extra_body": check_object,
}
_IF_EMPTY: dict[str, tuple[str, str | None]] = {
    "session": ("", "leave it out"),
    "cache_salt": ("", "leave it out"),
    "lark": (": it has no rule", None),
    "gbnf": (": it has no rule", None),
}


class Conflict(Struct, frozen=True):
    """A problem of one field, and the other field that it depends on, if there is one."""

    problem: FieldProblem
    other: str | None = None


Conflicts = Iterator[Conflict]


def look_closely(request: Request, capabilities: ModelCapabilities) -> list[FieldProblem]:
    """Return everything wrong with `request`, to be decoded by that model; [] if nothing is."""
    problems: list[FieldProblem] = []
    for name, field in REQUEST_FIELDS.items():
        value = getattr(request, name)
        if value is not field.default:
            problems += check_field(field, value, capabilities)
    bad = {str(problem.path[0]) for problem in problems}
    sound = replace(request, **{name: _DEFAULTS[name] for name in bad}) if bad else request
    if isinstance(request, ServerRequest) and "temperature" not in request.stated:
        bad.add("temperature")  # the server has a default of its own
    problems += [
        conflict.problem
        for conflict in find_conflicts(sound)
        if conflict.problem.path[0] not in bad and conflict.other not in bad
    ]
    problems += find_unserved(sound, capabilities)
    return problems


def check_field(field: Field, value: Any, capabilities: ModelCapabilities) -> list[FieldProblem]:
    """Return what is wrong with the value of a field by itself."""
    return [*islice(_check_field(field, value, capabilities), MAX_PROBLEMS)]


def _check_field(field: Field, value: Any, capabilities: ModelCapabilities) -> Problems:
    """Yield what is wrong with the value of a field by itself."""
    path = (field.name,)
    if field.name in _CHECKS:
        yield from _CHECKS[field.name](value, path, capabilities)
    elif field.range is not None:
        yield from check_number(value, path, field.range)
    elif field.choices is not None:
        yield from check_choice(value, path, field.choices)
    else:
        yield from check_string(value, path, "a string")
        if isinstance(value, str) and not value and field.name in _IF_EMPTY:
            reason, hint = _IF_EMPTY[field.name]
            yield FieldProblem("invalid-value", path, f"{quote(path)} is empty{reason}", hint)


# -- fields together -------------------------------------------------------------------------------


def find_conflicts(request: Request) -> Conflicts:
    """Yield the contradictions in `request`, each field of which is valid by itself."""
    asked = {
        name: field for name, field in REQUEST_FIELDS.items() if field.asks(getattr(request, name))
    }
    blamed = set()
    for name, field in asked.items():
        for other, why in field.excludes.items():
            if other in asked:
                yield _make(name, other, f"`{name}` cannot go with `{other}`: {why}")
                blamed.add(name)
                break
    for name, field in asked.items():
        if field.needs is not None and field.needs[0] not in asked and name not in blamed:
            other, remedy = field.needs
            yield _make(name, other, f"`{name}` has no effect without `{other}`; {remedy}")
    yield from _check_samples(request)
    yield from _check_others(request)


def _make(name: str, other: str, message: str) -> Conflict:
    return Conflict(FieldProblem("conflicting-fields", (name,), message), other)


def _check_samples(request: Request) -> Conflicts:
    if request.best_of is not None and request.best_of < request.n:
        message = f"`best_of` is {request.best_of}, less than the {request.n} outputs of `n`"
        yield _make("best_of", "n", message)
    if request.num_beams > 1:
        if request.n > request.num_beams:
            message = f"`n` is {request.n}, but {request.num_beams} beams give no more outputs"
            yield _make("n", "num_beams", message)
    elif request.temperature == 0:
        for name, count in (("n", request.n), ("best_of", request.best_of)):
            if count is not None and count > 1:
                message = f"`{name}` is {count}, but with `temperature` 0 all outputs are the same"
                yield _make(name, "temperature", message)


def _check_others(request: Request) -> Conflicts:
    most = request.output_limit
    if request.min_tokens > most:
        what = f"`max_tokens`, {most}" + " by default" * (request.max_tokens is None)
        message = f"`min_tokens` is {request.min_tokens}, more than {what}"
        yield _make("min_tokens", "max_tokens", message)
    if request.heal and not request.prompt:
        yield _make("heal", "prompt", "`heal` needs a prompt with at least one token")
    states = request.states
    if states is not None:
        for problem in (*find_doubled_markers(states), *find_unreachable(request, states)):
            yield Conflict(problem, "initial_state" if problem.path[0] == "states" else "states")
    if request.deadline is not None and request.deadline < request.arrival_time:
        message = (
            f"`deadline` is {request.deadline:g}, before `arrival_time`, {request.arrival_time:g}"
        )
        yield _make("deadline", "arrival_time", message)
    yield from map(Conflict, check_total_length(request))


# -- what the model and the batch can do -----------------------------------------------------------


def num_slots_needed(request: Request) -> int:
    """Return how many slots one admission of `request` takes.

    Those are its beams, or a sample and the negative prompt beside it; samples are admitted one by
    one.
    """
    if request.num_beams > 1:
        return request.num_beams
    return 1 if request.cfg_scale == 1 else 2


def logit_fields_of(request: Request) -> list[str]:
    """Return the fields of a valid `request` that need logits; [] if tokens will do."""
    return [
        field.name
        for field in REQUEST_FIELDS.values()
        if field.needs_logits and field.asks(getattr(request, field.name))
    ]


def constraint_fields_of(request: Request) -> list[ConstraintField]:
    """Return the fields of `request` that state a constraint; a valid one has one at the most."""
    return [name for name in CONSTRAINT_FIELDS if getattr(request, name) is not None]


def find_unserved(request: Request, capabilities: ModelCapabilities) -> Iterator[FieldProblem]:
    """Yield what the valid `request` asks for and `capabilities` cannot give."""
    if capabilities.served is not None:
        yield from find_untold(request, capabilities, capabilities.served)
        yield from _find_uncompiled(request, capabilities)
        return
    if request.extra_body:
        message = "`extra_body` is for a server, and this model is none"
        yield FieldProblem("unsupported-model", ("extra_body",), message, "leave it out")
    yield from _find_unserved_by_model(request, capabilities)


def _find_unserved_by_model(
    request: Request, capabilities: ModelCapabilities
) -> Iterator[FieldProblem]:
    """Yield what the valid `request` asks for and a model and its batch cannot give."""
    if not capabilities.gives_logits:
        for name in logit_fields_of(request):
            message = f"`{name}` needs a model that gives logits; this one gives only tokens"
            yield FieldProblem("unsupported-model", (name,), message)
    if request.prompt_logprobs is not None and not capabilities.scores_prompts:
        message = (
            "`prompt_logprobs` needs a model that gives the logits after every token of a prompt; "
            "this one gives only those after the last"
        )
        hint = "leave it out, and in rows of completions `echo` or `logprobs`"
        yield FieldProblem("unsupported-model", ("prompt_logprobs",), message, hint)
    needed = num_slots_needed(request)
    if capabilities.num_slots is not None and needed > capabilities.num_slots:
        name = "num_beams" if request.num_beams > 1 else "cfg_scale"
        message = (
            f"`{name}` {getattr(request, name)} needs {needed} slots at once, "
            f"and the batch has {capabilities.num_slots}"
        )
        yield FieldProblem("too-few-slots", (name,), message, f"use a batch of {needed} or more")
    yield from _find_uncompiled(request, capabilities)
    if capabilities.encode is not None:
        for path, text in _texts_of(request):
            try:
                capabilities.encode(text)
            except EncodingError as error:
                yield not_encoded(path, error)


def find_untold(
    request: Request, capabilities: ModelCapabilities, served: frozenset[str]
) -> Iterator[FieldProblem]:
    """Yield what the valid `request` asks for, or lacks, that this server cannot be sent."""
    for name, field in REQUEST_FIELDS.items():
        value = getattr(request, name)
        if name not in served and field.asks(value) and (name, value) != ("best_of", request.n):
            message = f"`{name}` is not sent to servers"
            hint = f'if yours has such a field, use "extra_body": {{"{name}": ...}} or --extra-body'
            hint = "leave it out" if name in OF_STREAMS else hint
            yield FieldProblem("unsupported-model", (name,), message, hint)
    extra = request.extra_body or {}
    if capabilities.models and not extra.get("model"):
        names = capabilities.models
        message = f"the server has {len(names)} models, and this request names none"
        known = ", ".join(sorted(names)[:MAX_MODELS]) + (", ..." if len(names) > MAX_MODELS else "")
        hint = f'add "model": NAME, or run with --model openai:URL#NAME (known: {known})'
        yield FieldProblem("missing-field", (), message, hint)
    prompt = request.prompt
    if isinstance(prompt, list) and any(isinstance(part, PromptSegment) for part in prompt):
        message = "`prompt` has segments, which a server cannot be told"
        yield FieldProblem("unsupported-model", ("prompt",), message, "give a text, or token ids")
    if request.session is not None and isinstance(prompt, list):
        message = "`prompt` is token ids, and a session with a server goes on from texts"
        yield FieldProblem("unsupported-model", ("prompt",), message, "give a text")
    for name in sorted(OF_STREAMS & {name for name, value in extra.items() if value is not None}):
        message = f"`extra_body.{name}` is set by batchdecode: each output is a stream of its own"
        path = ("extra_body", name)
        yield FieldProblem("conflicting-fields", path, message, "leave it out", is_key=True)
    stops = request.stop_sequence
    if isinstance(stops, list) and not all(isinstance(stop, str) for stop in stops):
        message = "`stop_sequence` has token ids, which a server cannot be told"
        yield FieldProblem("unsupported-model", ("stop_sequence",), message, "give texts")


def _texts_of(request: Request) -> Iterator[tuple[Path, str]]:
    """Yield the texts that are to be encoded, each with its path."""
    for name in ("prompt", "negative_prompt"):
        prompt = getattr(request, name)
        if isinstance(prompt, str):
            yield (name,), prompt
        elif isinstance(prompt, list):
            for index, segment in enumerate(prompt):
                if isinstance(segment, PromptSegment) and segment.text is not None:
                    yield (name, index, "text"), segment.text


def _find_uncompiled(request: Request, capabilities: ModelCapabilities) -> Iterator[FieldProblem]:
    for field in constraint_fields_of(request):
        yield from find_uncompiled(field, getattr(request, field), capabilities)


def find_uncompiled(
    name: ConstraintField, constraint: object, capabilities: ModelCapabilities
) -> Iterator[FieldProblem]:
    """Yield why a constraint, whose value is valid by itself, cannot be compiled."""
    if not capabilities.has_eos:
        message = f"`{name}` needs a model that has an end-of-sequence token; this one has none"
        yield FieldProblem("unsupported-model", (name,), message)
    elif capabilities.check_constraint is not None:
        try:
            capabilities.check_constraint(name, constraint)
        except GrammarError as error:
            problem = FieldProblem("invalid-grammar", error.path, "")
            yield replace(problem, message=f"`{problem.field}`: {error}")
        except BatchdecodeError as error:
            yield FieldProblem("unsupported-model", (name,), f"`{name}`: {error}")
