"""The options of `compare` and `plan` that say what a deployment is, each read as a text.

Rule: they have the names of batcher.whatif.deployments.AXES, which reads them; `compare` takes a
list of values where `plan` takes one.
"""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from ..scheduling_options import SCHEDULING, TIME
from .arguments import DECODING

# Name -> what stands for a value, help, title.
AXIS_OPTIONS = {
    "batch": ("N", "Slots of the batch.  [default: 8]", DECODING),
    "policy": (
        "NAME",
        "fcfs, priority, sjf, ljf, deadline, lpm or module:function.  [default: fcfs]",
        SCHEDULING,
    ),
    "aging": ("SECONDS", "Who has waited so long goes first.  [default: 300]", SCHEDULING),
    "preempt_for": (
        "WHAT",
        "priority, deadline or none: what lets one that waits displace another.  [default: none]",
        SCHEDULING,
    ),
    "batching": ("KIND", "continuous or static.  [default: continuous]", SCHEDULING),
    "max_batch_tokens": (
        "N",
        "Tokens a step computes at most, or none.  [default: none]",
        SCHEDULING,
    ),
    "long_prefill_threshold": (
        "N",
        "Prompt tokens of one request a step computes at most, or none.  [default: none]",
        SCHEDULING,
    ),
    "prefill_order": (
        "ORDER",
        "decode-first or prefill-first.  [default: decode-first]",
        SCHEDULING,
    ),
    "kv_blocks": ("N", "Blocks of KV memory, or none for no limit.  [default: none]", SCHEDULING),
    "block_size": ("N", "Tokens of a block.  [default: 16]", SCHEDULING),
    "prefix_cache": (
        "WHEN",
        "on, off, or auto: on with --kv-blocks.  [default: auto]",
        SCHEDULING,
    ),
    "capacity": (
        "KIND",
        "watermark, on-demand or no-evict.  [default: watermark]",
        SCHEDULING,
    ),
    "watermark": (
        "SHARE",
        "Of all blocks, what --capacity watermark keeps free.  [default: 0]",
        SCHEDULING,
    ),
    "profile": (
        "NAME",
        "A profile, FILE.yaml, constant:SECONDS or roofline:MODEL:GPU.  [default: constant:1]",
        TIME,
    ),
}


def takes_axes(command: Callable[..., None], *, as_lists: bool) -> Callable[..., None]:
    """Return `command` with these options where it has the parameter `axes`.

    It is handed those that were given, name -> text.  as_lists: whether help shows lists.
    """

    def with_options(**arguments: Any) -> None:
        axes = {name: arguments.pop(name) for name in AXIS_OPTIONS}
        given = {name: text for name, text in axes.items() if text is not None}
        command(**arguments, axes=given)

    own = signature(command)
    parameters: list[Parameter] = []
    for parameter in own.parameters.values():
        parameters += _parameters(as_lists) if parameter.name == "axes" else [parameter]
    with_options.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    with_options.__doc__ = command.__doc__
    with_options.__name__ = command.__name__
    return with_options


def _parameters(as_lists: bool) -> list[Parameter]:  # noqa: FBT001 - takes_axes names it
    """Return a parameter for each of the options, as typer reads them."""
    parameters = []
    for name, (value, text, title) in AXIS_OPTIONS.items():
        names = [f"--{name.replace('_', '-')}", *(["-b"] if name == "batch" else [])]
        option = typer.Option(
            *names,
            metavar=f"{value},..." if as_lists else value,
            help=text,
            rich_help_panel=title,
        )
        kind = Annotated[str | None, option]
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind))
    return parameters
