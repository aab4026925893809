"""The objects that people name on a command line as `package.module:name`."""

import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from batcher.attributes import ABSENT, attribute_of
from batcher.errors import BatchdecodeError
from batcher.forked import child_ends_here
from batcher.raised import RaisedError, raised


def import_object(spec: str, kind: str, known: str) -> object:
    """Return what `package.module:name` names; the current folder is importable.

    kind: what it is meant to be, for messages; known: what else it may be, likewise.

    Raises:
        BatchdecodeError: there is no such thing.
        RaisedError: the module's own code raised.
    """
    module_name, separator, name = spec.partition(":")
    if not (module_name and separator and name):
        raise BatchdecodeError(f"unknown {kind} {spec!r}, known: {known}, package.module:name")
    if not all(part.isidentifier() for part in module_name.split(".")) or module_name.endswith(
        ".py"
    ):
        raise BatchdecodeError(f"unknown {kind} {spec!r}: {module_name!r} is no package.module")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with child_ends_here():
            found: Any = import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the module's own code raises
        raise _not_imported(module_name, error) from error
    for part in name.split("."):
        holder = found
        try:
            found = attribute_of(holder, part)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as above, for it may have a `__getattr__`
            raise _not_imported(spec, error) from error
        if found is ABSENT:
            near = get_close_matches(name, dir(holder), n=1)
            hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
            raise BatchdecodeError(f"{module_name} has no {name!r}{hint}")
    return cast(object, found)


def _not_imported(what: str, error: BaseException) -> RaisedError:
    why = raised(error)
    return RaisedError(f"cannot import {what}: {why}", why)
