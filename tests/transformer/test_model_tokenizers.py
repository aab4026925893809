"""Tokenizers of checkpoints, from GGUF's metadata and from tokenizer.json, and their bytes."""

import json

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import (
    BYTES,
    CHAT_TEMPLATE,
    MERGES,
    SPECIAL,
    TOKEN_TYPES,
    TOKENS,
    write_folder,
    write_gguf,
)
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from batcher import Request, decode
from batcher.errors import BatchdecodeError, EncodingError
from batcher.foreign import RaisedError
from batcher.models.base import join_bytes
from batcher.models.checkpoints import load_transformer, open_checkpoint
from batcher.transformer.config import TransformerSettings
from batcher.transformer.tokenizer import (
    _BYTE_OF,
    ChatTemplate,
    TransformerTokenizer,
    byte_level_bytes,
    split_of,
    tokenizer_from_gguf,
)

PREFIX = "tokenizer.ggml."
METADATA = {
    PREFIX + "model": "gpt2",
    PREFIX + "pre": "gpt-2",
    PREFIX + "tokens": TOKENS,
    PREFIX + "token_type": TOKEN_TYPES,
    PREFIX + "merges": MERGES,
    PREFIX + "eos_token_id": 1,
    "tokenizer.chat_template": CHAT_TEMPLATE,
}
CHAT = [{"role": "user", "content": "the cat"}]
CHAT_TEXT = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"


def from_metadata(**changes):
    fields = METADATA | {PREFIX + name: value for name, value in changes.items()}
    given = {name: value for name, value in fields.items() if value is not None}
    return tokenizer_from_gguf("tiny.gguf", given)


def pieces(tokenizer, text):
    return [tokenizer.token_bytes[token].decode() for token in tokenizer.encode(text)]


def write_tokenizer(folder, inner, settings=None, template=None, special_tokens=None):
    write_folder(folder)
    if special_tokens is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_tokens))
    inner.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return open_checkpoint(folder).tokenizer


def byte_level():
    inner = from_metadata()._inner
    inner.decoder = decoders.ByteLevel()
    return inner


@pytest.fixture(scope="module")
def tokenizer():
    return from_metadata()


@given(st.text())
def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer, text):
    assert join_bytes(tokenizer.encode(text), tokenizer.token_bytes) == text.encode()


def test_special_tokens_are_those_of_a_chat_whose_template_may_be_missing():
    tokenizer = from_metadata()
    ids = tokenizer.encode("<|im_end|>")
    assert join_bytes(ids, tokenizer.token_bytes) == b"<|im_end|>"
    assert not {0, 1} & set(ids)
    assert tokenizer.encode_with_special("a<|im_end|>") == [2 + ord("a"), 1]
    assert tokenizer.encode("<|im_end|>") == ids
    assert tokenizer.encode("<think>") == [261]  # a token, but not a special one
    tokenizer = from_metadata()
    ids = tokenizer.apply_chat_template(CHAT)
    assert ids == tokenizer.encode_with_special(CHAT_TEXT)
    assert [token for token in ids if token < 2] == [0, 1, 0]
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == CHAT_TEXT
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=False)
    assert text == CHAT_TEXT.removesuffix("<|im_start|>assistant\n")
    fields = {name: value for name, value in METADATA.items() if "chat" not in name}
    assert not hasattr(tokenizer_from_gguf("a.gguf", fields), "apply_chat_template")
    fields = METADATA | {"tokenizer.chat_template": "{% if %}"}
    with pytest.raises(BatchdecodeError, match=r"^tiny.gguf: the chat template cannot be used: "):
        tokenizer_from_gguf("tiny.gguf", fields)


