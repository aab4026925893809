"""The house has no circles: no modules import each other, however late the import stands."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("batcher", "cli")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imports_of(name: str) -> Iterator[str]:
    """Yield the modules that a module imports, in functions too; types alone do not count."""
    path = PATHS[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    todo: list[ast.AST] = [tree]
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


def test_no_modules_import_each_other() -> None:
    modules = {name for name, path in PATHS.items() if path.name != "__init__.py"}
    graph = {name: {*imports_of(name)} & modules - {name} for name in modules}
    assert sum(map(len, graph.values())) > len(graph)
    TopologicalSorter(graph).prepare()  # a CycleError names the modules of a circle
