"""The folder `cli` is installed as `batchdecode`: users get no package of a name so common."""

import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
import yaml
from process import ENVIRONMENT, lines_of, workload

import cli

ROOT = Path(cli.__file__).parents[1]
OUTSIDE = {name: text for name, text in ENVIRONMENT.items() if name != "PYTHONPATH"}


def test_the_folder_cli_never_imports_itself_by_name():
    files = sorted(Path(cli.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    for path in files:
        found = re.search(r"^ *(from|import) (cli|batchdecode)\b", path.read_text(), re.MULTILINE)
        assert found is None, path


@pytest.fixture(scope="module", params=[[], ["--editable"]], ids=["wheel", "editable"])
def scripts(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    [packages] = folder.glob("lib/*/site-packages")
    needed = [path for path in sys.path if path.endswith("site-packages")]
    needed.append(sysconfig.get_path("purelib"))
    (packages / "0.pth").write_text("\n".join(needed))  # the first; no .pth of theirs is read
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([*pip, *offline, *request.param, ROOT], env=OUTSIDE, check=True)
    return folder / "bin"


def output_of(*command, cwd, **environment):
    environment = OUTSIDE | environment
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, check=False)
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.mark.heavy
def test_an_install_has_the_command_all_of_a_page_and_no_package_named_cli(scripts, tmp_path):
    importing = (
        "import batchdecode.main, batcher; import importlib.util as u; print(u.find_spec('cli'))"
    )
    assert output_of(scripts / "python", "-c", importing, cwd=tmp_path) == (0, b"None\n", "")
    shown = output_of(scripts / "batchdecode", "--version", cwd=tmp_path)
    assert shown[1].startswith(b"batchdecode ")
    assert output_of(scripts / "python", "-m", "batchdecode", "--version", cwd=tmp_path) == shown
    (tmp_path / "requests.jsonl").write_bytes(lines_of(*workload(3)))
    command = [scripts / "batchdecode", "trace", "requests.jsonl", "--format", "html"]
    status, page, said = output_of(*command, cwd=tmp_path)
    assert (status, said) == (0, "")
    folder = ROOT / "batcher" / "page" / "assets"
    assert all(asset.read_bytes() in page for asset in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "where"), [("decode", "batcher.decode"), ("nothing", "import batcher")]
)
def test_who_looks_for_the_library_in_the_command_is_told_its_name(name, where):
    with pytest.raises(AttributeError, match=rf"the library is called batcher \({where}\)"):
        getattr(cli, name)


@pytest.mark.heavy
@pytest.mark.parametrize("options", [[], ["--help"]], ids=["run", "help"])
def test_a_package_named_cli_of_the_user_s_own_breaks_nothing(scripts, tmp_path, options):
    (tmp_path / "requests.jsonl").write_bytes(lines_of(*workload(3)))
    arguments = ["run", "requests.jsonl", "-q", *options]
    expected = output_of(scripts / "batchdecode", *arguments, cwd=tmp_path)
    assert expected[0] == 0
    assert expected[1]
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "__init__.py").write_text("raise RuntimeError('this is not ours')\n")
    own = {"PYTHONPATH": str(tmp_path)}
    assert output_of(scripts / "batchdecode", *arguments, cwd=tmp_path) == expected
    assert output_of(scripts / "batchdecode", *arguments, cwd=tmp_path, **own) == expected
    module = [scripts / "python", "-m", "batchdecode", *arguments]
    assert output_of(*module, cwd=tmp_path, **own) == expected


def test_continuous_integration_runs_every_python_that_is_claimed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = re.findall(r":: (3\.\d+)", "\n".join(project["classifiers"]))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert set(claimed) <= set(workflow["jobs"]["tests"]["strategy"]["matrix"]["python"])
    assert project["requires-python"] == f">={claimed[0]}"
