"""The sample server and the sample client, over real HTTP."""

import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from batcher import CallSettings, decode
from batcher.models.callables import LLMModel

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # as the command line does it

from samples.http_llm import HTTPModel
from samples.llm_server import STOP_TOKEN, TEXTS, VOCAB_SIZE, LLMServer, NgramModel

PROMPTS = ["The lighthouse", "The cat", "At night", "All the names"]
REQUESTS = [{"prompt": prompt, "max_tokens": 16} for prompt in PROMPTS]


@contextmanager
def serving(server, max_attempts=3):
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        settings = CallSettings(max_attempts=max_attempts, backoff=0.001)
        yield LLMModel(HTTPModel(url), "http", settings)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def greedy_text(prompt, max_tokens):
    model, tokens = NgramModel(), [*prompt.encode()]
    for _ in range(max_tokens):
        logits = model.logits(tokens)
        tokens.append(logits.index(max(logits)))
        if tokens[-1] == STOP_TOKEN:
            break
    return bytes(token for token in tokens[len(prompt) :] if token != STOP_TOKEN).decode()


def test_requests_are_decoded_over_http_up_to_the_stop_token():
    with serving(LLMServer(0)) as model:
        assert (model.vocab_size, model.eos_token_id) == (VOCAB_SIZE, STOP_TOKEN)
        results = decode(REQUESTS, model=model, batch_size=3)
    assert [result.text for result in results] == [greedy_text(prompt, 16) for prompt in PROMPTS]
    with serving(LLMServer(0)) as model:
        [result] = decode([{"prompt": TEXTS[0][:-10], "max_tokens": 30}], model=model)
    assert (result.text, result.finish_reason) == (TEXTS[0][-10:], "stop")
    assert result.tokens[-1] == STOP_TOKEN
