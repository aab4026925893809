"""Reads what a page holds, as batcher/page/page.py says it is packed; plain and slow."""

import base64
import json
import re
import zlib
from itertools import accumulate

from batcher.trace.run import label_of


def parts_of(page):
    text = page.decode()
    [facts] = re.findall(r'<script type="text/plain" id="facts">(.*?)</script>', text, re.DOTALL)
    runs = re.findall(r'<script type="text/plain" class="run">(.*?)</script>', text, re.DOTALL)
    return json.loads(base64.b64decode(facts)), [unpacked(run.encode()) for run in runs]


def unpacked(lines):
    packed = b"".join(base64.b64decode(line) for line in lines.split())
    found, tables = {}, {}
    for line in zlib.decompress(packed, wbits=31).splitlines():
        name, content = json.loads(line)
        if name == "run":
            found[name] = content
            continue
        for column, values in content.items():
            tables.setdefault(name, {}).setdefault(column, []).extend(values)
    for name, columns in tables.items():
        whole = {
            column.removeprefix("+"): list(accumulate(values)) if column[0] == "+" else values
            for column, values in columns.items()
        }
        rows = zip(*whole.values(), strict=True)
        found[name] = [dict(zip(whole, row, strict=True)) for row in rows]
    return found


def spans_of(run):
    """Return the spans that a run on a page has."""
    return [
        {
            "slot": row["slot"],
            "label": run["sequences"][row["sequence"]]["label"],
            "start": row["start"],
            "end": row["start"] + row["steps"],
            "outcome": run["run"]["outcomes"][row["outcome"]] or None,
            "prefill": row["prefill"],
            "cached": row["cached"],
            "resumed": bool(row["resumed"]),
        }
        for row in run.get("spans", [])
    ]


def shown_spans(lines):
    """Return what a page has of the spans that are `lines` of `--format spans`."""
    found = []
    for span in map(json.loads, lines):
        shown = {name: span[name] for name in ("slot", "start", "end", "outcome")}
        shown["label"] = label_of(span["id"], span["index"], span.get("role", "sample"))
        unlike = {"prefill": 1, "cached": 0, "resumed": False}
        found.append(shown | {name: span.get(name, usual) for name, usual in unlike.items()})
    return found
