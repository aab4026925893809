"""The part of a constraint that llguidance enforces, and a check of whole outputs without it.

Masks come from llguidance.  The check looks a choice up, validates JSON with `jsonschema` and exact
numbers, and matches a regex with the package `regex`.  Only the check refutes an output.  Where it
cannot decide, as for grammars, the result reports `constraint_check` "none".
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from msgspec import Struct

from batcher.decoding.grammars import (
    NESTED,
    ConstraintSource,
    ascii_classes,
    compile_source,
    grammar_error,
    matcher_of,
    parts_of,
    schema_source,
    with_large_stack,
    with_literal_dashes,
)
from batcher.errors import BatchdecodeError, Failure, GrammarError, Path
from batcher.result import ConstraintCheck, ConstraintOutcome

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MAX_KEPT = 256
_MAX_SECONDS = 1.0  # of one search: the package backtracks
_MAX_LENGTH, _MAX_COPIES = 4096, 20_000  # of a pattern, and of what it has to repeat
_LEAST_COUNT = re.compile(r"\{(\d+)")
_POSSESSIVE = re.compile(r"[*+?}]\+")  # to `regex`; to llguidance a repetition of a repetition
_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\$", re.DOTALL)
_SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_NUM_SHOWN = 20  # bytes of an output in a message
_MAX_LOOKS = 100_000  # at a part of an output with a part of a schema
_MAX_EXPONENT = 5000  # of a number that is divided
_LATEST = "https://json-schema.org/draft/2020-12/schema"
DIALECTS = {  # without http or https, which are often confused
    "//json-schema.org/draft-03/schema": "Draft3Validator",
    "//json-schema.org/draft-04/schema": "Draft4Validator",
    "//json-schema.org/draft-06/schema": "Draft6Validator",
    "//json-schema.org/draft-07/schema": "Draft7Validator",
    "//json-schema.org/draft/2019-09/schema": "Draft201909Validator",
    "//json-schema.org/draft/2020-12/schema": "Draft202012Validator",
    "//json-schema.org/schema": "Draft202012Validator",
}

Test = Callable[[str], bool]
"""Return whether a text matches; raise a TimeoutError after a second."""


@lru_cache(_MAX_KEPT)
def regex_test(pattern: str, *, is_whole: bool = False) -> Test | None:
    r"""Return a test whether a text holds, or is, a match; None if the pattern cannot be tested.

    It reads a pattern as masks do: `\d` and `\w` are ASCII.  `\s` of a schema's pattern is any
    Unicode space, `\s` of a regex an ASCII one.
    """
    import regex  # type: ignore[import-untyped]  # noqa: PLC0415 - optional, and without stubs

    def written(piece: re.Match[str]) -> str:
        if is_whole or piece[0] == "$":
            return r"\Z" if piece[0] == "$" else piece[0]
        return re.sub(r"\\(.)", with_spaces, piece[0], flags=re.DOTALL)

    def with_spaces(found: re.Match[str]) -> str:
        return {"s": f"[{_SPACES}]", "S": f"[^{_SPACES}]"}.get(found[1], found[0])

    copies = math.prod(max(1, int(count)) for count in _LEAST_COUNT.findall(pattern))
    if len(pattern) > _MAX_LENGTH or copies > _MAX_COPIES or _POSSESSIVE.search(pattern):
        return None
    expression = ascii_classes(_PIECE.sub(written, with_literal_dashes(pattern)))
    try:
        compiled = regex.compile(expression, regex.V1)
    except (regex.error, RecursionError):
        return None
    find = compiled.fullmatch if is_whole else compiled.search
    return lambda text: find(text, timeout=_MAX_SECONDS) is not None


class Look(NamedTuple):
    """The outcome of a check; problem: how the output breaks the constraint, None if it does not.

    is_decided: False if the check cannot tell.
    """

    problem: str | None
    is_decided: bool = True


UNDECIDED = Look(None, is_decided=False)


class UndecidedError(Exception):
    """The check of an output cannot be decided."""


class JsonCheck:
    """Validates outputs with one schema, given as JSON."""

    def __init__(self, text: str) -> None:
        import attrs  # noqa: PLC0415 - an optional dependency, as those below
        import jsonschema  # noqa: PLC0415 - slow to import, too
        from jsonschema import validators  # noqa: PLC0415 - as above
        from referencing import Registry  # noqa: PLC0415 - as above

        self._num_looks, self._validator = 0, None
        schema = json.loads(text, parse_float=Decimal)
        name = DIALECTS.get(dialect_of(schema))
        if name is None:
            return
        base = getattr(jsonschema, name)
        keywords = {**base.VALIDATORS, **_KEYWORDS}
        if isinstance(schema, dict) and "$schema" not in schema:  # it may be of an older dialect
            older = jsonschema.Draft7Validator.VALIDATORS
            keywords |= {name: older[name] for name in ("dependencies", "additionalItems")}
            keywords["items"] = partial(_items, older["items"], keywords["items"])
        if '"patternProperties"' in text:
            keywords |= _UNEVALUATED

        def is_number(_: object, value: object) -> bool:
            return isinstance(value, int | Decimal) and not isinstance(value, bool)

        def is_integer(_: object, value: Any) -> bool:
            return is_number(_, value) and value == Decimal(value).to_integral_value()

        made: Any = validators.extend(  # type: ignore[no-untyped-call]  # its stub has no types
            base,
            {keyword: partial(self._look_at_part, check) for keyword, check in keywords.items()},
            type_checker=base.TYPE_CHECKER.redefine_many(
                {"number": is_number, "integer": is_integer}
            ),
        )
        made.evolve = attrs.evolve  # a `$schema` within would make it another class
        self._validator = made(schema, registry=Registry())  # one that fetches nothing

    def look(self, output: bytes) -> Look:
        repeated: list[str] = []  # names that an object has twice; the last value of each counts

        def refuse_constant(name: str) -> None:
            raise ValueError(f"{name} is not JSON")

        def last_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            value = dict(pairs)
            if len(value) < len(pairs):
                repeated.extend(name for name, _ in pairs)
            return value

        try:
            value = json.loads(
                output.decode(),
                parse_int=Decimal,
                parse_float=Decimal,
                parse_constant=refuse_constant,
                object_pairs_hook=last_of_each,
            )
        except ValueError as error:
            return Look(f"not valid JSON: {error}")
        except (ArithmeticError, RecursionError):
            return UNDECIDED
        if self._validator is None:
            return UNDECIDED
        self._num_looks = 0
        try:
            first = next(self._validator.iter_errors(value), None)
        except Exception:  # noqa: BLE001 - an odd schema may make the library raise anything
            return UNDECIDED
        if first is None:  # another parser may take the first value of a repeated name
            return UNDECIDED if repeated else Look(None)
        if first.validator is None:  # the schema false
            return Look(f"`{first.json_path}` has a value that the schema does not allow")
        return Look(f"`{first.json_path}` violates `{first.validator}` of the schema")

    def _look_at_part(self, check: Callable[..., Any], *arguments: Any) -> Any:
        self._num_looks += 1
        if self._num_looks > _MAX_LOOKS:
            raise UndecidedError
        return check(*arguments)


def dialect_of(schema: Any) -> str:
    """Return the key in DIALECTS of a schema's `$schema`."""
    stated = schema.get("$schema") if isinstance(schema, dict) else None
    address = str(stated or _LATEST).partition(":")[2].rstrip("#")
    return address.replace("/hyper-schema", "/schema")