GPT2_END = ["  ", " A", "'", "S", "!!", "\n", "\n", "x"]
QWEN2_END = ["  ", " A", "'S", "!!\n\n", "x"]


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", ["it", "'s", " 1234", *GPT2_END]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", *GPT2_END]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", *QWEN2_END]),
        ("llama-bpe", ["it", "'s", " ", "123", "4", *QWEN2_END]),
    ],
)
def test_a_text_is_cut_as_the_model_was_trained(pre, cut):
    found = split_of(pre).pre_tokenize_str("it's 1234   A'S!!\n\nx")
    assert [byte_level_bytes(piece).decode() for piece, _ in found] == cut


def test_qwen_composes_characters_and_llama3_takes_whole_words():
    decomposed, composed = "e\N{COMBINING ACUTE ACCENT}", "\N{LATIN SMALL LETTER E WITH ACUTE}"
    assert from_metadata(pre="qwen2").encode(decomposed) == from_metadata().encode(composed)
    assert from_metadata(pre="gpt-2").encode(decomposed) != from_metadata().encode(composed)
    tokens = [*TOKENS, "cat"]
    types = [*TOKEN_TYPES, 1]
    assert len(from_metadata(pre="llama-bpe", tokens=tokens, token_type=types).encode("cat")) == 1
    assert len(from_metadata(pre="qwen2", tokens=tokens, token_type=types).encode("cat")) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "kind 't5' is not supported, known: gpt2, llama; the folder it was"),
        ({"model": "llama"}, "262 tokens and 0 scores"),
        ({"pre": "tekken"}, "'tekken' is not supported, known: gpt-2, smollm, qwen2, llama-bpe"),
        ({"pre": None}, "'default' is not supported"),
        ({"tokens": None}, "missing required field `tokenizer.ggml.tokens`"),
        ({"tokens": [1, 2]}, "Expected `str`, got `int`"),
        ({"tokens": [*TOKENS, "he"]}, "the same token twice"),
        ({"merges": ["he"]}, "its tokenizer cannot be used: .*"),
        ({"token_type": [{}]}, "Expected `int`, got `object`"),
        ({"eos_token_id": -1}, "tokenizer.ggml.eos_token_id"),
    ],
)
def test_a_vocabulary_that_is_none(changes, message):
    with pytest.raises(BatchdecodeError, match=rf"^tiny.gguf: .*{message}"):
        from_metadata(**changes)


def test_a_byte_that_no_token_stands_for_is_an_error_and_not_dropped():
    tokens = [token for token in TOKENS if token not in {BYTES[4], BYTES[0xFF]}]
    tokenizer = from_metadata(tokens=tokens, token_type=[3, 3])
    assert pieces(tokenizer, "a the") == ["a", " the"]
    for encode in (tokenizer.encode, tokenizer.encode_with_special):
        with pytest.raises(EncodingError, match="no token for the byte 0x04"):
            encode("a\4b")


@pytest.mark.parametrize(
    ("changes", "prefix"),
    [
        ({}, []),
        ({"bos_token_id": 0}, []),
        ({"bos_token_id": 0, "add_bos_token": True}, [0]),
        ({"bos_token_id": 0, "add_bos_token": False, "pre": "llama-bpe"}, []),
        ({"bos_token_id": 0, "pre": "llama-bpe"}, [0]),
        ({"pre": "llama-bpe", "add_bos_token": True}, []),
    ],
)
def test_a_text_begins_with_bos_if_the_file_says_so(changes, prefix):
    tokenizer = from_metadata(**changes)
    assert tokenizer.prefix_token_ids == prefix
    assert tokenizer.encode(" the") == [260]


def test_a_chat_has_the_bos_of_its_template_alone(tmp_path):
    def with_fields(writer):
        writer.add_add_bos_token(value=True)

    path = write_gguf(tmp_path / "tiny.gguf", with_fields=with_fields)
    model = load_transformer(str(path), TransformerSettings())
    chat = model.tokenizer.apply_chat_template(CHAT)
    text, of_ids = decode([Request(prompt="cat"), Request(prompt=chat)], model=model)
    assert text.usage.prompt_tokens == 1 + len(model.tokenizer.encode("cat"))
    assert of_ids.usage.prompt_tokens == len(chat)
    assert chat[:2] == model.tokenizer.encode_with_special("<|im_start|>user")[:2]


