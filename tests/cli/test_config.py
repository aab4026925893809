import json

import pytest
from process import ROOT, batchdecode, lines_of, refused, workload
from typer.testing import CliRunner

from cli.commands import COMMANDS, app, command_of
from cli.config import ConfigError, model_settings
from cli.mistakes import unknown_variables


@pytest.fixture
def check(tmp_path, capfd):
    (tmp_path / "in").write_text('{"prompt":"x","max_tokens":12}\n')

    def check(text, *arguments, **environment):
        path = tmp_path / f"{abs(hash(text))}.yaml"
        path.write_text(text)
        command = ["check", str(tmp_path / "in"), "--json", "--config", str(path), *arguments]
        done = CliRunner().invoke(app, command, env=environment, prog_name="batchdecode")
        done.plan = capfd.readouterr().out
        return done

    return check


def batch_of(done):
    assert done.exit_code == 0, done.output
    return json.loads(done.plan)["batch"]


def test_one_file_serves_all_commands_and_flags_go_before_it(check):
    assert batch_of(check("")) == 8
    assert batch_of(check("batch: 2")) == 2
    assert batch_of(check("batch: 2", BATCHDECODE_BATCH="3")) == 3
    assert batch_of(check("batch: 2", "-b", "4", BATCHDECODE_BATCH="3")) == 4
    assert batch_of(check("batch:")) == 8
    assert batch_of(check("keep-order: true\nkeep_going: yes\nstep-delay: 1.5\nbatch: 3")) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seqs: 8\n", ":1:1: unknown setting max_num_seqs; use batch"),
        ("enable-prefix-caching: true\n", "caching; use prefix-cache: on"),
        ("batch: 3\n\nquit: true", ":3:1: unknown setting quit; did you mean quiet?"),
        ("live: sometimes", None),  # an option of another command
        ("a: [", ":1:5: "),
        ("llm:\n  a:\n    b: 1", ":2:3: a: expected a single value"),
        ("simulated:\n  zzz: 3", ":2:3: unknown setting zzz (known: eos_"),
        ("llm:\n  max_attempts: 0", ":2:3: max_attempts must be an integer from 1 to 100, not 0"),
        ("simulated:\n  eos_rate: 2", ":2:3: eos_rate must be a number from 0 to 1, not 2"),
        ("- a\n- b", "not a list of settings"),
        ("\x00", "cannot read"),
        ("? [1]\n: 2", ":1:3: this is not a name of a setting"),
        ("batch: 3.7", ":1:1: batch must be an integer from 1 to 1,048,576, not 3.7"),
        ("output: 2024-99-99", ":1:1: output: month must be in 1..12"),
        ('model: "\\ud800"', ":1:8: a lone surrogate stands for no character"),
        ("model: !!timestamp x", ":1:8: no tags like timestamp, write the value"),
        ("a: " + "[" * 10_000, ":1:11: nested too deeply"),
        ("a: &a [x]\nb: *a", ":2:4: aliases are not allowed; write the value"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_its_place(check, text, message):
    done = check(text)
    assert done.exit_code != 0 or message is None
    if message is not None:
        assert message in str(done.exception)


MISTAKES = """\
bacth: 3
batch: x
live: 3
1: 2
simulated:
  seed: x
  sede: 1
  seed: 2
llm: 3
seed: [1]
seed: 1
seed: 2
"""


def test_all_that_is_wrong_in_the_file_is_said_at_once_and_very_much_counted(check, tmp_path):
    (tmp_path / "all.yaml").write_text(MISTAKES)
    assert refused("check", "in", "--config", "all.yaml", cwd=tmp_path) == (
        "error: all.yaml:1:1: unknown setting bacth; did you mean batch?\n"
        'error: all.yaml:2:1: batch must be an integer from 1 to 1,048,576, not "x"\n'
        "error: all.yaml:3:1: live must be auto, always, plain or never, not 3\n"
        "error: all.yaml:4:1: 1 is not a name of a setting, since it is not text\n"
        'error: all.yaml:6:3: seed must be an integer, not "x"\n'
        "error: all.yaml:7:3: unknown setting sede; did you mean seed?\n"
        "error: all.yaml:8:3: seed is already set in line 6\n"
        "error: all.yaml:9:1: llm: write its settings below it, each with a value\n"
        "error: all.yaml:10:1: seed: expected a single value\n"
        "error: all.yaml:11:1: seed is already set in line 10\n"
        "error: all.yaml:12:1: seed is already set in line 10\n"
        "error: 11 mistakes in all.yaml\n"
    )
    (tmp_path / "all.yaml").write_text("".join(f"zz{number}: 1\n" for number in range(1234)))
    done = batchdecode("check", "in", "--config", "all.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("unknown setting") == 50
    assert done.stderr.endswith("... and 1,184 more\nerror: 1,234 mistakes in all.yaml\n")


@pytest.mark.parametrize("option", ["--config", "--profile"])
def test_a_file_without_an_end_is_refused_before_it_is_read_whole(option, tmp_path):
    endless = tmp_path / "endless.yaml"
    endless.symlink_to("/dev/zero")
    command = ["trace", "-", option, str(endless)]
    assert refused(*command, stdin=b'{"prompt":"x","max_tokens":1}\n') == (
        f"error: cannot read {endless}: it is larger than 1 MiB, and no file of settings is\n"
    )


def test_each_kind_of_model_has_a_section_of_its_own(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read nowhere.yaml: No such file"):
        model_settings("nowhere.yaml")
    path = tmp_path / "settings.yaml"
    path.write_text("llm:\n  timeout: 2.5\nbatch: 3\nsimulated:\n  seed: 7\n  eos_rate: 0.5\n")
    assert model_settings(str(path)) == {
        "model_settings": {"seed": 7, "eos_rate": 0.5},
        "llm_settings": {"timeout": 2.5},
    }


REQUESTS = ROOT / "samples/requests.jsonl"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_reads_its_options_from_the_environment(name, monkeypatch):
    command = command_of(name)
    texts = [
        param.name
        for param in command.params
        if param.param_type_name == "option"
        and param.type.name == "text"
        and not (param.multiple or param.callback)
    ]
    for option in texts:
        monkeypatch.setenv(f"BATCHDECODE_{option.upper()}", "said")
    context = command.make_context(
        name, [], resilient_parsing=True, auto_envvar_prefix="BATCHDECODE"
    )
    assert {option: context.params[option] for option in texts} == dict.fromkeys(texts, "said")


@pytest.mark.parametrize(
    "command",
    [["run", REQUESTS, "-q"], ["plan", REQUESTS, "--slo", "e2e=500", "--search", "rate", "-q"]],
    ids=lambda command: command[0],
)
def test_the_environment_counts_as_the_option_does(command):
    by_option = batchdecode(*command, "--batch", "3")
    by_environment = batchdecode(*command, BATCHDECODE_BATCH="3")
    assert by_option.returncode == by_environment.returncode == 0
    assert by_option.stdout == by_environment.stdout != batchdecode(*command).stdout


@pytest.fixture
def trace(tmp_path):
    requests, trace = tmp_path / "requests.jsonl", tmp_path / "run.trace.jsonl"
    requests.write_bytes(lines_of(*workload(3)))
    batchdecode("run", requests, "-q", "--trace", trace)
    return trace


@pytest.mark.parametrize("below", [[], ["why", "r0"]], ids=["trace", "trace why"])
def test_what_is_set_for_running_requests_means_nothing_to_a_trace(below, trace):
    plain = batchdecode("trace", *below, trace)
    config = ROOT / "samples/config.yaml"
    told = batchdecode(
        "trace", *below, trace, BATCHDECODE_BATCH="3", BATCHDECODE_CONFIG=str(config)
    )
    assert (told.returncode, told.stderr, told.stdout) == (0, "", plain.stdout)
    refused = batchdecode("trace", *below, trace, "--batch", "3")
    assert (refused.returncode, refused.stdout) == (2, b"")


def test_what_plan_searches_may_be_set_for_others_and_unknown_names_are_warned_of(monkeypatch):
    command = ["plan", REQUESTS, "--slo", "e2e=500", "-q"]
    assert batchdecode(*command, BATCHDECODE_BATCH="3").returncode == 0
    assert batchdecode(*command, "--batch", "3").returncode == 2
    done = batchdecode("check", REQUESTS, BATCHDECODE_BACTH="4", BATCHDECODE_API_KEY="secret")
    assert done.returncode == 0
    assert done.stderr == (
        "warning: BATCHDECODE_BACTH in the environment is not an option of any command; "
        "did you mean BATCHDECODE_BATCH?\n"
    )
    monkeypatch.setenv("BATCHDECODE_XYZ", "0")
    assert list(unknown_variables(["check"])) == [
        "BATCHDECODE_XYZ in the environment is not an option of any command"
    ]
