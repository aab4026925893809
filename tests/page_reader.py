"""Reads what a page holds, as batcher/page/page.py says it is packed; plain and slow."""

import base64
import json
import re
import struct
import zlib


def parts_of(page):
    """Return the facts of a page, and the values and tables of each of its runs."""
    text = page.decode()
    [facts] = re.findall(r'<script type="text/plain" id="facts">(.*?)</script>', text, re.DOTALL)
    runs = re.findall(r'<script type="text/plain" class="run">(.*?)</script>', text, re.DOTALL)
    return json.loads(base64.b64decode(facts)), [unpacked(run.encode()) for run in runs]


def unpacked(lines):
    """Return the values, and the tables as lists of rows, by name."""
    packed = b"".join(base64.b64decode(line) for line in lines.split())
    rest, found = zlib.decompress(packed, wbits=31), {}
    while rest:
        [size] = struct.unpack("<I", rest[:4])
        header, rest = json.loads(rest[4 : 4 + size]), rest[4 + size :]
        body, rest = rest[: header["bytes"]], rest[header["bytes"] :]
        if "value" in header:
            found[header["value"]] = json.loads(body)
        else:
            found.setdefault(header["table"], []).extend(_rows(header, body))
    return found


def _rows(header, body):
    columns = {}
    for column in header["columns"]:
        size = header["rows"] * column["width"]
        numbers, body = _numbers(body[:size], header["rows"], column["width"]), body[size:]
        if column["as"] == "ascending":
            last, numbers = 0, list(numbers)
            for row, folded in enumerate(numbers):
                last += -(folded + 1) // 2 if folded % 2 else folded // 2
                numbers[row] = last
        elif column["as"] == "text":
            units, body = (
                body[: column["bytes"]].decode().encode("utf-16-le"),
                body[column["bytes"] :],
            )
            lengths, numbers = numbers, []
            for length in lengths:
                numbers.append(units[: 2 * length].decode("utf-16-le"))
                units = units[2 * length :]
        columns[column["name"]] = numbers
    assert body == b""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _numbers(content, rows, width):
    in_order = bytes(content[place * rows + row] for row in range(rows) for place in range(width))
    return struct.unpack(f"<{rows}{ {1: 'B', 2: 'H', 4: 'I', 8: 'd'}[width] }", in_order)


def spans_of(run):
    """Return the spans that a run on a page has, as lines of `--format spans` have them."""
    facts, spans = run["run"], []
    for row in run.get("spans", []):
        sequence, more = run["sequences"][row["sequence"]], json.loads(row["more"] or "{}")
        span = {
            "slot": row["slot"],
            "id": sequence["id"],
            "index": sequence["index"],
            "start": row["start"],
            "end": row["start"] + row["steps"],
            "outcome": facts["outcomes"][row["outcome"]] or None,
        }
        unlike = {
            name: row[name] for name in ("jumped", "drafted", "accepted", "cached", "generated")
        }
        unlike |= {"dropped": bool(row["flags"] & 1), "resumed": bool(row["flags"] & 2)}
        rare = ("forks", "preemption", "cached_from")
        unlike |= {name: more[name] for name in rare if name in more}
        role = facts["roles"][sequence["role"]]
        span |= {"role": role} if role != "sample" else {}
        span |= {name: value for name, value in unlike.items() if value}
        span |= {"prefill": row["prefill"]} if row["prefill"] != 1 else {}
        spans.append(span)
    return spans
