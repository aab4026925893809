import json

import pytest
from process import batchdecode, lines_of
from typer.testing import CliRunner

from cli.commands import app
from cli.run.problems import InvalidInput

REQUESTS = lines_of(
    {"prompt": "hello", "max_tokens": 5, "stop": "x"},
    "",
    {"prompt": [1, 2, 3], "max_tokens": 7, "ignore_eos": True, "arrival_time": 4},
    {"prompt": [1], "arrival_time": 2.5},
    {"custom_id": "o", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}},
)


@pytest.fixture
def check(tmp_path, capfd):

    def check(data, *arguments):
        path = tmp_path / "in.jsonl"
        path.write_bytes(data)
        done = CliRunner().invoke(app, ["check", str(path), *arguments], prog_name="batchdecode")
        done.plan = capfd.readouterr().out
        return done

    return check


def test_the_plan_counts_everything(check):
    plan = json.loads(check(REQUESTS, "--json", "-b", "3").plan)
    text_tokens = plan.pop("prompt_tokens") - 4
    assert text_tokens >= 2
    assert plan.pop("longest_prompt") >= 3
    assert plan == {
        "lines": 4,
        "invalid": 0,
        "blank": 1,
        "requests": 4,
        "openai_rows": 1,
        "text_prompts": 2,
        "token_prompts": 2,
        "segment_prompts": 0,
        "outputs": 4,
        "output_tokens": 5 + 7 + 16 + 16,
        "longest_output": 16,
        "with_stops": 1,
        "ignoring_eos": 1,
        "arrivals": {"first": 0.0, "last": 4.0},
        "arrivals_in_order": False,
        "batch": 3,
        "slot_steps": 44,
        "least_steps": 16,
        "max_context": None,
        "too_long": 0,
        "to_the_end": 0,
        "may_outgrow": 0,
        "default_limit": 2,
    }


def test_segments_are_counted_by_their_tokens(check):
    prompt = [{"text": "ab"}, {"length": 1000, "seed": 5}, {"tokens": [5, 6, 7]}]
    lines = lines_of({"prompt": prompt}, {"prompt": [5]})
    plan = json.loads(check(lines, "--json").plan)
    assert (plan["segment_prompts"], plan["token_prompts"]) == (1, 1)
    assert (plan["prompt_tokens"], plan["longest_prompt"]) == (1006, 1005)
    assert "1 of token ids, 1 of segments; 1,006 tokens, longest 1,005" in check(lines).plan


@pytest.mark.parametrize(
    ("fields", "num_outputs", "num_slots"),
    [
        ({"n": 3, "temperature": 1}, 3, 3),
        ({"n": 2, "best_of": 5, "temperature": 1}, 2, 5),
        ({"n": 2, "num_beams": 4}, 2, 4),
        ({"n": 3, "temperature": 1, "cfg_scale": 2, "negative_prompt": "y"}, 3, 6),
    ],
)
def test_every_slot_that_a_request_takes_counts(check, fields, num_outputs, num_slots):
    done = check(lines_of({"prompt": "x", "max_tokens": 7, **fields}), "--json", "-b", "4")
    plan = json.loads(done.plan)
    assert plan["outputs"] == num_outputs
    assert plan["output_tokens"] == 7 * num_outputs
    assert plan["slot_steps"] == 7 * num_slots
    assert plan["least_steps"] == max(7, -(-7 * num_slots // 4))
    shown = check(lines_of({"prompt": "x", "max_tokens": 7, **fields})).plan
    assert f"{num_outputs} outputs, at most {7 * num_outputs} tokens, longest 7" in shown


def test_a_bad_line_is_exit_status_2_and_an_empty_input_a_plan(check):
    done = check(REQUESTS + b"{\n", "--json")
    assert json.loads(done.plan)["invalid"] == 1
    assert isinstance(done.exception, InvalidInput)
    assert "error[invalid-json]" in done.stderr
    assert "1 invalid of 5 lines" in str(done.exception)
    assert check(b"").plan.endswith("in.jsonl: 0 requests\n")


@pytest.mark.parametrize(
    ("rows", "options", "hint"),
    [
        (
            [{}, {"n": 2, "temperature": 1}, {"max_tokens": 3}],
            "",
            "limit of 16 tokens applies to 3 of 4 outputs: set max_tokens or --max-tokens",
        ),
        ([{}] + [{"max_tokens": 3}] * 9, "", None),
        ([{}] * 3, "--max-tokens 16", None),
        ([{}], "--json", "to 1 of 1 output: "),
        ([{"max_tokens": 9}] * 9, "-b 32", "32 slots will be empty: use a smaller --batch for"),
        ([{"max_tokens": 9, "num_beams": 5}] * 4, "-b 32", None),
        ([], "-b 32", None),
    ],
    ids=str,
)
def test_a_plan_ends_with_one_line_of_advice(rows, options, hint):
    done = batchdecode(
        "check", *options.split(), stdin=lines_of(*({"prompt": "x"} | r for r in rows))
    )
    assert done.returncode == 0
    assert done.stderr.startswith("hint: ") == (hint is not None)
    assert (hint or "") in done.stderr
    assert done.stderr.count("\n") == (hint is not None)


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_constraint_that_takes_too_long_to_compile_is_a_problem_of_its_line(tmp_path, command):
    line = b'{"id":"slow","prompt":"a","json_schema":{"multipleOf":99999}}\n'
    done = batchdecode(command, "--grammar-timeout", "0.1", cwd=tmp_path, stdin=line)
    assert done.returncode == 2
    assert "it takes more than 0.1 seconds to compile; see --grammar-timeout" in done.stderr
    assert "<stdin>:1:41" in done.stderr


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize("flags", [(), ("--strict-constraints",)])
def test_strict_constraints_refuse_what_is_otherwise_checked_afterwards(tmp_path, command, flags):
    line = b'{"prompt":"a","json_schema":{"enum":[1,2],"not":{"const":1}},"max_tokens":9}\n'
    done = batchdecode(command, "-", *flags, cwd=tmp_path, stdin=line)
    is_refused = "`json_schema`: not enforced while decoding: not; --strict" in done.stderr
    assert is_refused == ("invalid-grammar" in done.stderr) == bool(flags)
