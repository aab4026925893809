"""What is said of a command line that is wrong: what was given, what is allowed, what is meant."""

import pytest
from process import batchdecode

FACTOR = "a number from 0.000001 to 1,000,000"


def refusal(*arguments, **environment):
    done = batchdecode(*arguments, stdin=b"", **environment)
    assert (done.returncode, done.stdout) == (2, b"")
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "-b", "x"], "--batch must be an integer from 1 to 1,048,576, not 'x'"),
        (["run", "--max-errors", "0"], "--max-errors must be an integer from 1, not 0"),
        (["trace", "--slot", "one"], "--slot must be an integer, not 'one'"),
        (["workload", "poisson", "--rate", "nan"], f"--rate must be {FACTOR}, not nan"),
        (["workload", "bursty", "--off", "-1"], "--off must be a number from 0 to 1,000,000, not"),
        (["run", "--trace", "-"], "--trace must be a file: stdout is for the results"),
    ],
)
def test_a_value_that_is_not_allowed(arguments, said):
    assert said in refusal(*arguments)


def test_a_long_value_is_not_repeated_in_full():
    assert len(refusal("run", "--live", "x" * 10_000)) < 150


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("BATCH", "x", "an integer from 1 to 1,048,576"),
        ("KEEP_ORDER", "maybe", "true or false"),
        ("COLOR", "pink", "auto, always or never"),
    ],
)
def test_a_variable_is_named_that_holds_what_is_not_allowed(name, value, allowed):
    variable = f"BATCHDECODE_{name}"
    said = refusal("run", **{variable: value})
    assert said == f"error: {variable} must be {allowed}, not {value!r}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--bach", "3"], "batchdecode run has no option --bach; did you mean --batch?"),
        (["chat"], "no command 'chat' (known: run, "),
        (["run", "--input", "x"], "give it without an option: batchdecode run FILE"),
        (["compare", "--ranks", "2"], "no option --ranks, which was removed; use --replicas"),
        (["run", "--open"], "run has no option --open\n"),
        (["run", "--model", "localhost:8000"], "did you mean openai:http://localhost:8000/v1?"),
        (["run", "--model", "openai:[::1]:80"], "a URL such as openai:http://[::1]:80/v1\n"),
        (["trace", "why", "--width"], "trace why has no option --width; trace has it"),
        (["--batch", "3", "run"], "batchdecode has no option --batch; run, check and others have"),
        (
            ["run", "--json"],
            "batchdecode run has no option --json; check, trace why and others have",
        ),
        (["run", "--max-num-seqs", "3"], "has no option --max-num-seqs; here it is --batch\n"),
        (["run", "--top-k", "3"], '--top-k; each request says it: {"top_k": ...}\n'),
        (["run", "--temp", "3"], "--temp; here it is --temperature\n"),
        (["schema", "--max-num-seqs"], "--max-num-seqs; run, check and others have --batch\n"),
        (["run", "--gpu_memory_utilization", "1"], "utilization; here it is --kv-memory\n"),
        (["run", "--kv_blocks", "3"], "run has no option --kv_blocks; did you mean --kv-blocks?"),
        (["run", "--batch"], "--batch needs a value, N\n(see batchdecode run --help)\n"),
        (["trace", "diff", "a"], "batchdecode trace diff needs B\n"),
        (["plan"], "batchdecode plan needs --slo LIMIT,...\n(see batchdecode plan --help)\n"),
        (["schema", "trace", "x"], "batchdecode schema takes KIND alone, not x as well\n"),
        (
            ["run", "a.jsonl", "b.jsonl"],
            "alone, not b.jsonl as well; of several INPUTs: cat FILE ... | batchdecode run -\n",
        ),
        (
            ["trace", "a.jsonl", "b.jsonl"],
            "; of two runs in step: batchdecode trace diff A B; of several files of requests as",
        ),
        (["run", "-batch", "3"], "run has no option -batch; did you mean --batch?\n(see "),
        (["trace", "x", "--format", "gant"], "svg or gantt, not 'gant'; did you mean gantt?\n"),
        (["plan", "x", "--slo", "ttft=1", "--search", "replica"], "did you mean replicas?\n"),
        (["--version=3"], "error: option '--version' does not take a value\n"),
        (["draft"], "error: no command 'draft'; did you mean draft diagnose?\n"),
        (["run", "--resume=twice"], "--resume=twice: use --resume or --resume=repair\n"),
    ],
)
def test_what_may_be_meant_is_told(arguments, said):
    assert said in refusal(*arguments)


def test_a_file_where_a_command_should_be_is_to_be_run(tmp_path):
    (tmp_path / "my requests.jsonl").touch()
    done = batchdecode("my requests.jsonl", cwd=tmp_path)
    assert done.stderr == (
        "error: no command 'my requests.jsonl'; did you mean: "
        "batchdecode run 'my requests.jsonl'?\n"
    )