def test_bos_is_a_token():
    with pytest.raises(BatchdecodeError, match=r"begin with \[262\], and tokens end with 261"):
        from_metadata(bos_token_id=262, add_bos_token=True)


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
E_ACUTE = "\N{LATIN SMALL LETTER E WITH ACUTE}"
PIECES = [SPACE, *"abc", "ab", "bc", "abc", f"{SPACE}a", f"{SPACE}ab", E_ACUTE, "cab", "bb", "aa"]
PIECES += ["aab", f"{SPACE}{SPACE}", "bca", "caa"]
OWN = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256))]
OWN += [("[x]", 4)]


def sentencepiece_of(ranked, architecture="llama", **changes):
    """Return the tokenizer of PIECES with these scores, as sentencepiece writes them."""
    changes = {
        "model": "llama",
        "pre": "default",
        "tokens": [*(token for token, _ in OWN), *PIECES],
        "token_type": [*(kind for _, kind in OWN), *(1 for _ in PIECES)],
        "scores": [0.0] * len(OWN) + ranked,
        "merges": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    fields = {f"{PREFIX}{name}": value for name, value in changes.items() if value is not None}
    return tokenizer_from_gguf("a.gguf", {**fields, "general.architecture": architecture})


def merged(text, scores):
    """Return a text as tokens by the definition: neighbours of the highest score are merged first.

    Of equal ones, those that come first.
    """
    symbols = [*text]
    while True:
        pairs = [
            (scores[pair], -place)
            for place in range(len(symbols) - 1)
            if (pair := symbols[place] + symbols[place + 1]) in scores
        ]
        if not pairs:
            return symbols
        place = -max(pairs)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@given(
    st.text([" ", *"abc", E_ACUTE, "d", "\n", "\N{GRINNING FACE}"]),
    st.permutations(range(len(PIECES))),
)
def test_neighbours_with_the_highest_score_are_merged_first(text, order):
    scores = dict(zip(PIECES, [float(-place) for place in order], strict=True))
    tokenizer = sentencepiece_of([*scores.values()])
    expected = merged(f"{SPACE}{text}".replace(" ", SPACE) if text else "", scores)
    read = [
        byte for symbol in expected for byte in ([symbol] if symbol in scores else bytes_of(symbol))
    ]
    tokens = [*(token for token, _ in OWN), *PIECES]
    assert [tokens[token_id] for token_id in tokenizer.encode(text)] == read
    joined = join_bytes(tokenizer.encode(text), tokenizer.token_bytes)
    assert joined == (b" " if text else b"") + text.encode()


def bytes_of(symbol):
    return [f"<0x{byte:02X}>" for byte in symbol.encode()]


SCORES = [float(-place) for place in range(len(PIECES))]


def test_sentencepiece_begins_with_bos_and_gemma_merges_by_its_vocabulary():
    tokenizer = sentencepiece_of(SCORES)
    assert tokenizer.prefix_token_ids == [1]
    assert pieces(tokenizer, "ab") == [" ab"]
    tokenizer = sentencepiece_of(SCORES, add_space_prefix=False, add_bos_token=False)
    assert tokenizer.prefix_token_ids == []
    assert pieces(tokenizer, "ab") == ["ab"]
    assert pieces(tokenizer, "ab[x]<s>")[:2] == ["ab", "[x]"]
    assert 1 not in tokenizer.encode("<s>")
    assert tokenizer.encode_with_special("<s>") == [1]
    backwards = SCORES[::-1]
    others = sentencepiece_of(backwards, add_space_prefix=False)
    gemma = sentencepiece_of(backwards, "gemma3", add_space_prefix=False)
    same = sentencepiece_of(SCORES, add_space_prefix=False)
    for text in ("abcab", "aabca", "a  b"):
        assert gemma.encode(text) == same.encode(text)
    assert gemma.encode("abb") != others.encode("abb")
    tokens = [*(token for token, _ in OWN), *PIECES]
    spaced = [token.replace(SPACE * 2, "  ") for token in tokens]
    assert sentencepiece_of(backwards, "gemma3", tokens=spaced).encode("a  b") == sentencepiece_of(
        backwards, "gemma3"
    ).encode("a  b")


def test_special_and_very_long_tokens_are_never_merged_to():
    tokens = ["<unk>", "<", "s", ">", "<s", "<s>", "<x", "x"]
    types = [2, 1, 1, 1, 1, 3, 1, 1]
    tokenizer = sentencepiece_of(
        SCORES, tokens=tokens, token_type=types, scores=[0.0] * 8, add_space_prefix=False
    )
    assert tokenizer.encode("<s>") == [4, 3]
    assert tokenizer.encode_with_special("<s>") == [5]
    # To look for all its parts would take the square of its length.
    long = "a" * 10**6
    tokens = ["a", "aa", long]
    tokenizer = sentencepiece_of(
        SCORES, tokens=tokens, token_type=None, scores=[0.0, 0.0, 0.0], add_space_prefix=False
    )
    assert tokenizer.encode("aaaa") == [1, 1]
    assert tokenizer.token_bytes[2] == long.encode()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [1.0]}, "277 tokens and 1 scores"),
        ({"tokens": ["a", "a"], "scores": [0.0, 0.0], "token_type": None}, "same token twice"),
        ({"scores": ["a"]}, "Expected `float`, got `str`"),
        ({"add_space_prefix": 3}, "Expected `bool`, got `int`"),
    ],
)
def test_a_vocabulary_of_sentencepiece_that_is_none(changes, message):
    with pytest.raises(BatchdecodeError, match=rf"^a.gguf: .*{message}"):
        sentencepiece_of(SCORES, **changes)


