"""Models of transformers in our batch give the tokens that `generate` gives for each request."""

import functools
import json
import shutil
import socket
from random import Random
from threading import Thread

import pytest
from consoles import ROOT
from engine_runs import drained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_models import PAGED, ROPES, ROW_BY_ROW, SIZES, SWITCH, VOCAB, generated, random_model  # noqa: E402 - as above
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402 - as above

from batcher import BatchdecodeError, Engine, Request, decode, load_model  # noqa: E402 - as above
from batcher.models.transformer import SlotModel, TransformerModel  # noqa: E402 - as above
from batcher.settings import SchedulingSettings  # noqa: E402 - as above
from batcher.speculation.settings import SpeculationSettings  # noqa: E402 - as above

NUM_TOKENS = 64
LENGTHS = (3, 17, 9, 30, 1, 12)
SCHEDULES = {
    "plain": {},
    "chunks": {"max_batch_tokens": 7, "prefill_order": "prefill-first"},
    "few blocks": {"kv_blocks": 80, "block_size": 4, "max_batch_tokens": 12},
    "prefix cache": {"prefix_cache": True, "block_size": 4, "long_prefill_threshold": 5},
}


@pytest.fixture(autouse=True)
def _alone_and_quiet():
    torch.set_num_threads(1)  # of tiny products several only wait for each other
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def prompts():
    draw = Random(0)
    begin = [draw.randrange(3, VOCAB) for _ in range(8)]
    drawn = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    return [*drawn, begin + drawn[0], begin + drawn[1]]


def results_of(model, requests, schedule, speculation=None):
    engine = Engine(model, 3, settings=SchedulingSettings(**schedule), speculation=speculation)
    asked = [Request(id=str(n), ignore_eos=True, **more) for n, more in enumerate(requests)]
    results = drained(engine, asked).results
    assert not [result.error for result in results if result.error]
    return sorted(results, key=lambda result: (int(result.id), result.index))


def decoded(model, schedule, speculation=None, max_tokens=NUM_TOKENS):
    asked = [{"prompt": prompt, "max_tokens": max_tokens} for prompt in prompts()]
    return [result.tokens for result in results_of(model, asked, schedule, speculation)]


@pytest.fixture(params=[*PAGED, *ROW_BY_ROW])
def saved(request, tmp_path):
    model = random_model(request.param)
    model.save_pretrained(tmp_path)
    num_tokens = NUM_TOKENS if request.param in PAGED else 16  # one row after the other takes long
    expected = [generated(model, prompt, num_tokens) for prompt in prompts()]
    assert len({token for tokens in expected for token in tokens}) > 20
    return request.param, tmp_path, expected


def test_tokens_are_those_that_generate_gives(saved):
    name, folder, expected = saved
    model = load_model(f"hf:{folder}")
    assert isinstance(model.inner, TransformerModel if name in PAGED else SlotModel)
    for schedule in SCHEDULES.values():
        assert decoded(model, schedule, max_tokens=len(expected[0])) == expected, schedule


def test_every_kind_of_rope_is_tried():
    assert {*ROPE_INIT_FUNCTIONS} <= {*ROPES}


LONG = [name for name in ROPES if "longrope" in name]


@pytest.mark.parametrize("name", LONG)
def test_rows_that_share_blocks_have_their_own_factors(name, tmp_path):
    model = random_model(name)
    model.save_pretrained(tmp_path)
    read = load_model(f"hf:{tmp_path}")
    short = prompts()[1]  # passes the switch
    others = [short + generated(model, short, 20), short[:5]]
    asked = [
        {"prompt": prompt, "max_tokens": 30, "arrival_time": 40.0 * number}
        for number, prompt in enumerate([short, *others, short])
    ]
    found = results_of(read, asked, {"prefix_cache": True, "block_size": 4})
    assert [result.tokens for result in found] == [
        generated(model, request["prompt"], 30) for request in asked
    ]


@pytest.mark.parametrize("name", LONG)
def test_drafts_beams_and_scores_know_the_factors_of_each_token(name, tmp_path):
    model = random_model(name)
    model.save_pretrained(tmp_path)
    read = load_model(f"hf:{tmp_path}", exact=True)
    expected = [generated(model, prompt, 30) for prompt in prompts()]
    for draft in (f"hf:{tmp_path}", "ngram"):
        speculation = SpeculationSettings(draft=draft)
        assert decoded(read, {}, speculation, max_tokens=30) == expected
    long, chunks = prompts()[1] * 2, {"max_batch_tokens": 5}
    asked = [
        {"prompt": long, "max_tokens": 2, "prompt_logprobs": 0},
        {"prompt": long[:17], "max_tokens": 20, "num_beams": 2},
        {"prompt": long[:17], "max_tokens": 20, "n": 2, "temperature": 1, "seed": 1},
    ]
    whole, parts = (results_of(read, asked, schedule) for schedule in ({}, chunks))
    assert [result.tokens for result in whole] == [result.tokens for result in parts]
    with torch.no_grad():
        logits = model(torch.tensor([long])).logits[0].log_softmax(-1)
    expected = [logits[at, token].item() for at, token in enumerate(long[1:])]
    for results in (whole, parts):
        found = [of_token.logprob for of_token in results[0].prompt_logprobs[1:]]
        assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ["longrope of phi 3", "bamba"])
