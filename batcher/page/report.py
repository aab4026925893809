"""Render the report of a run as HTML: headline, timeline, numbers and settings.

Every number is from the summary, in three significant digits, with its path as `data-of`.  Zeros
are left out.
"""

import html
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from batcher.events import RunEvent
from batcher.metrics.summary import Summary, numbers_of, unit_of

_SPREAD = ("count", "mean", "p50", "p90", "p95", "p99", "max")
_LATENCIES = "latencies"
_SHARES = {"share", "acceptance", "token_acceptance", "wasted"}
_UNITS = {  # by the path of a number, or that of what holds it; TIME: the unit of latencies
    "throughput.makespan": "TIME",
    "throughput.requests": "requests/TIME",
    "throughput.prompt_tokens": "tokens/TIME",
    "throughput.output_tokens": "tokens/TIME",
    "goodput.per_second": "requests/s",
    "goodput.limits": "s",
    "kv.block_size": "tokens",
    "kv.total": "blocks",
    "blocked": "steps",
    "wall.seconds": "s",
    "wall.tokens_per_second": "tokens/s",
}
_TITLES = {"": "Run", "kv": "KV blocks", "wall": "Wall clock"}


def render_report(
    summary: Summary,
    run: RunEvent,
    name: str,
    key_numbers: Mapping[str, str],
    idle_causes: Mapping[str, str],
) -> tuple[str, str]:
    """Return the HTML above and below the timeline; key_numbers: texts by their titles."""
    numbers = msgspec.to_builtins(summary)
    unit = unit_of(summary, is_timed=bool(run.step_time))
    spreads: dict[str, dict[str, Any]] = {}  # distributions by their paths
    lists: dict[str, list[dict[str, Any]]] = {}  # records, the same
    others: dict[str, list[tuple[str, Any]]] = {"": []}  # by sections, with their paths

    for path, value in numbers_of(numbers):
        if isinstance(value, dict):
            spreads[path] = value
        elif isinstance(value, list) and isinstance(value[0], dict):
            lists[path] = value
        else:
            others.setdefault(path.rpartition(".")[0], []).append((path, value))
    sections = {path: _table(rows, path, unit) for path, rows in others.items() if path != "idle"}
    for path, records in lists.items():
        numbered = [(str(n), f"{path}.{n}", record) for n, record in enumerate(records)]
        sections[path] = _grid([_words(title) for title in records[0]], numbered)
    tables = "".join(
        _section(_TITLES.get(path) or _words(path).capitalize(), content)
        for path, content in sections.items()
    )
    above = (
        f'<article class="report">\n<h1>{escaped(name)}</h1>\n'
        f"{render_key_numbers(key_numbers)}</article>\n"
    )
    options = [f"--batch {run.batch}", f"--policy {run.policy}"]
    options += [f"--workers {run.workers}"] if run.workers > 1 else []
    options += [f"--{name.replace('_', '-')} {value}" for name, value in run.scheduling.items()]
    options += [f"--{name.replace('_', '-')} {value}" for name, value in run.defaults.items()]
    rows = {
        "Options": " ".join(options),
        "Model": run.model,
        "Settings of the model": _listed(run.settings),
        "Step time": _listed(run.step_time),
        "Drafts": _listed(run.speculation),
    }
    cells = [
        f'<tr><th scope="row">{title}</th><td><code>{escaped(text)}</code></td></tr>'
        for title, text in rows.items()
        if text
    ]
    times = []
    for path, spread in spreads.items():
        own_unit = unit if path.startswith(_LATENCIES) else "steps"
        if spread["max"]:
            times.append((f"{_words(path.rpartition('.')[2])}, {own_unit}", path, spread))
    idle = numbers["idle"]
    total = max(1, summary.busy_slot_steps + summary.idle_slot_steps)
    idle_rows = [
        f'<tr><th scope="row">{escaped(idle_causes.get(cause, cause))}</th>'
        f"{_cell(f'idle.{cause}', steps, 'slot-steps')}"
        f'<td><meter min="0" max="{total}" value="{steps}"></meter></td></tr>'
        for cause, steps in idle.items()
        if steps
    ]
    below = (
        '<article class="report">\n'
        + _section("Times", _grid(_SPREAD, times) if times else "")
        + _section(
            "Why slots were idle",
            (
                f"<p>Of {total:,} slot-steps.</p><table>{''.join(idle_rows)}</table>"
                if idle_rows
                else ""
            ),
        )
        + f'<div class="columns">{tables}</div>\n'
        + _section("What reproduces it", f"<table>{''.join(cells)}</table>")
        + "</article>\n"
    )
    return above, below


def render_key_numbers(numbers: Mapping[str, str]) -> str:
    """Return the HTML of the numbers at the top of a page; numbers: texts by their titles."""
    cells = (f"<div><dt>{escaped(t)}</dt><dd>{escaped(n)}</dd></div>" for t, n in numbers.items())
    return f'<dl class="numbers">{"".join(cells)}</dl>\n'


def _listed(settings: Mapping[str, Any]) -> str:
    single = {n: value for n, value in settings.items() if isinstance(value, str | int | float)}
    return ", ".join(f"{name} {value}" for name, value in single.items())


def _section(title: str, content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>\n" if content else ""


def _words(path: str) -> str:
    return ": ".join("KV" if part == "kv" else part.replace("_", " ") for part in path.split("."))


def _table(rows: Iterable[tuple[str, Any]], within: str, unit: str) -> str:
    """Return a table of paths within `within` and their values; unit: of times."""
    cells = []
    for path, value in rows:
        found = _UNITS.get(path) or _UNITS.get(path.rpartition(".")[0]) or ""
        found = found.replace("/TIME", f"/{unit.removesuffix('s')}").replace("TIME", unit)
        name = escaped(_words(path.removeprefix(f"{within}.")))
        cells.append(f'<tr><th scope="row">{name}</th>{_cell(path, value, found)}</tr>')
    return f"<table>{''.join(cells)}</table>" if cells else ""


def _grid(titles: Iterable[str], rows: Iterable[tuple[str, str, Mapping[str, Any]]]) -> str:
    """Return a table of numbers; rows: (title, path, numbers)."""
    head = "".join(f'<th scope="col" class="number">{escaped(title)}</th>' for title in titles)
    lines = [
        f'<tr><th scope="row">{escaped(title)}</th>'
        + "".join(_cell(f"{path}.{name}", value) for name, value in values.items())
        + "</tr>"
        for title, path, values in rows
    ]
    return f"<table><tr><td></td>{head}</tr>{''.join(lines)}</table>"


def _cell(path: str, value: Any, unit: str = "") -> str:
    key = path.rpartition(".")[2]
    if isinstance(value, str | list):
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        return f'<td data-of="{escaped(path)}">{escaped(text)}</td>'
    if key in _SHARES or key.endswith("_share"):
        text = f"{_three_digits(value * 100)}%"
    else:
        text = f"{_three_digits(value)} {unit}".rstrip()
    return f'<td class="number" data-of="{escaped(path)}">{text}</td>'


def _three_digits(value: float) -> str:
    is_large = isinstance(value, int) or abs(value) >= 100  # noqa: PLR2004 - three digits
    return f"{value:,.0f}" if is_large else f"{value:.3g}"


def escaped(text: str) -> str:
    visible = (one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return html.escape("".join(visible))