@given(st.text())
def test_tokenizer_json_gives_the_same(text):
    again = Tokenizer.from_str(byte_level().to_str())
    again.encode_special_tokens = True
    assert again.encode(text, add_special_tokens=False).ids == from_metadata().encode(text)


BOS, EOS = (SPECIAL[0], 0), (SPECIAL[1], 1)
TEMPLATE = processors.TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=[BOS])
AROUND = processors.TemplateProcessing(
    single=f"{SPECIAL[0]} {SPECIAL[1]} $A {SPECIAL[1]}", special_tokens=[BOS, EOS]
)
BYTE_LEVEL = processors.ByteLevel(trim_offsets=False)


@pytest.mark.parametrize(
    ("processor", "prefix"),
    [
        (None, []),
        (BYTE_LEVEL, []),
        (TEMPLATE, [0]),
        (processors.Sequence([BYTE_LEVEL, TEMPLATE]), [0]),
        (AROUND, [0, 1]),  # what is put behind a text would end it
        (processors.RobertaProcessing(EOS, BOS), [0]),
    ],
)
def test_a_text_begins_with_what_the_post_processor_puts_before_it(tmp_path, processor, prefix):
    inner = byte_level()
    if processor is not None:
        inner.post_processor = processor
    settings = {"chat_template": CHAT_TEMPLATE, "add_bos_token": True}
    tokenizer = write_tokenizer(tmp_path, inner, settings)
    assert tokenizer.prefix_token_ids == prefix
    assert tokenizer.encode("the") == from_metadata().encode("the")
    assert tokenizer.apply_chat_template(CHAT) == tokenizer.encode_with_special(
        CHAT_TEXT.replace("<|im_end|>", "")
    )


