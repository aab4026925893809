"""What `package.module:name` names, and why it cannot be had."""

import pytest

from batcher.errors import BatchdecodeError
from batcher.foreign import RaisedError, import_object


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        name = f"own_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_what_is_not_there_is_not_there(module):
    name = module("def model():\n    pass\n")
    with pytest.raises(BatchdecodeError, match=rf"^{name} has no 'modal'; did you mean") as caught:
        import_object(f"{name}:modal", "model", "simulated")
    assert not isinstance(caught.value, RaisedError)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nx.model\n", "AttributeError: 'int' object has no attribute 'model'"),
        ("\nraise AttributeError\n", "AttributeError: "),
        ("\nimport math.nothing\n", "ModuleNotFoundError: No module named 'math.nothing'"),
        ("\nraise SystemExit(3)\n", "SystemExit: 3"),
        ("\ndef (\n", "SyntaxError: "),
        ("def __getattr__(name):\n    return None.model\n", "'NoneType' object has no attribute"),
    ],
)
def test_what_the_module_itself_raises_is_told_with_its_line(module, text, message):
    name = module(text)
    with pytest.raises(RaisedError) as caught:
        import_object(f"{name}:model", "model", "simulated")
    said = str(caught.value)
    assert said.startswith(f"cannot import {name}")
    assert message in said
    assert said.endswith(f"({name}.py, line 2)")
    assert f'{name}.py", line 2' in caught.value.raised.traceback
    assert "importlib" not in caught.value.raised.traceback


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("own.py:model", "own:model?"),
        ("own.py", "own:NAME?"),
        ("below/own.py:model", "below.own:model?"),
        ("below/own:model", "below.own:model?"),
        ("../elsewhere/own.py:model", "own:model, with PYTHONPATH={}/elsewhere?"),
        ("odd-name.py:model", None),
        ("missing.py:model", None),
    ],
)
def test_a_file_in_the_place_of_a_module_is_answered_with_the_module(
    spec, meant, tmp_path, monkeypatch
):
    for file in ("here/own.py", "here/below/own.py", "here/odd-name.py", "elsewhere/own.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(BatchdecodeError) as caught:
        import_object(spec, "model", "simulated")
    hint = f"(did you mean {meant.format(tmp_path.resolve())})" if meant else None
    assert (hint in str(caught.value)) if hint else "did you mean" not in str(caught.value)


def test_ctrl_c_while_a_module_is_imported_is_no_error_of_it(module):
    name = module("\nraise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        import_object(f"{name}:model", "model", "simulated")