def _pattern_test(pattern: str) -> Test:
    test = regex_test(pattern)
    if test is None:
        raise UndecidedError
    return test


def _keeps(kind: str, holds: Callable[[Any, Any], bool]) -> Callable[..., Iterator[Any]]:
    """Return the check of a keyword that applies to one kind of value."""

    def check(validator: Any, stated: Any, value: Any, _: Any) -> Iterator[Any]:
        from jsonschema import ValidationError  # noqa: PLC0415 - an optional dependency

        if validator.is_type(value, kind) and not holds(stated, value):
            yield ValidationError(f"not as {stated} states")

    return check


def _pattern_properties(validator: Any, patterns: Any, value: Any, _: Any) -> Iterator[Any]:
    if not validator.is_type(value, "object"):
        return
    for pattern, schema in patterns.items():
        test = _pattern_test(pattern)
        for name, part in value.items():
            if test(name):
                yield from validator.descend(part, schema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, rest: Any, value: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(value, "object"):
        return
    named = schema.get("properties", {})
    tests = [_pattern_test(pattern) for pattern in schema.get("patternProperties", {})]
    for name, part in value.items():
        if name not in named and not any(test(name) for test in tests):
            yield from validator.descend(part, rest, path=name)


def _items(
    in_turn: Callable[..., Any], all_: Callable[..., Any], validator: Any, items: Any, *rest: Any
) -> Iterator[Any]:
    yield from (in_turn if isinstance(items, list) else all_)(validator, items, *rest) or ()


def _is_multiple(divisor: Any, value: Any) -> bool:
    if isinstance(value, Decimal) and abs(value.adjusted()) > _MAX_EXPONENT:
        raise UndecidedError
    return not Fraction(value) % Fraction(divisor)


def _undecided(*_: Any) -> Iterator[Any]:
    raise UndecidedError


_KEYWORDS: dict[str, Callable[..., Any]] = {
    "pattern": _keeps("string", lambda pattern, value: _pattern_test(pattern)(value)),
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "multipleOf": _keeps("number", _is_multiple),
}
# The library matches patterns itself here, without a time limit.
_UNEVALUATED = {"unevaluatedProperties": _undecided, "unevaluatedItems": _undecided}


def find_doubt(schema: Any) -> tuple[Path, str] | None:
    """Return the path and the name of a part that JsonCheck cannot decide, or None."""
    if dialect_of(schema) not in DIALECTS:
        return ("$schema",), f"a schema of the dialect {schema['$schema']!r}"
    has_patterns = False
    for path, part in parts_of(schema):
        named = part.get("patternProperties")
        patterns = [*named] if isinstance(named, dict) else []
        has_patterns |= bool(patterns)
        for pattern in [part.get("pattern"), *patterns]:
            if isinstance(pattern, str) and regex_test(pattern) is None:
                return path, f"the pattern {pattern!r}"
    for path, part in parts_of(schema) if has_patterns else ():
        for name in _UNEVALUATED & part.keys():
            return (*path, name), f"`{name}` with patternProperties"
    return None


class Judgement(NamedTuple):
    """The fields of a result about its constraint; failure: set if the output breaks it."""

    constraint: ConstraintOutcome | None = None
    check: ConstraintCheck | None = None
    failure: Failure | None = None


class Verifier:
    """Checks outputs of one constraint."""

    def __init__(self, source: ConstraintSource) -> None:
        self._source = source

    @cached_property
    def _choices(self) -> list[bytes]:
        return [text.encode() for text in json.loads(self._source.text)]

    @cached_property
    def _json_check(self) -> JsonCheck:
        return JsonCheck(self._source.text)

    def look(self, output: bytes) -> Look:
        shown = output[:_NUM_SHOWN].decode(errors="replace")
        shown = repr(shown + "…" if len(output) > _NUM_SHOWN else shown)
        match self._source.kind:
            case "choice":
                is_kept = output in self._choices
                return Look(None if is_kept else f"{shown} is not one of the choices")
            case "json_schema":
                return self._json_check.look(output)
            case "regex":
                test = regex_test(self._source.text, is_whole=True)
                if test is None:
                    return UNDECIDED
                try:
                    is_kept = test(output.decode())
                except UnicodeDecodeError:
                    is_kept = False
                except TimeoutError:
                    return UNDECIDED
                return Look(None if is_kept else f"{shown} does not match")
            case _:
                return UNDECIDED

    def can_begin(self, output: bytes) -> bool:
        """Return False if no complete output can start with this one."""
        is_choice = self._source.kind == "choice"
        return not is_choice or any(choice.startswith(output) for choice in self._choices)

    def judge(
        self, output: bytes, look: Look, *, is_ended: bool, accepts: Callable[[], bool]
    ) -> Judgement:
        """Return the fields of the result.

        is_ended: the model ended the output.  accepts: decides a cut output if `look` does not.
        """
        is_whole = look.problem is None if look.is_decided else is_ended or accepts()
        problem = look.problem if is_ended or not self.can_begin(output) else None
        message = f"the output breaks its constraint: {problem}"
        return Judgement(
            "complete" if is_whole else "incomplete",
            None if look.is_decided or not is_whole else "none",
            None if problem is None else Failure("constraint-error", message),
        )


# -- the part of a constraint that llguidance enforces ---------------------------------------------
#
# A loosened JSON schema allows every output of the schema and more: it lacks the keywords that
# llguidance cannot enforce.  The check of the whole output decides those.  A schema is refused if
# the check cannot decide it.  llguidance's option `lenient` ignores unknown keywords and reads
# `oneOf` as `anyOf`.  Of the bounds of int64, the lower one leaves out the next 1,024 integers,
# which llguidance cannot write.

_INT64 = {True: -(2**63) + 1024, False: 2**63 - 1}  # its bounds, as llguidance can keep them
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MAX_COUNT = 2**32 - 1  # llguidance reads no larger one, and no output reaches it
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_WITH_NAMES = {"properties", "patternProperties", "$defs", "definitions"}
# values, or schemas that an output need not keep
_NOT_LOOSENED = {
    *("const", "enum", "default", "examples"),
    *("not", "if", "then", "else", "contains", "propertyNames"),
}
_SIZE = "min/maxProperties"  # in a warning: maxProperties is enforced in part
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[.*\])")

