"""`batchdecode profiles`: step times, listed or one by one, with what their hardware allows."""

import os
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from batcher.settings import DEFAULT_BLOCK_SIZE
from batcher.timing.profiles import (
    Physics,
    Prediction,
    Profile,
    check_physics,
    is_profile_file,
    load_profile,
    num_tokens_that_fit,
    predictions_of,
    read_profiles,
    shipped_profiles,
    split_overhead,
    step_time_of,
    usable_blocks,
)
from batcher.timing.roofline import num_kv_tokens, parts_of

from .printing import print_json, print_text
from .screen.terminal import aligned, aligned_within, cell_width, printable, terminal_size, wrapped

_TO_UNITS = {"t0": 1.0, "w": 1.0, "f": 1e3, "g": 1e3, "d": 1e6, "h": 1e6, "e": 1e6}
_HEADS = ("profile", "t0 ms", "w ms", "f µs", "g µs", "d ns", "h ns", "e ns", "KV tokens")
_POINTS_IN_A_LINE = 4
_NO_TERMS = ("by_tokens", "num_experts", "num_experts_per_tok", "pipeline_parallel")

MEASURED = "* for each token beyond its by_tokens, which batchdecode profiles NAME shows"
EXPERTS = "+ for all experts, of which a step reads those that its tokens hit"
ESTIMATED = "~ no engine has reported it: 90 % of the memory on the data sheet, less the weights"


class StepTimeReport(Struct, frozen=True, kw_only=True):
    """A step time as `profiles --json` shows it.

    kv_tokens: what an engine reported.  kv_tokens_that_fit: memory less weights.
    """

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


def show_step_times(name: str | None, *, as_json: bool) -> None:
    """Carry out `batchdecode profiles`.

    Raises:
        BatchdecodeError: there is no such profile, or its file cannot be used.
        WriteError: stdout takes no more.
    """
    reports = _reports(name)
    if as_json:
        print_json(reports)
    else:
        width = terminal_size(1, os.environ).columns if os.isatty(1) else None
        is_one = name is not None and len(reports) == 1
        print_text(details_of(reports[0], width) if is_one else table_of(reports, width))


def _reports(name: str | None) -> list[StepTimeReport]:
    if name is None:
        return [_report_of_profile(*named) for named in shipped_profiles().items()]
    if name.startswith("roofline:"):
        return [_report_of_roofline(name)]
    if name.partition(":")[0] == "constant":
        step_time = step_time_of(name)
        predictions = predictions_of(step_time)
        return [StepTimeReport(name=name, settings=step_time.settings, predictions=predictions)]
    if is_profile_file(name) and split_overhead(name)[1] is None:
        return [_report_of_profile(*named) for named in read_profiles(name).items()]
    return [_report_of_profile(*load_profile(name))]


def _report_of_profile(name: str, profile: Profile) -> StepTimeReport:
    physics, predictions = check_physics(profile)
    fit = num_tokens_that_fit(profile)
    num_tokens = profile.kv_tokens or fit
    return StepTimeReport(
        name=name,
        settings=profile.step_time(name).settings,
        hardware=profile.hardware,
        model=profile.model,
        tensor_parallel=profile.tensor_parallel,
        pipeline_parallel=profile.pipeline_parallel,
        kv_tokens=profile.kv_tokens,
        kv_tokens_that_fit=fit,
        kv_blocks=None if num_tokens is None else _num_blocks(num_tokens),
        error=profile.error,
        source=profile.source,
        physics=physics,
        predictions=predictions,
    )


def _report_of_roofline(name: str) -> StepTimeReport:
    """Return what is said of roofline:MODEL:GPU:TP@ENGINE, or raise a CatalogError."""
    kernels, overhead = split_overhead(name)
    shape, gpu, *stages = parts_of(kernels.partition(":")[2])
    step_time = step_time_of(name)
    num_tokens = num_kv_tokens(shape, gpu, *stages)
    return StepTimeReport(
        name=name,
        settings=step_time.settings,
        tensor_parallel=stages[0],
        pipeline_parallel=stages[1],
        kv_tokens_that_fit=num_tokens,
        kv_blocks=_num_blocks(num_tokens),
        error="a bound, not an estimate: real engines take longer",
        source=f"{gpu.source}; the engine: {overhead.source}" if overhead else gpu.source,
        predictions=predictions_of(step_time),
    )


