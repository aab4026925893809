"""What `compare` and `plan` share: from requests to a workload, and how they stop."""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext

from batcher.engine import Engine
from batcher.errors import BatchdecodeError
from batcher.garbage import look_seldom
from batcher.metrics.slo import Slo, class_name
from batcher.planning.deployments import Deployment
from batcher.planning.drafting import check_drafts
from batcher.planning.fleets import check_fleets, check_router, engines_of
from batcher.planning.lengths import decoded_outputs, num_unknown
from batcher.planning.prices import Price, price_of, read_prices
from batcher.planning.streamed import PREFIX as STREAMED
from batcher.planning.streamed import AnyWorkload, parse_streamed
from batcher.planning.workload import workload_of
from batcher.scheduling.checks import check_effects

from ..commands.compare import CompareOptions
from ..commands.plan import PlanOptions
from ..models import capabilities_of, load
from ..notes import say_of_memory, say_of_slo
from ..run.intake import open_input
from ..run.problems import say
from ..run.reading import read_requests
from ..run.stdout import user_code_prints_to_stderr
from ..screen.terminal import counted
from ..signals import Interrupted, StopSignals, die_of_closed_pipe


def until_stopped(command: Callable[[], int]) -> int:
    """Return the exit status of `command`, or that of a signal, which ends it at once."""
    look_seldom()
    with user_code_prints_to_stderr(), StopSignals() as stop:
        try:
            with stop.waiting():
                return command()
        except (Interrupted, KeyboardInterrupt):
            return stop.exit_status
        except BrokenPipeError:
            die_of_closed_pipe()


def read_workload(options: CompareOptions | PlanOptions) -> AnyWorkload:
    """Return the workload of the requests, or the synthetic one that INPUT names.

    What only the model knows of requests is found by decoding.

    Raises:
        BatchdecodeError: the input has bad lines, which have been reported, or cannot be read, or
            its requests cannot be simulated.
    """
    if options.input is not None and options.input.startswith(STREAMED):
        return parse_streamed(options.input)
    model = load(options, is_shown=not options.quiet)
    with open_input(options.input, nullcontext) as source:
        engine = Engine(model, 256, grammar_timeout=options.grammar_timeout)
        what_now = "nothing was simulated."
        capabilities = capabilities_of(engine, options)
        requests = read_requests(source, capabilities, options.color, what_now)
        if not requests:
            raise BatchdecodeError(f"{source.name} has no requests")
    num_empty = sum(request.max_tokens == 0 for request in requests)
    if num_empty and not options.quiet:
        of_all = f"{counted(num_empty, 'request')} of {len(requests):,}"
        say(f"left out, having no times: {of_all} with max_tokens 0\n")
    num_decoded = num_unknown(requests)
    if not num_decoded:
        return workload_of(requests, model)
    if not options.quiet:
        say(
            f"{counted(num_decoded, 'request')} of {len(requests):,} may end before max_tokens: "
            "all are decoded once to learn when\n"
        )
    return workload_of(requests, model, decoded_outputs(requests, model))


def check_given(given: Collection[str], deployments: Sequence[Deployment]) -> None:
    """Make sure that all settings that were `given`, or stand in a file, have an effect.

    Raises:
        BatchdecodeError: one has not; the message says without what.
    """
    check_fleets(given, deployments)
    engines = engines_of(deployments)
    fleets = [deployment.fleet for deployment in deployments if deployment.fleet is not None]
    stated = {name for fleet in fleets for group in fleet.groups for name in group.settings}
    check_effects(given, [engine.scheduling for engine in engines])
    check_drafts({*given, *stated}, engines)
    check_router(given, deployments)


def say_of_engines(deployments: Sequence[Deployment], slo_texts: Sequence[str]) -> None:
    """Say what their memory has room for, and that an SLO in seconds wants steps of a profile."""
    engines = engines_of(deployments)
    say_of_memory((each.profile, each.scheduling) for each in engines)
    if not slo_texts:
        return
    if any(each.profile == Deployment().profile for each in engines):
        say("each step takes 1 second: --profile says how long steps take\n")
    else:
        say_of_slo(slo_texts)


def check_classes(slo: Slo | None, workload: AnyWorkload) -> None:
    """Make sure that there are requests of each class of an SLO.

    Raises:
        BatchdecodeError: there are none of one.
    """
    for priority in () if slo is None else slo.classes:
        if priority not in workload.priorities:
            name, known = class_name(priority), ", ".join(map(str, sorted(workload.priorities)))
            raise BatchdecodeError(f"--slo {name}: no request has this priority; there is {known}")


def priced(path: str | None, deployments: Iterable[Deployment]) -> dict[str, Price] | None:
    """Return the prices of a file, which has those of the GPUs of all `deployments`.

    Raises:
        BatchdecodeError: it is no such file, or has no price of one of them.
    """
    if path is None:
        return None
    prices = read_prices(path)
    for profile in {engine.profile: None for engine in engines_of(deployments)}:
        price_of(profile, prices)
    return prices


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
