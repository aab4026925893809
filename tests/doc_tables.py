"""Tables in docs/ that are made of those in the code; `python tests/doc_tables.py` renews them.

A table of docs/ that is made so stands behind a comment that says of what.
"""

import json
import re
from pathlib import Path

from batcher.fields import fields_of, range_in_words
from batcher.request import MAX_INT, REQUEST_FIELDS, PromptSegment
from batcher.settings import SETTINGS

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [
    DOCS / name
    for name in ("reference/requests-and-results.md", "guide/sessions.md", "reference/cli.md")
]
TABLE = re.compile(r"<!-- made of (\w+)(?: from (\w+) to (\w+))? -->\n\n((?:\|.*\n)+)")


def renewed(text):
    return TABLE.sub(make_table, text)


def make_table(match):
    kind, first, last, table = match.groups()
    head, line, *rows = table.splitlines()
    if kind == "fields":
        names = list(REQUEST_FIELDS)
        chosen = names[names.index(first) : names.index(last) + 1]
        rows = [row_of(REQUEST_FIELDS[name]) for name in chosen]
    elif kind == "segments":
        rows = [row_of(field) for field in fields_of(PromptSegment).values()]
    elif kind == "exclusions":
        rows = exclusions()
    elif kind == "needs":
        rows = needs()
    else:
        own = tuple(f"| `{setting.option}`" for setting in SETTINGS.values())
        rows = [*settings(), *(row for row in rows if not row.startswith(own))]
    return match[0].replace(table, "\n".join([head, line, *rows]) + "\n")


def row_of(field):
    return f"| `{field.name}` | {field.shape or shape_of(field)} | {field.words} |"


def shape_of(field):
    default = field.default
    shown = f"`{json.dumps(default)}`" if isinstance(default, str) else json.dumps(default)
    if isinstance(default, float):
        shown = f"{default:g}"
    return type_of(field) + ("" if default is None else f"; {shown}")


def type_of(field):
    """The type of a field for people: its range, its choices, or text."""
    if field.choices is not None:
        *most, last = [json.dumps(choice) for choice in field.choices]
        most, last = (
            [f"`{one}`" if '"' in one else one for one in part] for part in (most, [last])
        )
        return f"{', '.join(most)} or {last[0]}"
    if field.range is None:
        return "string"
    kind = "integer" if field.range.is_integer else "number"
    smallest, largest = field.range.smallest, field.range.largest
    if (smallest, largest) == (-MAX_INT, MAX_INT):
        return kind
    above = " above" if field.range.is_open else ""
    if largest == MAX_INT:
        return f"{kind} from {smallest}"
    return f"{kind}{above} {smallest} to {'2^52' if largest == 2**52 else largest}"


def exclusions():
    """A row for all fields that the same fields are excluded by for the same reason."""
    rows = {}
    for name, field in REQUEST_FIELDS.items():
        for why in dict.fromkeys(field.excludes.values()):
            others = listed(other for other, reason in field.excludes.items() if reason == why)
            rows.setdefault((others, why), []).append(name)
    return [f"| {listed(names)} | {others} | {why} |" for (others, why), names in rows.items()]


def needs():
    rows = {}
    for name, field in REQUEST_FIELDS.items():
        if field.needs is not None:
            rows.setdefault(field.needs, []).append(name)
    return [f"| {listed(names)} | `{other}` | {how} |" for (other, how), names in rows.items()]


def settings():
    rows = []
    for setting in SETTINGS.values():
        default = setting.shown_default
        shown = f"`{default}`" if isinstance(setting.default, str) or setting.choices else default
        shown = shown if default else ""
        limits = (setting.smallest, setting.largest)
        words = setting.words if None in limits else f"{setting.words}, {range_in_words(*limits)}"
        rows.append(f"| `{setting.option}` {setting.metavar} | {shown} | {words} |")
    return [row.replace("|  |", "| |") for row in rows]


def listed(names):
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renewed(page.read_text()))