Schema = dict[str, Any]
Change = Callable[[Schema, Path], Schema]


class Enforceable(Struct, frozen=True):
    """A constraint as it is compiled, and the keywords of a schema that it leaves out."""

    source: ConstraintSource
    unenforced: tuple[str, ...] = ()


def _loosened(tokenizer: "LLTokenizer", source: ConstraintSource) -> Enforceable:
    """Return what llguidance can enforce of a schema."""
    left_out: set[str] = set()
    given = json.loads(source.text)

    def without(names: set[str], schema: Schema) -> Schema:
        left_out.update(names & schema.keys())
        return {name: value for name, value in schema.items() if name not in names}

    def without_failing(schema: Schema, _: Path) -> Schema:
        alone = {name: schema[name] for name in {"pattern", "multipleOf"} & schema.keys()}
        if isinstance(patterns := schema.get("patternProperties"), dict):
            alone["patternProperties"] = dict.fromkeys(patterns, True)  # they may overlap
        failing = {
            name
            for name, value in alone.items()
            if not find_doubt({name: value})
            and matcher_of(tokenizer, schema_source({name: value})).is_error()
        }
        if "patternProperties" in failing:  # they define what is additional
            failing.add("additionalProperties")
        return without(failing, schema)

    def fault() -> str:
        warnings = (text for text in matcher.get_grammar_warnings() if _SIZE in text)
        return matcher.get_error() or next(warnings, "")

    schema = _changed(given, partial(_as_is_read, left_out))
    matcher = matcher_of(tokenizer, schema_source(schema))
    # llguidance does not count the optional ones of `properties`
    sizes: Change = lambda part, _: without({"minProperties"}, part)  # noqa: E731
    for _ in range(2):
        said = fault()
        if not said:
            break
        is_size = "minProperties (" in said or _SIZE in said
        schema = _changed(schema, sizes if is_size else without_failing)
        matcher = matcher_of(tokenizer, schema_source(schema))
    if matcher.is_error():
        raise grammar_error(tokenizer, schema_source(schema), matcher.get_error())
    matcher.compute_bitmask()
    for warning in matcher.get_grammar_warnings():  # or of an unknown format, an annotation
        if keys := _UNKNOWN_KEYS.search(warning):
            left_out |= {*json.loads(keys[1])}
        elif "oneOf" in warning:
            left_out.add("oneOf")
        elif _SIZE in warning:
            left_out.add("maxProperties")
    unenforced = tuple(sorted(left_out))
    if unenforced and (doubt := find_doubt(given)):
        path, what = doubt
        message = f"{what} cannot be checked, so `{'`, `'.join(unenforced)}` cannot be enforced"
        raise GrammarError(("json_schema", *path), message)
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


