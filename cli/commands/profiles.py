"""`batchdecode profiles` and `calibrate`: list, check and fit profiles of step times."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Struct
from msgspec.structs import asdict

from batcher.errors import BatchdecodeError
from batcher.settings import DEFAULT_BLOCK_SIZE
from batcher.timing.calibration import fit_steps, read_step_log, read_traced_steps
from batcher.timing.profiles import (
    MORE_TERMS,
    Physics,
    Prediction,
    Profile,
    check_physics,
    is_profile_file,
    load_gpu,
    load_model_shape,
    load_profile,
    num_kv_tokens,
    parts_of,
    predictions_of,
    read_profiles,
    setup_of_profile,
    shipped_profiles,
    split_overhead,
    step_time_of,
    usable_blocks,
)

from ..command import OUTPUT, argument, command, flag, option
from ..options import force_flag, output_option
from ..run.files import check_replaceable, output_sink, print_json, print_text
from ..run.input import open_input
from ..run.problems import say
from ..screen.terminal import (
    aligned,
    aligned_within,
    cell_width,
    columns_of,
    counted,
    printable,
    wrapped,
)

PROFILE = "Profile"
_TO_UNITS = {"t0": 1.0, "w": 1.0, "f": 1e3, "g": 1e3, "d": 1e6, "h": 1e6, "e": 1e6}
_HEADS = ("profile", "t0 ms", "w ms", "f µs", "g µs", "d ns", "h ns", "e ns", "KV tokens")
_POINTS_IN_A_LINE = 4
_NO_TERMS = ("by_tokens", "num_experts", "num_experts_per_tok", "pipeline_parallel")

MEASURED = "* per token beyond by_tokens; `batchdecode profiles NAME` shows by_tokens"
EXPERTS = "+ for all experts; a step reads those that its tokens hit"
ESTIMATED = "~ estimated: 90% of the memory on the data sheet, less the weights"


class StepTimeReport(Struct, frozen=True, kw_only=True):
    """A step time as `profiles --json` prints it; kv_tokens: reported by an engine."""

    name: str
    settings: dict[str, Any]
    hardware: str | None = None
    model: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    kv_tokens: int | None = None
    kv_tokens_that_fit: int | None = None
    kv_blocks: int | None = None
    error: str | None = None
    source: str | None = None
    physics: Physics | None = None
    predictions: list[Prediction]


def profiles(
    name: Annotated[
        str | None,
        argument("One profile, as for --profile, or a file of profiles.", "NAME", "profile_name"),
    ] = None,
    *,
    json: Annotated[bool, flag(OUTPUT, "Print profiles as JSON.")] = False,
) -> None:
    """List profiles of step times, and check them against their hardware."""
    reports = reports_of(name)
    if json:
        print_json(reports)
    else:
        width = columns_of(1)
        is_one = name is not None and len(reports) == 1
        print_text(details_of(reports[0], width) if is_one else table_of(reports, width))


def reports_of(name: str | None) -> list[StepTimeReport]:
    """Return the report of a profile, those of a file, or (None) those of all shipped profiles."""
    if name is None:
        return [_report_of_profile(*named) for named in shipped_profiles().items()]
    if name.startswith("roofline:"):
        kernels, overhead = split_overhead(name)
        shape, gpu, *stages = parts_of(kernels.partition(":")[2])
        step_time, num_tokens = step_time_of(name), num_kv_tokens(shape, gpu, *stages)
        return [
            StepTimeReport(
                name=name,
                settings=step_time.settings,
                tensor_parallel=stages[0],
                pipeline_parallel=stages[1],
                kv_tokens_that_fit=num_tokens,
                kv_blocks=usable_blocks(num_tokens // DEFAULT_BLOCK_SIZE),
                error="a bound, not an estimate: real engines take longer",
                source=f"{gpu.source}; the engine: {overhead.source}" if overhead else gpu.source,
                predictions=predictions_of(step_time),
            )
        ]
    if name.partition(":")[0] == "constant":
        step_time = step_time_of(name)
        predictions = predictions_of(step_time)
        return [StepTimeReport(name=name, settings=step_time.settings, predictions=predictions)]
    if is_profile_file(name) and split_overhead(name)[1] is None:
        return [_report_of_profile(*named) for named in read_profiles(name).items()]
    return [_report_of_profile(*load_profile(name))]


def _report_of_profile(name: str, profile: Profile) -> StepTimeReport:
    physics, predictions = check_physics(profile)
    stated = asdict(profile)
    fit = setup_of_profile(profile).num_tokens_that_fit
    num_tokens = profile.kv_tokens or fit
    return StepTimeReport(
        name=name,
        settings=profile.step_time(name).settings,
        kv_tokens_that_fit=fit,
        kv_blocks=None if num_tokens is None else usable_blocks(num_tokens // DEFAULT_BLOCK_SIZE),
        physics=physics,
        predictions=predictions,
        **{field: stated[field] for field in StepTimeReport.__struct_fields__ if field in stated},
    )


def table_of(reports: Sequence[StepTimeReport], width: int | None = None) -> str:
    """Return profiles as tables: terms, then errors, then sources; width: of the terminal."""
    terms = [_HEADS, *(_terms_row(report) for report in reports)]
    sources = list(dict.fromkeys(report.source for report in reports))
    notes: list[tuple[str, ...]] = [("profile", "physics", "source", "error")]
    for report in reports:
        physics = report.physics
        notes.append(
            (
                printable(report.name),
                physics.verdict if physics else "",
                f"[{sources.index(report.source) + 1}]",
                printable(report.error or ""),
            )
        )
    listed = [f"[{number}] {printable(source or '')}" for number, source in enumerate(sources, 1)]
    beaten = [
        f"{printable(report.name)} is faster than its hardware: {report.physics.reason}"
        for report in reports
        if report.physics and report.physics.verdict == "too fast"
    ]
    rooms = [row[-1] for row in terms]
    footnotes = [
        *[MEASURED] * any("by_tokens" in report.settings for report in reports),
        *[EXPERTS] * any("x" in report.settings for report in reports),
        *[ESTIMATED] * any(room.startswith("~") for room in rooms),
    ]
    tables = aligned(terms, range(1, len(_HEADS))), aligned(notes, ())
    if width is not None and max(map(cell_width, tables[0])) > width:
        terms = [_HEADS[:-1], *(_terms_row(report, num_digits=3)[:-1] for report in reports)]
        notes = [(name, room, *rest) for room, (name, *rest) in zip(rooms, notes, strict=True)]
        tables = aligned(terms, range(1, len(_HEADS))), aligned_within(notes, (1,), width)

    def lines(texts: Sequence[str]) -> list[str]:
        return [line for text in texts for line in (wrapped(text, width) if width else [text])]

    blocks = [[*tables[0], *lines(footnotes)], tables[1], lines(listed), lines(beaten)]
    return "\n".join("".join(f"{line}\n" for line in block) for block in blocks if block)


def details_of(report: StepTimeReport, width: int | None = None) -> str:
    """Return all that is known about one step time, and its predictions; width: as above."""
    settings = report.settings
    terms = {name: value for name, value in settings.items() if name not in _NO_TERMS}
    rows: list[tuple[str, str | None]] = []
    if all(isinstance(value, int | float) for value in terms.values()):
        shown = [f"{name} {value:g}" for name, value in terms.items()]
        rows.append(("terms", "  ".join([*shown, "(s)" if "seconds" in terms else "(ms)"])))
    points = [f"{tokens:,}: {ms:g}" for tokens, ms in settings.get("by_tokens", ())]
    for first in range(0, len(points), _POINTS_IN_A_LINE):
        line = "  ".join(points[first : first + _POINTS_IN_A_LINE])
        rows.append(("" if first else "by_tokens", line))
    if "num_experts" in settings:
        text = "{num_experts} per layer, {num_experts_per_tok} of them per token"
        rows.append(("experts", text.format_map(settings)))
    if report.hardware is not None:
        stages = report.pipeline_parallel or 1
        text = f"{(report.tensor_parallel or 1) * stages} x {report.hardware}"
        text += f" in {stages} stages" if stages > 1 else ""
        rows.append(("hardware", text + (f", {report.model}" if report.model else "")))
    room = []
    if report.kv_tokens is not None:
        room.append(f"{report.kv_tokens:,} tokens reported")
    elif report.kv_tokens_that_fit:
        room.append("not reported by an engine")
    if report.kv_tokens_that_fit == 0:
        room.append("the weights do not fit")
    elif report.kv_tokens_that_fit is not None:
        room.append(f"{report.kv_tokens_that_fit:,} fit next to the weights by the data sheet")
    if report.kv_blocks:
        room.append(f"--kv-blocks {report.kv_blocks}")
    rows += [("KV", "; ".join(room)), ("error", report.error), ("source", report.source)]
    rows.append(("physics", str(report.physics or "")))
    lines, texts = [printable(report.name)], [(key, printable(text)) for key, text in rows if text]
    if width is None:
        lines += [f"  {key:<10}{text}" for key, text in texts]
    else:
        lines += aligned_within([[f"  {key}", text] for key, text in texts], (), width)
    table: list[tuple[str, ...]] = [("step", "ms", "at least", "times", "limit")]
    for prediction in report.predictions:
        seconds, least = prediction.seconds, prediction.least_seconds
        bound = ("", "", "")
        if least is not None:
            bound = f"{least * 1000:.3f}", f"{seconds / least:.2f}", prediction.limit or ""
        table.append((prediction.step, f"{seconds * 1000:.3f}", *bound))
    if not any(row[2] for row in table[1:]):
        table = [row[:2] for row in table]
    return "".join(f"{line}\n" for line in [*lines, "", *aligned(table, range(1, len(table[0])))])


def _terms_row(report: StepTimeReport, num_digits: int = 4) -> tuple[str, ...]:
    terms = {
        term: f"{report.settings[term] * unit:.{num_digits}g}" for term, unit in _TO_UNITS.items()
    }
    if "by_tokens" in report.settings:
        terms["f"] = f"*{terms['f']}"
    if "x" in report.settings:
        terms["w"] += f"+{report.settings['x']:.{num_digits}g}"
    room = "?" if report.kv_tokens_that_fit is None else f"~{report.kv_tokens_that_fit:,}"
    if report.kv_tokens is not None:
        room = f"{report.kv_tokens:,}"
    return printable(report.name), *terms.values(), room


# -- calibrating -----------------------------------------------------------------------------------

_DEFAULT_NAME = "calibrated"
# In the first line of a log of requests, of a trace, and of the trace of a server (without steps).
_TIMES, _TRACE, _REMOTE = b'"queued_ts"', b'"event":"run"', b'"layout":"remote"'
_UNSTATED = dict.fromkeys(MORE_TERMS, 0.0) | {"pipeline_parallel": 1}


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """The options of `batchdecode calibrate`."""

    log: str | None = argument(
        "Step times: a log, or the trace of a run with --profile wall; a file, a .gz file, or -.",
        "LOG",
    )
    name: str | None = option(
        PROFILE, "Name of the profile.  [default: the name of LOG]", "NAME", common=True
    )
    hardware: str | None = option(
        PROFILE, "GPU of the run, to check the profile.", "GPU", common=True, complete="gpu"
    )
    model: str | None = option(
        PROFILE,
        "Model of the run, to check the profile.",
        "MODEL",
        common=True,
        complete="model_shape",
    )
    tensor_parallel: int | None = option(
        PROFILE, "Number of GPUs that shared the model.  [default: 1]", "N", min=1, max=1024
    )
    output: str | None = output_option("Write the profile to FILE, as YAML.")
    force: bool = force_flag()


def calibrate(options: CalibrateOptions) -> None:
    """Fit a profile to a log of real step times, and report its error."""
    hardware, model, output = options.hardware, options.model, options.output
    if hardware is not None:
        load_gpu(hardware)
    experts = None if model is None else load_model_shape(model).experts
    if output is not None and not is_profile_file(output):
        raise BatchdecodeError(f"--output {output}: profiles are in .yaml or .yml files")
    if output is not None and not options.force:
        check_replaceable("--output", output)
    with open_input(options.log, nullcontext) as source:
        lines = source.lines()
        head = list(islice(lines, 1))
        first = head[0][1] if head else b""
        if _TIMES in first or _REMOTE in first:
            raise BatchdecodeError(
                f"{source.name} has the times of requests; pass a log of step times, or the "
                "trace of a run with --profile wall"
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
            "tensor_parallel": options.tensor_parallel or 1,
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
    name = options.name
    if name is None:
        stem = Path(options.log or "-").name.partition(".")[0]
        name = _DEFAULT_NAME if stem in ("", "-") else stem
    text = yaml.safe_dump({name: stated}, sort_keys=False, allow_unicode=True, width=100)
    with output_sink(output) as sink:
        sink.write(text.encode())


COMMANDS = {"profiles": command(profiles), "calibrate": command(calibrate, CalibrateOptions)}
