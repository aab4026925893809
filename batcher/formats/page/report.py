"""A report of a run: its numbers, why slots were idle and what reproduces it, as HTML.

Rule: each number is that of the summary, to its last digit; `data-of` names it as a path in there.
"""

import html
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from batcher.events import RunEvent
from batcher.metrics.summary import RunSummary, Unit, unit_of

_SPREAD = ("count", "mean", "p50", "p90", "p95", "p99", "max")
_LATENCIES = "latencies"


def render_report(
    summary: RunSummary, run: RunEvent, name: str, idle_causes: Mapping[str, str]
) -> str:
    """Return what stands above the timeline of a run, as HTML.

    name: what was decoded.  idle_causes: what each cause in the summary is called.
    """
    numbers = msgspec.to_builtins(summary)
    spreads, others = _sorted_out(numbers)
    tables = "".join(
        _section(_words(path) if path else "run", _table(rows, within=path))
        for path, rows in others.items()
        if path != "idle"
    )
    return (
        f'<article class="report">\n<h1>{_shown(name)}</h1>\n'
        f"<p>{summary.ok:,} of {summary.outputs:,} outputs came to their end in {summary.steps:,} "
        f"steps of {summary.batch:,} slots.</p>\n"
        + _section(
            "How long it took",
            _spread_table(spreads, unit_of(summary, is_timed=bool(run.step_time))),
        )
        + _section("Why slots were idle", _idle(summary, numbers["idle"], idle_causes))
        + f'<div class="columns">{tables}</div>\n'
        + _section("What reproduces it", _table(_leaves(_settings_of(run))))
        + "<h2>Timeline</h2>\n</article>\n"
    )


def _settings_of(run: RunEvent) -> dict[str, Any]:
    """Return what a run event says, but of itself."""
    said = msgspec.to_builtins(run)
    return {name: value for name, value in said.items() if name not in {"event", "version"}}


def _sorted_out(
    numbers: dict[str, Any],
) -> tuple[dict[str, dict[str, Any]], dict[str, list[tuple[str, Any]]]]:
    """Return the distributions by their paths, and all others as paths and values, by sections."""
    spreads: dict[str, dict[str, Any]] = {}
    others: dict[str, list[tuple[str, Any]]] = {"": []}

    def sort(path: str, value: dict[str, Any]) -> None:
        for key, inner in value.items():
            name = f"{path}.{key}" if path else key
            if isinstance(inner, dict) and inner.keys() >= set(_SPREAD):
                spreads[name] = inner
            elif isinstance(inner, dict):
                sort(name, inner)
            else:
                others.setdefault(path, []).extend(_leaves(inner, name))

    sort("", numbers)
    return spreads, others


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values within `value`, and their paths; a list of no records is one of them."""
    if isinstance(value, dict):
        inner: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        inner = enumerate(value)
    else:
        yield path, value
        return
    for key, one in inner:
        yield from _leaves(one, f"{path}.{key}" if path else str(key))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>\n" if content else ""


def _words(path: str) -> str:
    """Return the path of a number, in words."""
    return ": ".join("KV" if part == "kv" else part.replace("_", " ") for part in path.split("."))


def _table(rows: Iterable[tuple[str, Any]], within: str = "") -> str:
    """Return paths and values as a table; what there is none of is left out.

    within: how all paths begin; it is not said for each.
    """
    cells = [
        f'<tr><th scope="row">{_shown(_words(path.removeprefix(f"{within}.")))}</th>'
        f"{_cell(path, value)}</tr>"
        for path, value in rows
        if value is not None
    ]
    return f"<table>{''.join(cells)}</table>" if cells else ""


def _spread_table(spreads: Mapping[str, Mapping[str, Any]], unit: Unit) -> str:
    """Return distributions as a table; unit: of latencies, all others are in steps."""
    if not spreads:
        return ""
    titles = "".join(f'<th scope="col" class="number">{title}</th>' for title in _SPREAD)
    rows = [
        f'<tr><th scope="row">{_shown(_words(path.rpartition(".")[2]))}, '
        f"{unit if path.startswith(_LATENCIES) else 'steps'}</th>"
        + "".join(_cell(f"{path}.{key}", value) for key, value in spread.items())
        + "</tr>"
        for path, spread in spreads.items()
    ]
    return f"<table><tr><td></td>{titles}</tr>{''.join(rows)}</table>"


def _idle(summary: RunSummary, idle: Mapping[str, int], names: Mapping[str, str]) -> str:
    """Return how many slot-steps went unused for which cause, each with a bar."""
    total = max(1, summary.busy_slot_steps + summary.idle_slot_steps)
    rows = [
        f'<tr><th scope="row">{_shown(names.get(cause, cause))}</th>{_cell(f"idle.{cause}", steps)}'
        f'<td><meter min="0" max="{total}" value="{steps}"></meter></td></tr>'
        for cause, steps in idle.items()
    ]
    return f"<p>In slot-steps, of {total:,}.</p><table>{''.join(rows)}</table>"


def _cell(path: str, value: Any) -> str:
    shown = f"{value:,}" if type(value) is int else None
    if shown is None:
        shown = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    kind = "" if isinstance(value, str | list) else ' class="number"'
    return f'<td{kind} data-of="{_shown(path)}">{_shown(shown)}</td>'


def _shown(text: str) -> str:
    """Return a text as HTML in which what is not visible, or turns text, is escaped."""
    visible = (one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return html.escape("".join(visible))