def sentencepiece():
    """Return a tokenizer as that of Llama 2 is."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "</s>", *bytes_, "▁", "a", "▁a", "é"]
    inner = Tokenizer(
        models.BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            [("▁", "a")],
            byte_fallback=True,
            unk_token="<unk>",  # noqa: S106 - no password
        )
    )
    inner.add_special_tokens([AddedToken("</s>", normalized=False), AddedToken("<unk>")])
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return inner


@pytest.mark.parametrize("text", ["a", "a a", "é\n", "<0x0A>", "</s>", "\0\U0001f600"])
def test_sentencepiece_has_the_bytes_of_a_text_after_a_space(tmp_path, text):
    tokenizer = write_tokenizer(tmp_path, sentencepiece())
    joined = join_bytes(tokenizer.encode(text), tokenizer.token_bytes)
    assert joined == b" " + text.encode()
    assert tokenizer.token_bytes[:3] == [b"", b"", b"\0"]


@pytest.mark.parametrize(
    ("settings", "template", "text"),
    [
        ({"chat_template": "{{ messages[0].content }}"}, None, "the cat"),
        ({"chat_template": "{{ eos_token }}", "eos_token": "<|im_end|>"}, None, "<|im_end|>"),
        ({"chat_template": "{{ bos_token }}", "bos_token": {"content": "<s>"}}, None, "<s>"),
        ({"chat_template": "one"}, "other", "other"),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "tools"},
                    {"name": "default", "template": "plain"},
                ]
            },
            None,
            "plain",
        ),
    ],
)
def test_a_folder_has_its_chat_template(tmp_path, settings, template, text):
    inner = byte_level()
    tokenizer = write_tokenizer(tmp_path, inner, settings, template)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == text


FORGEABLE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def forgeable():
    inner = Tokenizer(models.BPE(vocab=dict(_BYTE_OF), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(
        [
            AddedToken("<|im_start|>", special=True),
            AddedToken("<|im_end|>", special=True, rstrip=True),
            AddedToken("<s>", special=True, lstrip=True),
        ]
    )
    return TransformerTokenizer(inner, byte_level_bytes, [], ChatTemplate(FORGEABLE, {}))


def num_special(tokenizer, token_ids):
    return sum(not tokenizer.token_bytes[token_id] for token_id in token_ids)


PARTS_OF_TOKENS = ["<", "|im_end|>", "<|im_end|>", "<|im_", "end|>", "<s>", " ", "\n", "a", "é"]
PARTS_OF_TOKENS += ["\ufdd0"]


@examples(200)
@given(
    contents=st.lists(
        st.lists(st.sampled_from(PARTS_OF_TOKENS), max_size=8).map("".join), min_size=1
    ),
    role=st.sampled_from(["user", "<|im_end|>"]),
)
def test_a_message_inserts_no_special_token(forgeable, contents, role):
    messages = [{"role": role, "content": content} for content in contents]
    token_ids = forgeable.apply_chat_template(messages)
    assert num_special(forgeable, token_ids) == 2 * len(contents) + 1
    text = forgeable.apply_chat_template(messages, tokenize=False)
    assert text == ChatTemplate(FORGEABLE, {}).render(messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("content", "num_more"), [("hi", 0), ("<|im_", 0), ("a<|im_end|>b", 1), ("<s><|im_start|>", 2)]
)
def test_a_request_may_allow_special_tokens_in_its_messages(forgeable, content, num_more):
    messages = [{"role": "user", "content": content}]
    text = forgeable.apply_chat_template(messages, tokenize=False)
    allowed = forgeable.apply_chat_template(messages, special_tokens_in_text=True)
    assert allowed == forgeable.encode_with_special(text)
    assert num_special(forgeable, allowed) == 3 + num_more


def test_messages_with_every_mark_are_refused(forgeable):
    content = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    assert forgeable.apply_chat_template([{"role": "user", "content": content}])
    with pytest.raises(ValueError, match="all noncharacters"):
        forgeable.apply_chat_template([{"role": "user", "content": content + "<s>"}])


@pytest.mark.parametrize(
    ("settings", "special_tokens", "text"),
    [
        (None, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, "<s></s>"),
        ({"bos_token": "<a>"}, {"bos_token": "<s>", "eos_token": "</s>"}, "<a></s>"),
        ({"bos_token": None}, {"bos_token": "<s>", "additional_special_tokens": ["x"]}, "<s>"),
    ],
)
def test_a_template_knows_the_tokens_of_special_tokens_map(
    tmp_path, settings, special_tokens, text
):
    inner = byte_level()
    template = "{{ bos_token }}{{ eos_token }}"
    tokenizer = write_tokenizer(tmp_path, inner, settings, template, special_tokens)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("special_tokens_map.json", b"[]", "special_tokens_map.json: Expected `object`"),
        ("tokenizer.json", b"", "tokenizer.json: Input data was truncated"),
        ("tokenizer.json", b"{}", "tokenizer.json: a tokenizer decoded by nothing is not support"),
        ("tokenizer.json", b'{"decoder": {"type": "WordPiece"}}', "decoded by WordPiece is not s"),
        ("tokenizer.json", b'{"decoder": {"type": "ByteLevel"}}', "json: it cannot be used: "),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: Expected `object`"),
        ("tokenizer_config.json", b'{"chat_template": "{{"}', "config.json: the chat template ca"),
        ("chat_template.jinja", b"{% for %}", "chat_template.jinja: the chat template cannot be "),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: .*utf-8"),
    ],
)
def test_a_folder_whose_tokenizer_is_damaged(tmp_path, name, content, message):
    inner = byte_level()
    write_tokenizer(tmp_path, inner)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BatchdecodeError, match=rf"^{tmp_path}/.*{message}"):
        _ = open_checkpoint(tmp_path).tokenizer


def test_a_folder_has_its_tokenizer_or_says_that_it_lacks_one(tmp_path):
    with pytest.raises(BatchdecodeError, match=r"tokenizer.json: there is no such file"):
        _ = open_checkpoint(write_folder(tmp_path)).tokenizer
    inner = byte_level()
    inner.enable_truncation(2)
    inner.enable_padding(length=99)
    tokenizer = write_tokenizer(tmp_path, inner)
    assert tokenizer.token_bytes == from_metadata().token_bytes
    assert tokenizer.encode("the cat <|im_end|>") == from_metadata().encode("the cat <|im_end|>")
    assert not hasattr(tokenizer, "apply_chat_template")


# Chat templates: what transformers gives them, and what they cannot reach.


MESSAGES = [{"role": "user", "content": "<b>ä</b>"}]


def rendered(source, **special_tokens):
    return ChatTemplate(source, special_tokens).render(MESSAGES, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content }}", "<b>ä</b>"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<b>ä</b>"}'),
        ("{{ [1, 'ä'] | tojson(indent=1) }}", '[\n 1,\n "ä"\n]'),
        ("  {% if add_generation_prompt %}\nyes{% endif %}", "yes"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        ("{{ tools is none and documents is none }}", "True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)  # fmt: skip
def test_a_template_has_what_it_has_in_transformers(source, text):
    assert rendered(source, bos_token="<s>") == text  # noqa: S106 - no password


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% unknown %}", "{{ 'a' | no_filter }}"])
def test_a_broken_template_is_an_error_at_once(source):
    with pytest.raises(RaisedError, match=r"^the chat template cannot be used: Template.*line 1"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ raise_exception('no system prompt') }}", "no system prompt"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{% include '/etc/passwd' %}", "no loader for this environment"),
        ("{{ range(10**9) }}", "Range too big"),
    ],
)
def test_what_a_template_must_not_or_will_not(source, error):
    with pytest.raises(Exception, match=error):
        rendered(source)
    assert len(MESSAGES) == 1
