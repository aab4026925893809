"""The folder `cli` is installed under another name, so it must not know its own."""

import ast
from pathlib import Path

import cli


def test_the_folder_cli_never_imports_itself_by_name():
    files = sorted(Path(cli.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert not [name for name in names if name.split(".")[0] in {"cli", "batchdecode"}], (
                path
            )