def _as_is_read(left_out: set[str], schema: Schema, path: Path) -> Schema:
    """Return a schema that llguidance reads correctly, without the bounds it cannot enforce."""
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
    """Return a value whose integers have no fraction."""
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
    return abs(number) < 2**63 and int(float(number)) == number


def _inexact(number: int, path: Path) -> GrammarError:
    shown = str(number) if abs(number) < 10**40 else "this integer"
    message = f"{shown} cannot be exact: an integer beyond 2^53 has to be a double below 2^63"
    return GrammarError(("json_schema", *path), f"{message}; use a string, `choice` or `regex`")


# -- the helper process ----------------------------------------------------------------------------
#
# llguidance limits most of its work itself, but not all of it, and a thread cannot be stopped.  So
# a constraint is compiled in another process first.  Its time is processor time, which the load of
# the machine does not change.
#
# A task is a line [kind, text, seconds of processor time, bytes of memory].  The answer is a line
# with the fields of an Enforceable, or the path and message of an error.

BASE_MEMORY = 128 * 2**20  # bytes
MEMORY_PER_CHARACTER = 64  # bytes
_MAX_REMEMBERED = 256
_PATIENCE = 20  # timeouts of wall-clock time, on a busy machine
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from batcher.decoding.verification import serve; serve()"
)
_STATUS = pathlib.Path("/proc/self/status")


