"""The house has no circles: no modules import each other, however late the import stands."""

import ast
from graphlib import TopologicalSorter
from itertools import product
from pathlib import Path

import pytest

import batcher
from batcher.errors import InvariantError
from batcher.lifecycle import MOVES, State

ROOT = Path(__file__).parents[1]
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("batcher", "cli")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imports_of(name):
    """Yield the modules that a module imports, in functions too; types alone do not count."""
    path = PATHS[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler | ast.match_case):
            todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def test_no_modules_import_each_other():
    modules = {name for name, path in PATHS.items() if path.name != "__init__.py"}
    graph = {name: {*imports_of(name)} & modules - {name} for name in modules}
    assert sum(map(len, graph.values())) > len(graph)
    TopologicalSorter(graph).prepare()  # a CycleError names the modules of a circle


@pytest.mark.parametrize(("state", "move"), list(product(State, MOVES)))
def test_every_move_is_in_the_table_or_refused(state, move):
    if state in move:
        assert move[state] is not state
    else:
        with pytest.raises(InvariantError, match=f"{state} sequence cannot {move.name}"):
            move[state]


def test_a_sequence_ends_once_and_its_state_is_assigned_by_moves_alone():
    assert not any(State.FINISHED in move for move in MOVES)
    found = 0
    texts = {path: path.read_text() for path in Path(batcher.__file__).parent.rglob("*.py")}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)) if ".state" in text else ():
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr == "state":
                    value, who = node.value, ast.unparse(target.value)
                    assert isinstance(value, ast.Subscript), f"{path}:{node.lineno}"
                    assert ast.unparse(value.slice) == f"{who}.state", f"{path}:{node.lineno}"
                    found += 1
    assert found >= 5
