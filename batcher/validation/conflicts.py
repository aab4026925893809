"""Fields that are right by themselves and contradict each other."""

from collections.abc import Callable, Iterator

from msgspec import Struct

from batcher.errors import FieldProblem
from batcher.request import Request
from batcher.validation.states import find_doubled_markers, find_unreachable
from batcher.validation.stops import check_total_length
from batcher.validation.target import constraint_fields_of
from batcher.validation.values import DEFAULTS

ALL_TOKENS = (0, -1)  # values of top_k that cut nothing


class Conflict(Struct, frozen=True):
    """A problem of one field, and the other field that it depends on, if there is one."""

    problem: FieldProblem
    other: str | None = None


Conflicts = Iterator[Conflict]


def find_conflicts(request: Request) -> Conflicts:
    """Yield the contradictions in `request`, each field of which is valid by itself."""
    for rule in _RULES:
        yield from rule(request)


def _make(name: str, other: str, message: str) -> Conflict:
    return Conflict(FieldProblem("conflicting-fields", (name,), message), other)


def _useless(name: str, other: str, remedy: str) -> Conflict:
    return _make(name, other, f"`{name}` has no effect without `{other}`; {remedy}")


def _check_beams(request: Request) -> Conflicts:
    if request.num_beams == 1:
        if request.length_penalty != 1:
            yield _useless("length_penalty", "num_beams", "give 2 beams or more")
        if request.early_stopping is not False:
            yield _useless("early_stopping", "num_beams", "give 2 beams or more")
        return
    given = {
        "temperature": request.temperature != 0,
        "mirostat": request.mirostat != 0,
        "best_of": request.best_of is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        message = f"`{name}` cannot go with `num_beams` {request.num_beams}: beams are not sampled"
        yield _make(name, "num_beams", message)
    if request.cfg_scale != 1:
        message = "`cfg_scale` cannot go with beams: a beam has no negative prompt beside it"
        yield _make("cfg_scale", "num_beams", message)
    if request.logprobs is not None:
        message = "`logprobs` cannot go with beams, which are told by the `score` of the whole"
        yield _make("logprobs", "num_beams", message)
    if request.n > request.num_beams:
        message = f"`n` is {request.n}, but {request.num_beams} beams give no more outputs"
        yield _make("n", "num_beams", message)


def _check_greedy(request: Request) -> Conflicts:
    if request.temperature != 0 or request.num_beams > 1:
        return
    for name, count in (("n", request.n), ("best_of", request.best_of)):
        if count is not None and count > 1:
            message = f"`{name}` is {count}, but with `temperature` 0 all outputs are the same"
            yield _make(name, "temperature", message)
    if request.mirostat:
        yield _make("mirostat", "temperature", "`mirostat` needs a `temperature` above 0")


def _check_best_of(request: Request) -> Conflicts:
    if request.best_of is not None and request.best_of < request.n:
        message = f"`best_of` is {request.best_of}, less than the {request.n} outputs of `n`"
        yield _make("best_of", "n", message)


def _check_mirostat(request: Request) -> Conflicts:
    if not request.mirostat:
        for name in ("mirostat_tau", "mirostat_eta"):
            if getattr(request, name) != DEFAULTS[name]:
                yield _useless(name, "mirostat", "give version 1 or 2")
        return
    cuts = {
        "top_k": request.top_k not in ALL_TOKENS,
        "top_p": request.top_p != 1,
        "min_p": request.min_p != 0,
        "typical_p": request.typical_p != 1,
    }
    for name in (name for name, is_given in cuts.items() if is_given):
        message = f"`{name}` cannot go with `mirostat`, which decides itself what to cut off"
        yield _make(name, "mirostat", message)


def _check_lengths(request: Request) -> Conflicts:
    if request.min_tokens > request.max_tokens:
        message = (
            f"`min_tokens` is {request.min_tokens}, more than `max_tokens`, {request.max_tokens}"
        )
        yield _make("min_tokens", "max_tokens", message)


def _check_negative_prompt(request: Request) -> Conflicts:
    if request.negative_prompt is not None and request.cfg_scale == 1:
        yield _useless("negative_prompt", "cfg_scale", "give one other than 1")


def _check_logprobs_mode(request: Request) -> Conflicts:
    if request.logprobs_mode != "raw" and request.logprobs is None:
        yield _useless("logprobs_mode", "logprobs", "give 0 or more")


def _check_constraints(request: Request) -> Conflicts:
    given = constraint_fields_of(request)
    if not given:
        return
    first, *others = given
    for name in others:
        yield _make(name, first, f"`{name}` and `{first}` are two constraints; give one of them")
    if request.ignore_eos:
        message = f"`ignore_eos` cannot go with `{first}`: EOS ends an output that is whole"
        yield _make("ignore_eos", first, message)
    if request.heal:
        message = f"`heal` cannot go with `{first}`, which says how the output begins"
        yield _make("heal", first, message)


def _check_heal(request: Request) -> Conflicts:
    if request.heal and not request.prompt:
        yield _make("heal", "prompt", "`heal` needs a prompt with at least one token")
    if request.heal and request.bad_words:
        message = "`bad_words` cannot go with `heal`, which writes the end of the prompt anew"
        yield _make("bad_words", "heal", message)


def _check_states(request: Request) -> Conflicts:
    states = request.states
    if states is None:
        if request.initial_state is not None:
            yield _useless("initial_state", "states", "declare some")
        return
    found = [*find_doubled_markers(states), *find_unreachable(request, states)]
    for problem in found:
        yield Conflict(problem, "initial_state" if problem.path[0] == "states" else "states")


def _check_stop_in_output(request: Request) -> Conflicts:
    if request.include_stop_str_in_output and request.states is not None:
        message = (
            "`include_stop_str_in_output` cannot go with `states`, whose markers belong to none"
        )
        yield _make("include_stop_str_in_output", "states", message)


def _check_prompt_logprobs(request: Request) -> Conflicts:
    if request.prompt_logprobs is None:
        return
    if request.heal:
        message = "`prompt_logprobs` cannot go with `heal`, which writes the end of the prompt anew"
        yield _make("prompt_logprobs", "heal", message)
    if request.session is not None:
        message = (
            "`prompt_logprobs` cannot go with `session`: what goes before its prompt was generated"
        )
        yield _make("prompt_logprobs", "session", message)


def _check_sessions(request: Request) -> Conflicts:
    if request.session is None:
        if request.think_time != 0:
            yield _useless("think_time", "session", "name one")
        return
    given = {
        "n": request.n > 1,
        "best_of": request.best_of is not None,
        "num_beams": request.num_beams > 1,
        "cfg_scale": request.cfg_scale != 1,
    }
    for name in (name for name, is_given in given.items() if is_given):
        message = f"`{name}` cannot go with `session`, which goes on from one output"
        yield _make(name, "session", message)
    if request.heal:
        message = (
            "`heal` cannot go with `session`: what goes before its prompt is generated already"
        )
        yield _make("heal", "session", message)


def _check_deadline(request: Request) -> Conflicts:
    if request.deadline is not None and request.deadline < request.arrival_time:
        message = (
            f"`deadline` is {request.deadline:g}, before `arrival_time`, {request.arrival_time:g}"
        )
        yield _make("deadline", "arrival_time", message)


def _check_stop_lengths(request: Request) -> Conflicts:
    for problem in check_total_length(request):
        yield Conflict(problem)


_RULES: tuple[Callable[[Request], Conflicts], ...] = (
    _check_beams,
    _check_greedy,
    _check_best_of,
    _check_mirostat,
    _check_lengths,
    _check_negative_prompt,
    _check_logprobs_mode,
    _check_constraints,
    _check_heal,
    _check_states,
    _check_stop_in_output,
    _check_prompt_logprobs,
    _check_sessions,
    _check_deadline,
    _check_stop_lengths,
)