def _num_blocks(num_tokens: int) -> int:
    return usable_blocks(num_tokens // DEFAULT_BLOCK_SIZE)


def table_of(reports: Sequence[StepTimeReport], width: int | None = None) -> str:
    """Return profiles as tables: their terms, then how good they are, then where they are from.

    width: how many cells a line may have, None for any number.
    """
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
    measured = [MEASURED] if any("by_tokens" in report.settings for report in reports) else []
    experts = [EXPERTS] if any("x" in report.settings for report in reports) else []
    rooms = [row[-1] for row in terms]
    estimated = [ESTIMATED] if any(room.startswith("~") for room in rooms) else []
    tables = aligned(terms, range(1, len(_HEADS))), aligned(notes, ())
    if width is not None and max(map(cell_width, tables[0])) > width:
        terms = [_HEADS[:-1], *(_terms_row(report, num_digits=3)[:-1] for report in reports)]
        notes = [(name, room, *rest) for room, (name, *rest) in zip(rooms, notes, strict=True)]
        tables = aligned(terms, range(1, len(_HEADS))), aligned_within(notes, (1,), width)
    blocks = [
        [*tables[0], *_lines([*measured, *experts, *estimated], width)],
        tables[1],
        _lines(listed, width),
        _lines(beaten, width),
    ]
    return "\n".join("".join(f"{line}\n" for line in block) for block in blocks if block)


def _lines(texts: Sequence[str], width: int | None) -> list[str]:
    """Return texts as lines of so many cells at most, None for any number."""
    return [line for text in texts for line in ([text] if width is None else wrapped(text, width))]


def details_of(report: StepTimeReport, width: int | None = None) -> str:
    """Return one step time with all that is known of it, and what it predicts; width: as above."""
    rows = [
        ("terms", "  ".join(_shown_settings(report))),
        *_shown_times(report),
        ("experts", _experts(report)),
        ("hardware", _hardware(report)),
        ("KV", _room(report)),
        ("error", report.error),
        ("source", report.source),
        ("physics", str(report.physics or "")),
    ]
    lines = [printable(report.name)]
    told = [(title, printable(text)) for title, text in rows if text]
    if width is None:
        lines += [f"  {title:<10}{text}" for title, text in told]
    else:
        lines += aligned_within([[f"  {title}", text] for title, text in told], (), width)
    table = [("step", "ms", "at least", "times", "limit")]
    for prediction in report.predictions:
        least = prediction.least_seconds
        bound = ("", "", "")
        if least is not None:
            bound = _ms(least), f"{prediction.seconds / least:.2f}", prediction.limit or ""
        table.append((prediction.step, _ms(prediction.seconds), *bound))
    if not any(row[2] for row in table[1:]):
        table = [row[:2] for row in table]  # type: ignore[misc]  # shorter rows, all of them
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


def _shown_settings(report: StepTimeReport) -> list[str]:
    terms = {name: value for name, value in report.settings.items() if name not in _NO_TERMS}
    is_plain = all(isinstance(value, int | float) for value in terms.values())
    if not is_plain:
        return []
    unit = "s" if "seconds" in terms else "ms"
    return [f"{name} {value:g}" for name, value in terms.items()] + [f"({unit})"]


def _shown_times(report: StepTimeReport) -> list[tuple[str, str]]:
    """Return the times by tokens that were measured, so many to a line."""
    points = [f"{tokens:,}: {ms:g}" for tokens, ms in report.settings.get("by_tokens", ())]
    rows = range(0, len(points), _POINTS_IN_A_LINE)
    lines = ["  ".join(points[row : row + _POINTS_IN_A_LINE]) for row in rows]
    return [("" if row else "by_tokens", line) for row, line in zip(rows, lines, strict=True)]


def _experts(report: StepTimeReport) -> str:
    if "num_experts" not in report.settings:
        return ""
    return "{num_experts} in a layer, {num_experts_per_tok} of them for each token".format_map(
        report.settings
    )


def _hardware(report: StepTimeReport) -> str:
    if report.hardware is None:
        return ""
    stages = report.pipeline_parallel or 1
    gpus = (report.tensor_parallel or 1) * stages
    in_stages = f" in {stages} stages" if stages > 1 else ""
    return f"{gpus} x {report.hardware}{in_stages}" + (f", {report.model}" if report.model else "")


def _room(report: StepTimeReport) -> str:
    parts = []
    if report.kv_tokens is not None:
        parts.append(f"{report.kv_tokens:,} tokens reported")
    elif report.kv_tokens_that_fit:
        parts.append("no engine has reported it")
    if report.kv_tokens_that_fit == 0:
        parts.append("the weights do not fit")
    elif report.kv_tokens_that_fit is not None:
        parts.append(f"{report.kv_tokens_that_fit:,} fit beside the weights by the data sheet")
    if report.kv_blocks:
        parts.append(f"--kv-blocks {report.kv_blocks}")
    return "; ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f}"
