"""What llguidance can enforce of a constraint, found in a helper process that may be killed.

A loosened JSON schema allows every output of the schema, and more: the keywords that llguidance
cannot enforce are left out, and named.  Which of its outputs keep the schema only the check of a
whole one decides (verification.py); what that cannot decide is refused.  llguidance's own option
`lenient` ignores the keywords that it does not know and takes `oneOf` as `anyOf`; the rest is done
here.  One thing is narrower than stated: of the bounds of int64, the lower leaves out the 1,024
integers next to it, which llguidance cannot write.
"""

import atexit
import json
import math
import pathlib
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

from msgspec import Struct

from batcher.decoding.grammars import (
    NESTED,
    ConstraintSource,
    compile_source,
    grammar_error,
    matcher_of,
    schema_source,
    with_large_stack,
    with_literal_dashes,
)
from batcher.decoding.verification import DIALECTS, dialect_of, find_doubt
from batcher.errors import BatchdecodeError, GrammarError, Path

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_INT64 = {True: -(2**63) + 1024, False: 2**63 - 1}  # its bounds, as llguidance can keep them
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MAX_COUNT = 2**32 - 1  # which llguidance can read; no output has as many
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_WITH_NAMES = {"properties", "patternProperties", "$defs", "definitions"}
# These are values, or schemas that an output need not keep: they are left as they are.
_NOT_LOOSENED = {
    *("const", "enum", "default", "examples"),
    *("not", "if", "then", "else", "contains", "propertyNames"),
}
_BESIDE_REF = {  # these constrain nothing
    *("$ref", "$defs", "definitions", "$id", "id", "$schema", "$anchor", "$comment"),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
}
_MAX_TRIES = 16  # to compile a schema, each looser than the one before
_SIZE = "min/maxProperties"  # in a warning, after which maxProperties is kept in part
_CIRCLE = re.compile(r"circular references with sibling keys are not supported: \S*?(#\S*)")
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[.*\])")

Schema = dict[str, Any]
Change = Callable[[Schema, Path], Schema]


class Enforceable(Struct, frozen=True):
    """What llguidance can enforce of a constraint.

    source: that which is compiled.  unenforced: the keywords of a schema that are left out of it.
    """

    source: ConstraintSource
    unenforced: tuple[str, ...] = ()


def enforceable_part(
    tokenizer: "LLTokenizer", source: ConstraintSource
) -> Enforceable | GrammarError:
    """Return what llguidance can enforce of a constraint, or why that is nothing.

    The caller's thread has to have a stack of STACK_SIZE: see `with_large_stack`.
    """
    if source.kind != "json_schema":
        found = compile_source(tokenizer, source)
        return found if isinstance(found, GrammarError) else Enforceable(source)
    try:
        return _loosened(tokenizer, source)
    except GrammarError as error:
        return error
    except RecursionError:
        return GrammarError(("json_schema",), NESTED)


def _loosened(tokenizer: "LLTokenizer", source: ConstraintSource) -> Enforceable | GrammarError:
    """Return what llguidance can enforce of a schema, loosened no further than it has to be.

    Raises:
        GrammarError: it holds an integer that cannot be kept, or what is no schema.
    """
    left_out: set[str] = set()
    schema = _changed(json.loads(source.text), partial(_as_is_read, left_out))
    matcher = matcher_of(tokenizer, schema_source(schema))
    tried: list[str] = []
    while len(tried) < _MAX_TRIES:
        warnings = [text for text in matcher.get_grammar_warnings() if _SIZE in text]
        fault = matcher.get_error() or next(iter(warnings), "")
        name, change = "", cast(Any, partial(_without_what_fails, tokenizer))
        if circle := _CIRCLE.search(fault):
            is_anywhere = circle[1] in tried
            name, change = circle[1], partial(_without_circle, circle[1], is_anywhere=is_anywhere)
        elif "intersection" in fault:
            name, change = "$ref", partial(_without_circle, "", is_anywhere=False)
        elif "minProperties (" in fault or _SIZE in fault:
            # llguidance does not count the optional ones of `properties`
            name, change = "size", partial(_without, {"minProperties"})
        if not fault or (name in tried and not circle):
            break
        tried.append(name)
        schema = _changed(schema, partial(change, left_out))
        matcher = matcher_of(tokenizer, schema_source(schema))
    if matcher.is_error():
        return grammar_error(tokenizer, schema_source(schema), matcher.get_error())
    matcher.compute_bitmask()
    for warning in matcher.get_grammar_warnings():  # or of an unknown format, an annotation
        if keys := _UNKNOWN_KEYS.search(warning):
            left_out |= {*json.loads(keys[1])}
        elif "oneOf" in warning:
            left_out.add("oneOf")
        elif _SIZE in warning:
            left_out.add("maxProperties")
    unenforced = tuple(sorted(left_out))
    if unenforced and (doubt := find_doubt(json.loads(source.text))):
        path, what = doubt
        message = f"nothing here can check {what}, so that {', '.join(unenforced)} cannot be kept"
        return GrammarError(("json_schema", *path), message)
    return Enforceable(schema_source(schema), unenforced)


