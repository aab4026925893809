"""BATCHDECODE_ and the name of an option hold for every command that has it."""

import pytest
from process import ROOT, batchdecode, lines_of, workload

from cli.commands import COMMANDS, command_of
from cli.mistakes import unknown_variables

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


def test_what_plan_searches_may_be_set_for_other_commands():
    command = ["plan", REQUESTS, "--slo", "e2e=500", "-q"]
    assert batchdecode(*command, BATCHDECODE_BATCH="3").returncode == 0
    assert batchdecode(*command, "--batch", "3").returncode == 2


def test_a_name_that_no_command_has_is_warned_of(monkeypatch):
    done = batchdecode("check", REQUESTS, BATCHDECODE_BACTH="4", BATCHDECODE_API_KEY="secret")
    assert done.returncode == 0
    assert done.stderr == (
        "warning: BATCHDECODE_BACTH in the environment is no option of any command; "
        "did you mean BATCHDECODE_BATCH?\n"
    )
    monkeypatch.setenv("BATCHDECODE_XYZ", "0")
    assert list(unknown_variables(["check"])) == [
        "BATCHDECODE_XYZ in the environment is no option of any command"
    ]
