"""Renews the tables of public names in the documentation: `python tests/member_tables.py`.

They stand below comments of three kinds.  `members of MODULE.CLASS`: how each public method and
property is called, with the first paragraph of its docstring.  `arguments of MODULE.NAME`: the
arguments of a function or class and their defaults, and `fields of MODULE.CLASS`: the same without
the defaults; what each of these means is written by hand, and stays beside its name.
"""

import inspect
import re
from importlib import import_module
from pathlib import Path

from msgspec import Struct

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TABLE = re.compile(r"<!-- (members|arguments|fields) of (\S+)\.(\w+) -->\n\n((?:\|.*\n)*)")
TO_BE_WRITTEN = "TO BE WRITTEN"


def renewed(text):
    return TABLE.sub(
        lambda table: table[0].removesuffix(table[4]) + table_of(*table.groups()), text
    )


def table_of(kind, module, name, old):
    """Return the table of what `module.name` has; `old` is the one that stands there."""
    what = getattr(import_module(module), name)
    rows = ROWS[kind](what, meanings_in(old))
    head = (
        [kind.removesuffix("s"), "default", ""]
        if len(rows[0]) == 3
        else [kind.removesuffix("s"), ""]
    )
    lines = [f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in [head, *rows]]
    return "".join([lines[0], f"|{'---|' * len(head)}\n", *lines[1:]])


def members_of(kind, _):
    """Return the public methods and properties of a class, with what their docstrings say."""
    rows, members = [], {}
    for owner in kind.__mro__:
        if owner.__module__.startswith("batcher."):
            members |= {name: own for name, own in vars(owner).items() if name not in members}
    for name, member in members.items():
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            called = call_of(member) if callable(member) else ""
            summary = inspect.getdoc(member).partition("\n\n")[0]
            rows.append([f"`{name}{called}`", " ".join(summary.split())])
    return rows


def call_of(function):
    _, *parameters = inspect.signature(function).parameters.values()
    plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain))


def arguments_of(what, meanings):
    return [
        [f"`{name}`", default_of(parameter), meanings.get(name, TO_BE_WRITTEN)]
        for name, parameter in inspect.signature(what).parameters.items()
    ]


def fields_of(what, meanings):
    return [[name, meaning] for name, _, meaning in arguments_of(what, meanings)]


def default_of(parameter):
    """Return the default of an argument; settings as they are made."""
    value = parameter.default
    if value is parameter.empty:
        return ""
    if isinstance(value, Struct) and value == type(value)():
        return f"`{type(value).__name__}()`"
    return f"`{value!r}`"


def meanings_in(table):
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return {cells[0].strip(" `"): cells[-1].strip() for cells in rows}


ROWS = {"members": members_of, "arguments": arguments_of, "fields": fields_of}

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renewed(page.read_text()))