def test_factors_of_a_model_with_windows_or_row_by_row_may_not_switch(name, tmp_path):
    rope = ROPES["longrope"][1]["rope_parameters"] | {"partial_rotary_factor": 1.0}
    random_model(name, sliding_window=8, rope_parameters=rope).save_pretrained(tmp_path)
    with pytest.raises(BatchdecodeError, match=f"give --max-context {SWITCH}, up to which"):
        load_model(f"hf:{tmp_path}")
    read = load_model(f"hf:{tmp_path}", max_context=SWITCH)
    asked = [{"prompt": [3, 4], "max_tokens": 9}]
    expected = generated(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), [3, 4], 9)
    assert results_of(read, asked, {})[0].tokens == expected


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("RecurrentGemma", {"num_hidden_layers": 3, "attention_window_size": 8}, "no cache"),
        ("OpenAIGPT", {"n_layer": 2, "n_head": 4, "n_embd": 64}, "OpenAIGPT.* takes no cache"),
        ("CpmAnt", {"num_attention_heads": 4, "dim_head": 16}, "cannot continue from its cache"),
    ],
)
def test_a_model_that_cannot_use_a_cache_is_refused_in_one_line(name, fields, message, tmp_path):
    fields = {**SIZES, "lru_width": 64, **fields}
    config = getattr(transformers, f"{name}Config")(**fields)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(BatchdecodeError, match=f"it cannot be loaded: .*{message}") as caught:
        load_model(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)


def test_a_model_whose_cache_changes_its_logits_is_refused(tmp_path, monkeypatch):
    random_model("bamba").save_pretrained(tmp_path)
    load_model(f"hf:{tmp_path}")
    kind = transformers.BambaForCausalLM
    forward = kind.forward

    @functools.wraps(forward)
    def forgets_positions(self, *args, position_ids=None, **given):
        return forward(self, *args, **given)

    monkeypatch.setattr(kind, "forward", forgets_positions)
    with pytest.raises(BatchdecodeError, match=r"Bamba.* computes other logits with its cache"):
        load_model(f"hf:{tmp_path}")


def test_a_vocabulary_may_be_smaller_than_what_is_tried_at_first(tmp_path):
    model = random_model("llama", vocab_size=8)
    model.save_pretrained(tmp_path)
    asked = [Request(prompt=[3, 5], max_tokens=9, ignore_eos=True)]
    found = decode(asked, model=f"hf:{tmp_path}")
    assert found[0].tokens == generated(model, [3, 5], 9)


def test_drafts_of_any_kind_change_no_token(tmp_path):
    model = random_model("gemma 3")
    model.save_pretrained(tmp_path)
    expected = [generated(model, prompt, NUM_TOKENS) for prompt in prompts()]
    target = load_model(f"hf:{tmp_path}")
    for draft in (f"hf:{tmp_path}", "ngram"):
        assert decoded(target, {}, SpeculationSettings(draft=draft)) == expected