def _changed(schema: Any, change: Change, path: Path = ()) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = {}
    for name, value in change(schema, path).items():
        here = (*path, name)
        if name in _NOT_LOOSENED:
            made[name] = value
        elif isinstance(value, list):
            made[name] = [_changed(part, change, (*here, at)) for at, part in enumerate(value)]
        elif name in _WITH_NAMES and isinstance(value, dict):
            made[name] = {at: _changed(part, change, (*here, at)) for at, part in value.items()}
        else:
            made[name] = _changed(value, change, here)
    return made


def _without(names: set[str], left_out: set[str], schema: Schema, _: Path) -> Schema:
    left_out |= names & schema.keys()
    return {name: value for name, value in schema.items() if name not in names}


def _without_what_fails(
    tokenizer: "LLTokenizer", left_out: set[str], schema: Schema, path: Path
) -> Schema:
    """Leave out keywords that llguidance does not compile even alone, but the check knows."""
    alone = {name: schema[name] for name in {"pattern", "multipleOf"} & schema.keys()}
    if isinstance(patterns := schema.get("patternProperties"), dict):
        alone["patternProperties"] = dict.fromkeys(patterns, True)  # which may overlap
    failing = {
        name
        for name, value in alone.items()
        if not find_doubt({name: value})
        and matcher_of(tokenizer, schema_source({name: value})).is_error()
    }
    if "patternProperties" in failing:  # which says what is additional
        failing.add("additionalProperties")
    return _without(failing, left_out, schema, path)


def _without_circle(
    reference: str, left_out: set[str], schema: Schema, _: Path, *, is_anywhere: bool
) -> Schema:
    """Leave out a reference that leads back to itself, beside other keywords or anywhere."""

    def is_it(part: Any) -> bool:
        return isinstance(part, dict) and "$ref" in part and str(part["$ref"]).endswith(reference)

    made = schema.copy()
    if is_it(schema) and (is_anywhere or not schema.keys() <= _BESIDE_REF):
        del made["$ref"]
    if isinstance(parts := schema.get("allOf"), list):
        made["allOf"] = [part for part in parts if not is_it(part)]
    if made != schema:
        left_out.add("$ref")
    return made


def _as_is_read(left_out: set[str], schema: Schema, path: Path) -> Schema:
    """Write a schema as llguidance reads it right, and without the bounds that it cannot keep.

    Its dialect by name, its patterns with dashes escaped, its integers without a fraction.

    Raises:
        GrammarError: it has an integer that llguidance would take for another, or bounds within
            which hardly any integer would be right.
    """
    made = schema.copy()
    if "$schema" in schema:
        del made["$schema"]
        dialect = dialect_of(schema)
        if dialect in DIALECTS and "draft" in dialect and not path:  # one for all of it
            made["$schema"] = ("http:" if "/draft-0" in dialect else "https:") + dialect
    if schema.get("uniqueItems") is False:
        del made["uniqueItems"]
    for name in ("const", "enum"):
        if name in schema:
            made[name] = _exact_value(schema[name], (*path, name))
    if isinstance(pattern := schema.get("pattern"), str):
        made["pattern"] = with_literal_dashes(pattern)
    if isinstance(named := schema.get("patternProperties"), dict):
        made["patternProperties"] = {with_literal_dashes(at): named[at] for at in named}
    for name in _COUNTS:
        count = schema.get(name)
        if isinstance(count, float) and count.is_integer():
            count = made[name] = int(count)
        if isinstance(count, int) and count > _MAX_COUNT:
            made[name] = _MAX_COUNT
    kinds = schema.get("type")
    is_integer = kinds == "integer" or (isinstance(kinds, list) and "number" not in kinds)
    for name in _BOUNDS:
        bound, is_low = schema.get(name), "inimum" in name
        if isinstance(bound, float) and bound.is_integer():
            bound = made[name] = int(bound)
        if not isinstance(bound, int) or _is_exact(bound):
            continue
        if is_integer and is_low == (bound > 0):  # all within would be beyond 2^53
            raise _inexact(bound, (*path, name))
        if is_integer and abs(bound) < 2**64 and abs(float(bound)) == 2**63:
            made[name] = _INT64[is_low]
            continue
        left_out.add(name)
        wider = 2**63
        if abs(bound) < 2**63:
            wider = int(math.nextafter(float(bound), -math.inf if is_low else math.inf))
        if _is_exact(wider):
            made[name] = wider
        else:
            del made[name]
    return made


