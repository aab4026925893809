"""What one plain request touches: `python tests/bench/path.py [engine | run] ...`, by default both.

Of each file of the project, how many functions are called and how many lines these have, from
`Engine()` or from the command line to the result.  Everything is imported before, but for what
needs packages that are not installed.
"""

import inspect
import json
import pkgutil
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType

sys.path.append(str(Path(__file__).parents[2]))  # cli/, which is installed as batchdecode

import batcher
import cli
from batcher import Engine, Request, SimulatedModel
from cli.commands import app

PACKAGES = (batcher, cli)
REQUEST = {"prompt": "The cat", "max_tokens": 5}


def through_the_engine() -> None:
    """Decode the request as a program does."""
    engine = Engine(SimulatedModel(), 8)
    engine.add(Request(**REQUEST))
    while engine.has_work:
        engine.step()


def through_the_command() -> None:
    """Decode the request as a person does."""
    with tempfile.TemporaryDirectory() as folder:
        requests = Path(folder, "requests.jsonl")
        requests.write_text(json.dumps(REQUEST))
        arguments = ["run", str(requests), "-o", f"{folder}/results.jsonl", "--quiet"]
        if app(arguments, prog_name="batchdecode", standalone_mode=False):
            raise SystemExit("the run has failed")


def called_during(work: Callable[[], None]) -> set[CodeType]:
    """Return the functions of the project that `work` calls, in whatever thread."""
    folders = tuple(f"{Path(package.__file__).parent}/" for package in PACKAGES)
    codes: set[CodeType] = set()

    def take_note(frame: FrameType, _event: str, _argument: object) -> None:
        codes.add(frame.f_code)

    threading.setprofile(take_note)
    sys.setprofile(take_note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {code for code in codes if code.co_filename.startswith(folders) and _is_function(code)}


def _is_function(code: CodeType) -> bool:
    """Return whether it is no module, no body of a class, and no part of another function."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")


def num_lines(code: CodeType) -> int:
    """Return how many lines a function has, its decorators included."""
    return max(line for *_, line in code.co_lines() if line) - code.co_firstlineno + 1


def report(name: str, codes: set[CodeType]) -> None:
    """Print a line for each file, the longest first, and the sums."""
    files: dict[str, list[CodeType]] = defaultdict(list)
    for code in codes:  # batcher may be installed elsewhere than cli
        path = Path(code.co_filename)
        top = next(parent for parent in path.parents if parent.name in {"batcher", "cli"})
        files[str(path.relative_to(top.parent))].append(code)
    lines = {path: sum(map(num_lines, codes)) for path, codes in files.items()}
    print(f"{name}: {len(files)} files, {len(codes)} functions, {sum(lines.values()):,} lines")
    for path in sorted(files, key=lambda path: (-lines[path], path)):
        functions = sorted(files[path], key=lambda code: (-num_lines(code), code.co_qualname))
        names = ", ".join(f"{code.co_name} {num_lines(code)}" for code in functions)
        print(f"  {lines[path]:5} {path}: {names}")


ROADS = {"engine": through_the_engine, "run": through_the_command}


def main(names: list[str]) -> None:
    """Print what the roads with these names touch."""
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                with suppress(ModuleNotFoundError):
                    import_module(module.name)
    for name in names or ROADS:
        report(name, called_during(ROADS[name]))


if __name__ == "__main__":
    main(sys.argv[1:])
