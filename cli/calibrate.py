"""`batchdecode calibrate`: from a log of steps or requests to a YAML file with a profile."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path

import msgspec
import yaml
from msgspec.structs import asdict, replace

from batcher.errors import BatchdecodeError
from batcher.planning.replay import MAX_TRIES, fit_requests
from batcher.planning.request_log import MARK, RequestsOfRun, read_requests
from batcher.timing.calibration import fit_steps
from batcher.timing.carrying import load_profile
from batcher.timing.hardware import load_gpu
from batcher.timing.model_shape import load_model_shape
from batcher.timing.physics import check_physics
from batcher.timing.profiles import MORE_TERMS, Profile, is_file
from batcher.timing.step_log import StepLog, read_step_log, read_traced_steps
from batcher.timing.term_search import roofline_profile

from .commands.calibrate import CalibrateOptions
from .printing import output_sink
from .run.files import check_replaceable
from .run.intake import numbered, open_input
from .run.problems import say
from .screen.cells import counted, printable
from .simulation.run_limits import (
    RunLimits,
    limits_of_run,
    limits_table,
    read_meta_file,
    warn_of_guesses,
)

OPEN_IN_REQUESTS = "requests tell of sums of steps: other terms may fit as well; steps tell more"
FAR_OFF = 0.1  # a mean, or the makespan, as a share of the real one
NO_FIT = (
    "the limits above may not be those of the run (see --meta and the options of scheduling); "
    "or try another --start, or more --tries"
)
_ROOFLINE = "roofline:"
_DEFAULT_NAME = "calibrated"
RUN = b'"event":"run"'  # in the first line of a trace
REMOTE = b'"layout":"remote"'  # and in that of a server, whose steps nobody knows

Lines = Iterable[tuple[int, bytes]]
ReadSteps = Callable[[Lines, str], StepLog]
Fit = Callable[[CalibrateOptions, Lines, str], tuple[Profile, str]]


def write_profile(options: CalibrateOptions) -> None:
    """Carry out `batchdecode calibrate`.

    Raises:
        BatchdecodeError: the log cannot be used, or an option cannot be.
        WriteError: the profile cannot be written.
    """
    _check(options)
    with open_input(options.input, nullcontext) as source:
        lines = numbered(source.lines())
        head = list(islice(lines, 1))
        fit: Fit = partial(_fit_steps, read_step_log)
        is_of_requests = options.requests or REMOTE in (head[0][1] if head else b"")
        if is_of_requests or (head and MARK in head[0][1]):
            fit = _fit_requests
        elif head and RUN in head[0][1]:
            fit = partial(_fit_steps, read_traced_steps)
        profile, summary = fit(options, chain(head, lines), source.name)
        say(source.take_notes() + summary)
    nothing = dict.fromkeys((*MORE_TERMS, "least"), 0.0) | {"pipeline_parallel": 1}
    stated = {
        name: value
        for name, value in asdict(profile).items()
        if value not in (None, (), nothing.get(name))
    }
    name, stem = options.name, Path(options.input or "-").name.partition(".")[0]
    if name is None:
        name = _DEFAULT_NAME if stem in ("", "-") else stem
    text = yaml.safe_dump({name: stated}, sort_keys=False, allow_unicode=True, width=100)
    with output_sink(options.output) as sink:
        sink.write(text.encode())


def _fit_steps(
    read: ReadSteps, options: CalibrateOptions, lines: Lines, name: str
) -> tuple[Profile, str]:
    """Return the profile that fits the steps that are read, and what is said of it.

    Raises:
        BatchdecodeError: the log cannot be used, or an option is for logs of requests.
    """
    if options.given_for_requests:
        given = ", ".join(f"--{field.replace('_', '-')}" for field in options.given_for_requests)
        raise BatchdecodeError(f"{name} is a log of steps; for a log of requests only: {given}")
    log = read(lines, name)
    experts = None if options.model is None else load_model_shape(options.model).experts
    fit = fit_steps(log, name, experts)
    count = counted(log.num_steps, "step")
    num_experts, per_token = (fit.terms.get("x") and experts) or (None, None)
    profile = msgspec.convert(
        {
            **fit.terms,
            "num_experts": num_experts,
            "num_experts_per_tok": per_token,
            "hardware": options.hardware,
            "model": options.model,
            "tensor_parallel": options.tensor_parallel or 1,
            "error": fit.errors.describe(),
            "source": f"fitted to {count} of {Path(name).name}",
        },
        Profile,
    )
    errors = [("error", fit.errors.describe())]
    errors += [("", kind.describe()) for kind in fit.errors.by_kind]
    notes = [("warning", note) for note in fit.notes]
    return profile, _summary(f"{printable(name)}: {count}", profile, errors, notes)


def _fit_requests(options: CalibrateOptions, lines: Lines, name: str) -> tuple[Profile, str]:
    """Return the profile that fits a log of requests, and what is said of it.

    Raises:
        BatchdecodeError: the log cannot be used, or there is no profile to start from.
    """
    run = read_requests(lines, name)
    log, start, limits = run.requests, _start(options), _limits(options, run)
    warn_of_guesses(limits)
    tries, holdout = options.tries or MAX_TRIES, options.holdout or 0.0
    fit = fit_requests(log, limits.batch, limits.settings, start, tries, holdout)
    fitted_to = counted(fit.num_fitted, "request")
    profile = replace(
        start,
        **fit.profile.terms,
        by_tokens=(),
        kv_tokens=None,
        error="; ".join(fit.describe()),
        source=f"fitted to the times of {fitted_to} of {Path(name).name}",
    )
    count = f"{counted(len(log), 'request')}, {counted(fit.num_tries, 'simulation')}"
    errors = [*zip(chain(["limits"], repeat("")), limits_table(limits), strict=False)]
    errors += zip(("error", "held out"), fit.describe(), strict=False)
    notes = [("open", OPEN_IN_REQUESTS)]
    if fit.largest_error > FAR_OFF:
        notes.insert(0, ("warning", f"no fit within {FAR_OFF * 100:.0f} %: {NO_FIT}"))
    if start.by_tokens:
        left_out = f"by_tokens of {printable(options.start or '')}: terms are fitted"
        notes.append(("left out", left_out))
    return profile, _summary(f"{printable(name)}: {count}", profile, errors, notes)


def _start(options: CalibrateOptions) -> Profile:
    """Return the profile that a search begins with; it names the hardware and the model.

    Raises:
        BatchdecodeError: none is named, nor what a roofline can be made of.
    """
    if options.start is not None:
        if options.start.startswith(_ROOFLINE):
            raise BatchdecodeError(
                f"--start {options.start}: a search begins with the terms of a profile; to "
                f"begin with a roofline leave out --start: {_as_options(options.start)}"
            )
        start = load_profile(options.start)[1]
        return replace(
            start,
            hardware=options.hardware or start.hardware,
            model=options.model or start.model,
            tensor_parallel=options.tensor_parallel or start.tensor_parallel,
        )
    if (options.hardware is None) != (options.model is None):
        given, missing = ("--hardware", "--model")[:: 1 if options.model is None else -1]
        raise BatchdecodeError(
            f"{given} alone makes no roofline to begin with: add {missing}, or give --start PROFILE"
        )
    if options.hardware is None or options.model is None:
        raise BatchdecodeError(
            "the times of requests are fitted by a search: name the profile it begins with "
            "(--start PROFILE), or --hardware and --model for a roofline"
        )
    shape, gpu = load_model_shape(options.model), load_gpu(options.hardware)
    start = roofline_profile(shape, gpu, options.tensor_parallel or 1)
    return replace(start, hardware=options.hardware, model=options.model)


def _as_options(roofline: str) -> str:
    """Return the options that name what `roofline` does."""
    model, _, gpu = roofline.removeprefix(_ROOFLINE).partition(":")
    gpu, colon, size = gpu.partition(":")
    parallel = f" --tensor-parallel {size}" if colon else ""
    return f"--hardware {gpu or 'GPU'} --model {model or 'MODEL'}{parallel}"


def _limits(options: CalibrateOptions, run: RequestsOfRun) -> RunLimits:
    """Return how the run of the log was limited: by options, the file beside it, or guesses.

    Raises:
        BatchdecodeError: the file cannot be used, or an option has no effect.
    """
    meta = read_meta_file(options.meta, options.input)
    measured_on = options.start or ""
    if options.hardware is not None and options.model is not None:
        num_gpus = options.tensor_parallel or 1
        measured_on = f"{_ROOFLINE}{options.model}:{options.hardware}:{num_gpus}"
    return limits_of_run(options.batch, options.scheduling, measured_on, meta, run)


def _check(options: CalibrateOptions) -> None:
    """Make sure, before the log is read, that the options can be used; or raise."""
    if options.hardware is not None:
        load_gpu(options.hardware)
    if options.model is not None:
        load_model_shape(options.model)
    if options.output is not None and not is_file(options.output):
        raise BatchdecodeError(f"--output {options.output}: profiles are in .yaml or .yml files")
    if options.output is not None and not options.force:
        check_replaceable("--output", options.output)


def _summary(
    title: str, profile: Profile, errors: list[tuple[str, str]], notes: list[tuple[str, str]]
) -> str:
    """Return what a person should know of a fit: how good it is, and what else is to be said."""
    physics, _ = check_physics(profile)
    terms = "  ".join(f"{term} {value:g}" for term, value in profile.terms.items())
    shown = [("terms", f"{terms}  (ms)"), *errors, ("physics", str(physics)), *notes]
    lines = [title, *(f"  {name:<10}{text}" for name, text in shown)]
    return "".join(f"{line}\n" for line in lines)
