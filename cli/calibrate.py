"""`batchdecode calibrate`: from a log of steps to a YAML file with a profile."""

from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path

import msgspec
import yaml
from msgspec.structs import asdict

from batcher.errors import BatchdecodeError
from batcher.planning.request_log import MARK
from batcher.timing.calibration import fit_steps, read_step_log, read_traced_steps
from batcher.timing.profiles import MORE_TERMS, Profile, check_physics, is_profile_file
from batcher.timing.roofline import load_gpu, load_model_shape

from .printing import output_sink
from .run.files import check_replaceable
from .run.intake import numbered, open_input
from .run.problems import say
from .screen.terminal import counted, printable

_DEFAULT_NAME = "calibrated"
_TRACE = b'"event":"run"'  # in the first line of a trace
_REMOTE = b'"layout":"remote"'  # and in that of a server, whose steps nobody knows
_UNSTATED = dict.fromkeys((*MORE_TERMS, "least"), 0.0) | {"pipeline_parallel": 1}


def write_profile(
    log: str | None,
    *,
    name: str | None = None,
    hardware: str | None = None,
    model: str | None = None,
    tensor_parallel: int | None = None,
    output: str | None = None,
    force: bool = False,
) -> None:
    """Carry out `batchdecode calibrate`.

    Raises:
        BatchdecodeError: the log cannot be used, or an option cannot be.
        WriteError: the profile cannot be written.
    """
    if hardware is not None:
        load_gpu(hardware)
    experts = None if model is None else load_model_shape(model).experts
    if output is not None and not is_profile_file(output):
        raise BatchdecodeError(f"--output {output}: profiles are in .yaml or .yml files")
    if output is not None and not force:
        check_replaceable("--output", output)
    with open_input(log, nullcontext) as source:
        lines = numbered(source.lines())
        head = list(islice(lines, 1))
        first = head[0][1] if head else b""
        if MARK in first or _REMOTE in first:
            raise BatchdecodeError(
                f"{source.name} has the times of requests; a profile is fitted to the times of "
                "steps: a log of them, or a trace of run --profile wall"
            )
        read = read_traced_steps if _TRACE in first else read_step_log
        steps = read(chain(head, lines), source.name)
        fit = fit_steps(steps, source.name, experts)
        notes = source.take_notes()
    count = counted(steps.num_steps, "step")
    num_experts, per_token = (fit.terms.get("x") and experts) or (None, None)
    profile = msgspec.convert(
        {
            **fit.terms,
            "num_experts": num_experts,
            "num_experts_per_tok": per_token,
            "hardware": hardware,
            "model": model,
            "tensor_parallel": tensor_parallel or 1,
            "error": fit.errors.describe(),
            "source": f"fitted to {count} of {Path(source.name).name}",
        },
        Profile,
    )
    terms = "  ".join(f"{term} {value:g}" for term, value in profile.terms.items())
    shown = [
        ("terms", f"{terms}  (ms)"),
        ("error", fit.errors.describe()),
        *(("", kind.describe()) for kind in fit.errors.by_kind),
        ("physics", str(check_physics(profile)[0])),
        *(("warning", note) for note in fit.notes),
    ]
    summary = [f"{printable(source.name)}: {count}", *(f"  {key:<10}{text}" for key, text in shown)]
    say(notes + "".join(f"{line}\n" for line in summary))
    stated = {
        field: value
        for field, value in asdict(profile).items()
        if value not in (None, (), _UNSTATED.get(field))
    }
    if name is None:
        stem = Path(log or "-").name.partition(".")[0]
        name = _DEFAULT_NAME if stem in ("", "-") else stem
    text = yaml.safe_dump({name: stated}, sort_keys=False, allow_unicode=True, width=100)
    with output_sink(output) as sink:
        sink.write(text.encode())