class Trials:
    """Compiles constraints in a separate process, each once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.make = lru_cache(_MAX_REMEMBERED)(self._try)
        atexit.register(self.close)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _try(self, source: ConstraintSource, timeout: float) -> Enforceable:
        """Return the part that can be enforced; timeout: seconds of processor time."""
        max_bytes = BASE_MEMORY + MEMORY_PER_CHARACTER * len(source.text)
        task = json.dumps([source.kind, source.text, timeout, max_bytes]).encode() + b"\n"
        with self._lock:
            process = self._started()
            answer, is_late = b"", False
            try:
                tasks, output = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
                with suppress(BrokenPipeError):  # it may end before it reads all of the task
                    tasks.write(task)
                    tasks.flush()
                is_late = not select.select([output], [], [], _PATIENCE * timeout)[0]
                if not is_late:
                    answer = output.readline()
                    if not answer:
                        process.wait()
            finally:
                if not answer:  # also if this was interrupted
                    self.close()
        if not answer:
            why = f"{max_bytes // 2**20} MiB of memory to compile"
            if is_late or process.returncode == -signal.SIGPROF:
                why = f"{timeout:g} seconds to compile; see --grammar-timeout"
            raise GrammarError((source.kind,), f"it takes more than {why}")
        found = json.loads(answer)
        if "message" in found:
            raise GrammarError(tuple(found["path"]), found["message"])
        return Enforceable(ConstraintSource(source.kind, found["text"]), tuple(found["unenforced"]))

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            try:
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our program
                    [sys.executable, "-P", "-c", _CODE, json.dumps(sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # so that Ctrl-C does not reach it
                )
            except OSError as error:
                raise BatchdecodeError(f"cannot start the constraint compiler: {error}") from error
        return self._process


TRIALS = Trials()


def serve() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with_large_stack(_answer_all)


def _answer_all() -> None:
    from llguidance import LLTokenizer  # noqa: PLC0415 - an optional dependency

    tokenizer = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        kind, text, seconds, max_bytes = json.loads(line)
        if _STATUS.exists():  # the limit is on top of the memory in use
            status = _STATUS.read_text().splitlines()
            [held] = [line.split()[1] for line in status if line.startswith("VmData:")]
            limit = int(held) * 1024 + max_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        found = Enforceable(ConstraintSource(kind, text))
        try:
            if kind == "json_schema":
                found = _loosened(tokenizer, found.source)
            else:
                compile_source(tokenizer, found.source)
            answer: dict[str, object] = {"text": found.source.text, "unenforced": found.unenforced}
        except GrammarError as error:
            answer = {"path": error.path, "message": str(error)}
        except RecursionError:
            answer = {"path": (kind,), "message": NESTED}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
