"""What is refused: a value, an option, a file; what is told of it, what is allowed and meant.

It is told in a line before anything is read, decoded or written.
"""

import shlex
import subprocess
import sys

import pytest
from process import ENVIRONMENT, ROOT, batchdecode, lines_of, refused, workload

TINY = ROOT / "samples" / "tiny.gguf"
REQUESTS = ROOT / "samples" / "requests.jsonl"
WHAT_IF = ROOT / "samples" / "what-if"
LOG = ROOT / "samples" / "timing" / "requests.jsonl"
PRICES = ROOT / "samples" / "timing" / "prices.yaml"
SHARE = "a number from 0 to 86,400"
INTERVAL = "from 0.000001 to 86,400"


@pytest.fixture
def refusal(tmp_path):
    (tmp_path / "in").write_bytes(lines_of(*workload(6)))
    (tmp_path / "mine.py").write_text("def model(prefixes):\n    return [1 for _ in prefixes]\n")
    (tmp_path / "other").write_text("mine\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def refusal(*arguments, stdin=b"", **environment):
        said = refused(*arguments, stdin=stdin, cwd=tmp_path, **environment)
        assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
        return said

    return refusal


COMMANDS = [
    # values
    ("", "Usage: batchdecode"),
    ("run -b x", "--batch must be an integer from 1 to 1,048,576, not 'x'"),
    ("run -b \u0661\u0662", "--batch must be an integer from 1 to 1,048,576, not '\u0661\u0662'"),
    ("run --max-rate 1_0", "not '1_0'"),
    ("run --step-delay nan", f"--step-delay must be {SHARE}, not nan"),
    ("run --trace -", "--trace must be a file: stdout is for the results"),
    ("trace --slot one", "--slot must be an integer, not 'one'"),
    ("schema nothing", "KIND must be request, result or trace, not 'nothing'"),
    # files
    ("run '\x1b[31mred\nline'", r"error: cannot read \x1b[31mred"),
    ("trace diff - -", "error: A and B are both stdin"),
    ("verify -", "<stdin> has no requests"),
    (f"calibrate {LOG}", "requests.jsonl has the times of requests; pass a log of step times"),
    ("calibrate", "error: <stdin>: 0 steps: at least 20 are needed"),
    ("calibrate --hardware h100", "error: unknown GPU h100 (did you mean h100-sxm?)"),
    ("calibrate -o p.txt", "error: --output p.txt: profiles are in .yaml or .yml files"),
    # names of options and commands
    ("run --bach 3", "batchdecode run has no option --bach; did you mean --batch?"),
    ("chat", "no command 'chat' (known: run, "),
    ("run --input x", "write the file without an option: batchdecode run FILE"),
    ("run --model localhost:8000", "did you mean openai:http://localhost:8000/v1?"),
    ("run --model openai:[::1]:80", "a URL such as openai:http://[::1]:80/v1\n"),
    ("trace why --width", "trace why has no option --width; trace has it"),
    ("--batch 3 run", "batchdecode has no option --batch; run, check and others have"),
    ("run --max-num-seqs 3", "has no option --max-num-seqs; use --batch\n"),
    ("run --top-k 3", '--top-k; set it as a field of each request: {"top_k": ...}\n'),
    ("run --temp 3", "--temp; use --temperature\n"),
    ("schema --max-num-seqs", "--max-num-seqs; run, check and others have --batch\n"),
    ("run --gpu_memory_utilization 1", "utilization; use --kv-memory\n"),
    ("run --kv_blocks 3", "run has no option --kv_blocks; did you mean --kv-blocks?"),
    ("run --batch", "--batch needs a value, N\n(see batchdecode run --help)\n"),
    ("trace diff a", "batchdecode trace diff needs B\n"),
    ("schema trace x", "batchdecode schema takes only KIND, not x\n"),
    ("trace a.l b.l", "; to compare two runs: batchdecode trace diff A B; for several files"),
    ("run --no-quiet", "run has no option --no-quiet; leave out --quiet\n(see "),
    ("run -batch 3", "run has no option -batch; did you mean --batch?\n(see "),
    ("trace x --format gant", "summary-json, not 'gant'; did you mean gantt?\n"),
    ("--version=3", "error: option '--version' does not take a value\n"),
    ("draft", "error: no command 'draft'; did you mean draft diagnose?\n"),
    ("run --resume=twice", "--resume=twice: use --resume or --resume=repair\n"),
    ("run in -o out --force --resume", "--force cannot be used with --resume"),
    ("run in -o out --retry-failed", "--retry-failed needs --resume"),
    ("run --stream --keep-order -o out", "error: --stream cannot be used with --keep-order: "),
    # schedules
    ("run in --policy priorty", "did you mean priority? (known: fcfs, priority, sjf,"),
    ("run in --capacity watermark", "--capacity has no effect without --kv-blocks"),
    ("run in --kv-blocks 9 --capacity watermark --watermark 1", "--watermark must be a share fr"),
    ("run in --aging 60", "--aging has no effect without a --policy other than fcfs"),
    ("run in --profile h200", "known: rtx4090_llama3.1-8b"),
    ("run in -b 3 --max-batch-tokens 2", "--max-batch-tokens 2 is less than the 3 slots"),
    ("run in --kv-blocks 16777216 --block-size 1048576", "not enough memory for the KV blocks"),
    ("run in --draft-tokens 4", "--draft-tokens has no effect without --draft"),
    (
        "run in --draft simulated --acceptance leviathan --draft-tree 2x2",
        "--acceptance leviathan does not work with --draft-tree",
    ),
    # models
    ("run /dev/null --model nope", "error: unknown model 'nope'"),
    ("run in --call-timeout 3", "--call-timeout works only with an LLM object without"),
    ("run in --kv-memory 1MB --kv-blocks 3", "--kv-memory cannot be used with --kv-blocks"),
    ("run in --kv-memory 1MB", "needs a model with a known size per"),
    (f"run in --model {TINY} --kv-memory 1kB", "holds 0 blocks of 16 tokens and 8,192 bytes"),
    (f"run in --model {TINY} --max-context 129", f"--max-context 129 is above the 128 of {TINY}"),
    ("run in --special-tokens-in-text", "needs a checkpoint or a model of transformers"),
    ("run in --chat --model mine:model", "a model with a chat template; mine:model has none\n"),
    *(
        (
            f"{command} --weights q8",
            "error: --weights is only for checkpoints (.gguf files, folders), not for ",
        )
        for command in ["run in", "check in", "verify in", "trace in", "compare in"]
    ),
    ("run in --device cuda", "--device is only for models of transformers (hf:...), not for "),
    (
        f"run in --model {TINY} --exact",
        f"only for models of transformers (hf:...), not for {TINY}\n",
    ),
    ("run in --model hf:gpt2 --weights q8", "--weights is only for checkpoints (.gguf files, f"),
    ("run in --max-rate 5", "--max-rate works only with a server, and simulated is not one"),
    ("check in --model SERVER", "only `batchdecode run` can use one"),
    ("run in --model SERVER --kv-blocks 8", "--kv-blocks has no effect on a server"),
    ("run in --model SERVER --extra-body {", "--extra-body, character 2: the line ends"),
    (
        """run in --model SERVER --extra-body '{"stream":false}'""",
        "the extra body cannot set `stream`",
    ),
    ("run in --workers 2 --stream", "--stream"),
    # what a run tells
    ("run in -o r --metrics-port 0 -q", "--metrics-port 0 prints its port: drop --quiet"),
    ("run in -o r --metrics-file no/m", "cannot write no/m: No such file or directory"),
    ("run in -o r --metrics-file /dev/null", "it is not a regular file"),
    ("run in -o r --metrics-file other", "the file has content of another kind"),
    ("run in -o r --metrics-file a --trace a", "they must be different files"),
    ("run in --otel localhost:4318", "--otel must be env or an address such as http://127.0.0.1:4"),
    ("run in --summary-json -", "write one of them to a file"),
    ("run in -o r --slo tfft=1", "unknown metric 'tfft'; known: queue, ttft, tpot, e2e"),
    ("run in -o r --timeseries t --timeseries-interval nan", f"{INTERVAL}, not nan"),
    (f"trace {REQUESTS} --play", "--play needs a terminal; use --format gantt or steps instead"),
    (f"trace {REQUESTS} --play --format steps", "--format does not work with --play, which shows"),
    (f"trace {REQUESTS} --speed 3", "--speed needs --play"),
    ("serve --port 0 --allow-origin https://a/b", "be an origin such as https://chat.example:3000"),
    ("serve --port 0 --workers 2 --trace=t", "needs --workers 1: it shows one engine"),
    # planning
    ("compare in --block-size 4,8", "--block-size has no effect without --kv-blocks or"),
    ("compare in --profile wall", "wall, the measured time, works only with run"),
    ("compare in --sort speed", "unknown column 'speed'; did you mean speedup? (known: throughput"),
    ("compare in --batch 8 --max-batch-tokens 4", "no combination of settings is valid"),
    (f"compare in --fleet {WHAT_IF}/fleet.yaml --replicas 4", "has no effect with --fleet"),
    ("compare -", "has no requests"),
    ("compare in --slo priority=3:e2e=1", "priority=3: no request has this priority (found: 0"),
    ("plan in --slo e2e=1 --batch 4", "remove --batch: --search batch finds it"),
    ("plan in --slo e2e=1 --policy fcfs,sjf", "plan takes one value"),
    ("plan in --slo e2e=1 --search rate", "all requests arrive at once"),
    ("plan in --slo e2e=1 --search speed", "replicas or rate, not 'speed'"),
    ("plan in --slo e2e=1 --goodput 0", "--goodput must be above 0"),
    (
        f"plan in --slo e2e=1 --fleet {WHAT_IF}/fleet.yaml",
        "--search batch does not work with --fleet",
    ),
    (
        f"compare no --prices {PRICES} --profile constant",
        "the GPU of constant is unknown: use a --",
    ),
    (
        f"plan no --slo e2e=1 --prices {PRICES} --profile l40s_llama3.1-8b_tp1",
        "unknown GPU of --prices l40s; known: rtx-4090, h100-sxm",
    ),
    ("compare in --plot p.pdf", "--plot p.pdf: expected FILE.svg or FILE.png"),
    (f"replay {LOG} --profile constant:1 --meta no.json", "cannot read no.json: No such file"),
    (f"replay {LOG}", "--profile is required"),
    (f"replay {LOG} --profile constant:1 --kv-blocks 3", "can never run with --kv-blocks 3"),
    (
        f"replay {LOG} --profile constant:1 --policy lpm --prefix-cache off",
        "the policy lpm needs a prefix cache",
    ),
    ("draft diagnose in --draft ngram", "--draft ngram has no probabilities to compare"),
    ("draft diagnose in --draft simulated --model simulated:0.8", "unknown model 'sim"),
    (
        """draft diagnose in --draft simulated --draft-fields '{"n": "\udcff"}'""",
        "--draft-fields: ",
    ),
    (
        """draft diagnose in --draft simulated --draft-fields '{"n": 2}'""",
        "'n' is unknown (known: ",
    ),
    (
        """draft diagnose in --draft simulated --draft-fields '{"top_k": "x"}'""",
        "--draft-fields: top_k must be an integer from ",
    ),
    ("draft diagnose - --draft simulated", "has no request to compare"),
]


@pytest.mark.parametrize(("command", "said"), COMMANDS)
def test_what_is_wrong_with_a_command_is_told_before_anything_is_done(command, said, refusal):
    if "--metrics" in command:
        pytest.importorskip("prometheus_client")
    if command.startswith("serve"):
        pytest.importorskip("starlette")
    words = shlex.split(command.replace("SERVER", "openai:http://127.0.0.1:1/v1"))
    assert said in refusal(*words)


@pytest.mark.parametrize(
    ("command", "stdin", "said"),
    [
        ("calibrate", '\n{"num_tokens":1}\n', "error: <stdin>:2: object missing required field"),
        ("verify -", '{"prompt":"x"}\n{"promt":"x"}\n', "1 invalid of 2 lines; nothing decoded."),
        ("verify -", '{"id":"a","prompt":"x"}\n' * 2, "duplicate-id"),
        ("compare -", '{"promt": "x"}\n{"prompt": "x"}\n', "1 invalid of 2 lines; nothing was sim"),
        ("compare -", '{"prompt": "x", "num_beams": 2}\n', "num_beams 2 cannot be simulated"),
        ("draft diagnose - --draft simulated", '{"prompt":"a","regex":"b"}', "has no request"),
        ("draft diagnose - --draft simulated", "{}", "nothing decoded"),
    ],
)
def test_what_is_wrong_with_an_input_is_told_before_anything_is_done(command, stdin, said, refusal):
    assert said in refusal(*command.split(), stdin=stdin.encode())


# A name that is None in sys.modules is not installed, for import and find_spec alike.
WITHOUT = "import sys; sys.modules.update({{{!r}: None}}); from cli.main import main; main()"


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("starlette", "serve", "serve"),
        ("prometheus_client", "run --metrics-file m", "metrics"),
        ("matplotlib", "compare - --plot p.svg", "plots"),
        ("opentelemetry", "run --otel env", "otel"),
        ("fsspec", "run s3://bucket/in.jsonl", "fsspec"),
    ],
)
def test_what_is_not_installed_is_told_with_what_installs_it(package, command, extra, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(package), *command.split()],
        env=ENVIRONMENT,
        input=b'{"prompt":"a"}',
        capture_output=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert f"pip install 'batchdecode[{extra}]'" in done.stderr.decode()
    assert list(tmp_path.iterdir()) == []


def test_a_long_value_is_not_repeated_in_full(refusal):
    assert len(refusal("run", "--live", "x" * 10_000)) < 150
    deep = '{"top_k":' + "[" * 5000 + "]" * 5000 + "}"
    said = refusal("draft", "diagnose", "in", "--draft", "simulated", "--draft-fields", deep)
    assert "--draft-fields: maximum recursion depth exceeded" in said


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("BATCH", "x", "an integer from 1 to 1,048,576"),
        ("KEEP_ORDER", "maybe", "true or false"),
        ("COLOR", "pink", "auto, always or never"),
    ],
)
def test_a_variable_is_named_that_holds_what_is_not_allowed(name, value, allowed, refusal):
    variable = f"BATCHDECODE_{name}"
    said = refusal("run", **{variable: value})
    assert said == f"error: {variable} must be {allowed}, not {value!r}\n"


def test_a_file_where_a_command_should_be_is_to_be_run(tmp_path):
    (tmp_path / "my requests.jsonl").touch()
    done = batchdecode("my requests.jsonl", cwd=tmp_path)
    assert done.stderr == (
        "error: no command 'my requests.jsonl'; did you mean: "
        "batchdecode run 'my requests.jsonl'?\n"
    )
