"""--call-timeout: a row whose LLM does not answer fails alone."""

import json

from process import batchdecode, lines_of

LLM = """
import asyncio

class LLM:
    vocab_size = 4

    def get_stop_token_id(self):
        return 0

    async def next_token_logits(self, prev_token_ids):
        if prev_token_ids[0] == 1:
            await asyncio.sleep(60)
        return [0, 0, 1, 0]
"""


def test_the_row_of_a_call_that_hangs_fails_and_the_others_go_on(tmp_path):
    (tmp_path / "slow.py").write_text(LLM)
    (tmp_path / "config.yaml").write_text("llm:\n  call_timeout: 0.2\n")
    limit = ["--config", "config.yaml"]
    requests = lines_of(*({"prompt": [token], "max_tokens": 2} for token in (1, 2, 3)))
    done = batchdecode("run", "--model", "slow:LLM", "-q", *limit, cwd=tmp_path, stdin=requests)
    assert done.returncode == 1
    slow, *others = map(json.loads, done.stdout.splitlines())
    assert slow["error"]["code"] == "call-timeout"
    assert slow["error"]["message"] == "step 0: slow:LLM timed out after 0.2 s"
    assert [result["tokens"] for result in others] == [[2, 2], [2, 2]]


def test_a_row_that_took_too_long_is_decoded_again_with_more_time(tmp_path):
    llm = LLM.replace("sleep(60)", "sleep(0.3)")
    (tmp_path / "slow.py").write_text(llm)
    (tmp_path / "in").write_bytes(lines_of({"prompt": [1], "max_tokens": 1}))
    command = ["run", "in", "-o", "out", "--model", "slow:LLM", "-q", "--call-timeout"]
    assert batchdecode(*command, "0.1", cwd=tmp_path).returncode == 1
    again = batchdecode(*command, "30", "--resume", "--retry-failed", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    [result] = map(json.loads, (tmp_path / "out").read_bytes().splitlines())
    assert result["tokens"] == [2]
