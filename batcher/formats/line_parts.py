"""How many parts a line may have: each takes a hundred bytes and more once it is read.

They are counted before anything is read, so that a line of too many costs next to nothing.
"""

import re
from itertools import islice

from batcher.errors import FieldProblem
from batcher.formats.diagnostics import CONTEXT, Problem, make_problem
from batcher.formats.json_spans import Span

MAX_PARTS = 2**17  # strings, names of fields among them, lists and objects

# The end of a string may be missing, lest each quote in what is no JSON be tried for a beginning.
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)


def find_too_many(line: bytes, line_number: int) -> Problem | None:
    """Return the problem of a line that has more than MAX_PARTS parts; None of any other."""
    if len(line) <= MAX_PARTS:
        return None
    most = line.count(b'"') // 2 + line.count(b"[") + line.count(b"{")
    if most <= MAX_PARTS or next(islice(_PART.finditer(line), MAX_PARTS, None), None) is None:
        return None
    message = (
        f"the line has more than {MAX_PARTS} strings, lists and objects, names of fields "
        f"included; at most {MAX_PARTS} are allowed"
    )
    hint = "a list of token ids is one of them, however long; join texts and messages to fewer"
    start = line[:CONTEXT].decode(errors="replace")
    problem = FieldProblem("too-many-parts", (), message, hint)
    return make_problem(problem, line_number, start, Span(0, 1))
