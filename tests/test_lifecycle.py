"""The table of legal moves is the only one there is."""

import ast
from itertools import product
from pathlib import Path

import pytest

import batcher
from batcher.errors import InvariantError
from batcher.lifecycle import MOVES, Move, State


@pytest.mark.parametrize(("state", "move"), list(product(State, MOVES)))
def test_every_move_is_in_the_table_or_refused(state: State, move: Move) -> None:
    if state in move:
        assert move[state] is not state
    else:
        with pytest.raises(InvariantError, match=f"{state} sequence cannot {move.name}"):
            move[state]


def test_a_sequence_ends_once() -> None:
    assert not any(State.FINISHED in move for move in MOVES)


def test_a_state_is_assigned_only_by_a_move_of_the_table() -> None:
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