@pytest.mark.parametrize("name", ["gpt-2", "qwen3 with experts", "qwen3-next"])
def test_exact_logprobs_depend_on_no_batch(name, tmp_path):
    random_model(name).save_pretrained(tmp_path)
    model = load_model(f"hf:{tmp_path}", exact=True, dtype="bfloat16")
    requests = [
        {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
        for prompt in prompts()
    ]
    (alone, *others) = (
        [(result.tokens, result.logprobs) for result in decode(requests, **given)]
        for given in ({"model": model, "batch_size": size} for size in (1, 3, 8))
    )
    assert all(other == alone for other in others)


def test_several_tokens_end_a_text_and_the_context_any(tmp_path):
    model = random_model("llama", max_position_embeddings=40)
    expected = generated(model, [5, 6, 7], 30)
    model.generation_config.eos_token_id = [299, expected[4], 298]
    model.save_pretrained(tmp_path)
    read = load_model(f"hf:{tmp_path}")
    ended, long = decode([{"prompt": [5, 6, 7], "max_tokens": 30}, long_request()], model=read)
    assert ended.tokens == expected[: expected.index(expected[4]) + 1]
    assert ended.finish_reason == "stop"
    assert (long.limit, long.usage.completion_tokens) == ("max_context", 10)
    with pytest.raises(BatchdecodeError, match="--max-context 41 is above the 40 of"):
        load_model(f"hf:{tmp_path}", max_context=41)


def long_request():
    return {"prompt": [9] * 30, "max_tokens": 30, "ignore_eos": True}


def test_a_tokenizer_and_its_template_are_read_and_may_be_missing(tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(BatchdecodeError, match="no tokenizer: give token ids"):
        decode([{"prompt": "a text"}], model=f"hf:{tmp_path}")
    pair = ROOT / "samples" / "shakespeare" / "target"
    folder = tmp_path / "chat"
    shutil.copytree(pair, folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages[0].content }} not to", "bos_token": "<s>"})
    )
    ours = decode([{"prompt": "To be, or not to", "max_tokens": 8}], model=str(pair))
    theirs = decode([{"prompt": "To be, or", "max_tokens": 8}], model=f"hf:{folder}", chat=True)
    assert [result.text for result in ours] == [result.text for result in theirs]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "it cannot be loaded: .*config.json"),
        ({"config.json": "{}"}, "it cannot be loaded: .*model_type"),
        ({"config.json": '{"model_type": "llama"}'}, "it cannot be loaded: .*model.safetensors"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(BatchdecodeError, match=message) as caught:
        load_model(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "field", "message"),
    [
        (
            "config.json",
            {"num_hidden_layers": 9},
            r"\d+ weights are missing, such as model.layers.\d",
        ),
        ("generation_config.json", {"eos_token_id": ["end"]}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": "end"}, "eos_token_id"),
    ],
)
def test_what_makes_no_whole_model_is_an_error(name, field, message, tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    told = json.loads((tmp_path / name).read_text())
    (tmp_path / name).write_text(json.dumps(told | field))
    with pytest.raises(BatchdecodeError, match=f"it cannot be loaded: {message}"):
        load_model(f"hf:{tmp_path}")


def test_code_of_a_model_is_not_run_unasked(tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(BatchdecodeError, match="--trust-remote-code"):
        load_model(f"hf:{tmp_path}")
    assert not (tmp_path / "ran").exists()


def test_a_device_that_is_not_there_is_named(tmp_path):
    for device, message in (("cuda:99", "torch finds"), ("tpu", "give cpu, cuda or cuda:N")):
        with pytest.raises(BatchdecodeError, match=f"--device {device}: {message}"):
            load_model(f"hf:{tmp_path}", device=device)


# A name of the Hub where there is no network: what was downloaded before, or an error at once.

constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("transformers")

from batcher.hf import hub  # noqa: E402 - as above

NAME = "somebody/tiny"


@pytest.fixture(params=["refused", "silent"])
def hub_that_is_away(request, monkeypatch, tmp_path):
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if request.param == "refused":
        listener.close()
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    yield tmp_path / "cache"
    listener.close()


def download(cache):
    folder = cache / f"models--{NAME.replace('/', '--')}"
    target = ROOT / "samples" / "shakespeare" / "target"
    shutil.copytree(target, folder / "snapshots" / "0123abcd")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123abcd")


def test_what_was_not_downloaded_is_an_error_of_one_line(hub_that_is_away, capfd):
    with pytest.raises(BatchdecodeError) as caught:
        load_model(f"hf:{NAME}")
    assert str(caught.value) == (
        f"{NAME} was not downloaded before, and {constants.ENDPOINT} does not answer within 0.2 s"
    )
    assert capfd.readouterr() == ("", "")  # it was not tried again and again
    assert not hub_that_is_away.exists()


def test_what_was_downloaded_before_is_used(hub_that_is_away):
    download(hub_that_is_away)
    request = {"prompt": "To be, or", "max_tokens": 3, "ignore_eos": True}
    [result] = decode([request], model=f"hf:{NAME}")
    assert len(result.tokens) == 3


def test_no_hub_is_asked_where_somebody_wants_none(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "_answers", lambda: pytest.fail("it was asked"))
    with pytest.raises(BatchdecodeError, match="and HF_HUB_OFFLINE is set"):
        load_model(f"hf:{NAME}")


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "503 Service Unavailable"])
def test_a_hub_that_answers_whatever_is_there(status, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)

        def answer():
            with listener.accept()[0] as connection:
                connection.recv(10_000)
                connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

        answering = Thread(target=answer)
        answering.start()
        assert not hub.is_offline(NAME)
        answering.join()
