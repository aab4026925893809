"""Models of transformers in our batch give the tokens that `generate` gives for each request."""

import functools
import json
import shutil
import socket
from threading import Thread

import pytest
from consoles import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_models import (  # noqa: E402 - as above
    ROPES,
    ROW_BY_ROW,
    SCHEDULES,
    SIZES,
    SWITCH,
    be_quiet,
    generated,
    prompts,
    random_model,
    results_of,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402 - as above

from batcher import BatchdecodeError, Request, decode, load_model  # noqa: E402 - as above
from batcher.models.transformer import SlotModel  # noqa: E402 - as above


@pytest.fixture(autouse=True)
def _alone_and_quiet():
    be_quiet()


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_tokens_of_rows_are_those_that_generate_gives(name, tmp_path):
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path)
    model = load_model(f"hf:{tmp_path}")
    assert isinstance(model.inner, SlotModel)
    asked = [{"prompt": prompt, "max_tokens": 16} for prompt in prompts()]
    expected = [generated(theirs, fields["prompt"], 16) for fields in asked]
    assert len({token for tokens in expected for token in tokens}) > 20
    for schedule in SCHEDULES.values():
        found = results_of(model, asked, schedule=schedule)
        assert [result.tokens for result in found] == expected, schedule


def test_every_kind_of_rope_is_tried():
    assert {*ROPE_INIT_FUNCTIONS} <= {*ROPES}


def test_factors_of_a_model_row_by_row_may_not_switch(tmp_path):
    rope = ROPES["longrope"][1]["rope_parameters"] | {"partial_rotary_factor": 1.0}
    theirs = random_model("bamba", rope_parameters=rope)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(BatchdecodeError, match=f"give --max-context {SWITCH}, up to which"):
        load_model(f"hf:{tmp_path}")
    read = load_model(f"hf:{tmp_path}", max_context=SWITCH)
    found = results_of(read, [{"prompt": [3, 4], "max_tokens": 9}])
    assert found[0].tokens == generated(theirs, [3, 4], 9)


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