def _exact_value(value: Any, path: Path) -> Any:
    """Return what an output has to be with its integers written as such.

    Raises:
        GrammarError: llguidance would take one of them for another.
    """
    if isinstance(value, dict):
        return {name: _exact_value(part, (*path, name)) for name, part in value.items()}
    if isinstance(value, list):
        return [_exact_value(part, (*path, at)) for at, part in enumerate(value)]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not _is_exact(value) and value != _INT64[False]:
        raise _inexact(value, path)
    return value


def _is_exact(number: int) -> bool:
    """Return whether llguidance, which reads doubles and writes int64, writes `number` itself."""
    return abs(number) < 2**63 and int(float(number)) == number


def _inexact(number: int, path: Path) -> GrammarError:
    shown = str(number) if abs(number) < 10**40 else "this integer"
    message = f"{shown} cannot be exact: an integer beyond 2^53 has to be a double below 2^63"
    return GrammarError(("json_schema", *path), f"{message}; use a string, `choice` or `regex`")


# -- the helper process ----------------------------------------------------------------------------
#
# llguidance counts most of what it does and gives up by itself, but not all of it, and what runs
# inside a process cannot be stopped there.  The time is that of the processor: the load of the
# machine decides nothing.
#
# A task is a line in, an answer a line out.  A task is [kind, text, seconds of processor time,
# bytes of memory]; the answer has the text and unenforced of what can be enforced, or the path and
# message of an error.

BASE_MEMORY = 128 * 2**20  # bytes
MEMORY_PER_CHARACTER = 64  # bytes
_MAX_REMEMBERED = 256
_PATIENCE = 20  # how many times the timeout may pass on the wall, on a machine that is busy
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from batcher.decoding.verification import serve; serve()"
)
_STATUS = pathlib.Path("/proc/self/status")


class Trials:
    """Tries constraints; its process is started for the first one, and ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._passed: OrderedDict[ConstraintSource, Enforceable] = OrderedDict()
        self._lock = threading.Lock()
        atexit.register(self.close)

    def make(self, source: ConstraintSource, timeout: float) -> Enforceable | GrammarError:
        """Return what can be enforced of a constraint, or why it cannot be compiled in that time.

        timeout: seconds of processor time.  A constraint that has passed is not tried again.

        Raises:
            BatchdecodeError: no process can be started.
        """
        with self._lock:
            if source in self._passed:
                self._passed.move_to_end(source)
                return self._passed[source]
            found = self._try(source, timeout)
            if isinstance(found, Enforceable):
                self._passed[source] = found
                if len(self._passed) > _MAX_REMEMBERED:
                    self._passed.popitem(last=False)
            return found

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _try(self, source: ConstraintSource, timeout: float) -> Enforceable | GrammarError:
        if self._process is None or self._process.poll() is not None:
            self.close()
            try:
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our program
                    [sys.executable, "-P", "-c", _CODE, json.dumps(sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # beyond the reach of Ctrl-C
                )
            except OSError as error:
                raise BatchdecodeError(f"no process to compile constraints in: {error}") from error
        process = self._process
        max_bytes = BASE_MEMORY + MEMORY_PER_CHARACTER * len(source.text)
        answer, is_late = b"", False
        try:
            tasks, output = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
            with suppress(BrokenPipeError):  # it may end before it has read all of the task
                task = [source.kind, source.text, timeout, max_bytes]
                tasks.write(json.dumps(task).encode() + b"\n")
                tasks.flush()
            is_late = not select.select([output], [], [], _PATIENCE * timeout)[0]
            if not is_late:
                answer = output.readline()
                if not answer:
                    process.wait()
        finally:
            if not answer:  # nor will there be, if this was interrupted
                self.close()
        if answer:
            found = json.loads(answer)
            if "message" in found:
                return GrammarError(tuple(found["path"]), found["message"])
            enforced = ConstraintSource(source.kind, found["text"])
            return Enforceable(enforced, tuple(found["unenforced"]))
        if is_late or process.returncode == -signal.SIGPROF:
            message = f"it takes more than {timeout:g} seconds to compile; see --grammar-timeout"
        else:
            message = f"it takes more than {max_bytes // 2**20} MiB of memory to compile"
        return GrammarError((source.kind,), message)


TRIALS = Trials()


def serve() -> None:
    """Answer tasks until there are no more."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with_large_stack(_answer_all)


def _answer_all() -> None:
    from llguidance import LLTokenizer  # noqa: PLC0415 - an optional dependency

    tokenizer = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        kind, text, seconds, max_bytes = json.loads(line)
        if _STATUS.exists():  # so much more than the process has
            status = _STATUS.read_text().splitlines()
            [held] = [line.split()[1] for line in status if line.startswith("VmData:")]
            limit = int(held) * 1024 + max_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        found = enforceable_part(tokenizer, ConstraintSource(kind, text))
        signal.setitimer(signal.ITIMER_PROF, 0)
        if isinstance(found, GrammarError):
            answer = {"path": found.path, "message": str(found)}
        else:
            answer = {"text": found.source.text, "unenforced": found.unenforced}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
