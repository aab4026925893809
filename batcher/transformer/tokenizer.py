"""Tokenizers of checkpoints, over the package `tokenizers`, with the bytes of every token.

A special token in a text is encoded as text. A chat template inserts special tokens; its messages
cannot, unless the request allows it.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import accumulate, chain, repeat, takewhile
from operator import itemgetter
from os import environ
from pathlib import Path
from re import compile as pattern
from re import escape
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from msgspec import Struct, field

from batcher.errors import BatchdecodeError, EncodingError
from batcher.foreign import calling
from batcher.transformer.config import TokenId
from batcher.transformer.stored import about, read_file, read_json_if_there

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from tokenizers import Encoding, Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

# Chat templates: Jinja in transformers' sandbox, which protects its arguments.


class ChatTemplate:
    """A chat template, as `render_jinja_template` of transformers runs it.

    special_tokens: texts for the template, such as bos_token.

    Raises:
        RaisedError: the template is invalid.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        from jinja2 import TemplateError  # noqa: PLC0415 - optional
        from jinja2.ext import Extension, loopcontrols  # noqa: PLC0415 - as above
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - as above

        class Generation(Extension):
            """The tag around what an assistant said, which only training needs: its body stays."""

            tags = {"generation"}  # noqa: RUF012 - as Jinja has it

            def parse(self, parser: "Parser") -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def to_json(value: Any, *given: Any, **named: Any) -> str:
            """Return plain JSON; Jinja's own filter escapes HTML."""
            names = ("ensure_ascii", "indent", "separators", "sort_keys")
            options = dict(zip(names, given, strict=False)) | named
            return json.dumps(value, **{"ensure_ascii": False, **options})

        def raise_exception(message: str) -> NoReturn:
            raise TemplateError(message)

        def strftime_now(given: str) -> str:
            return datetime.now().astimezone().strftime(given)

        with calling("the chat template cannot be used:"):
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
            )
            environment.filters["tojson"] = to_json
            environment.globals |= {
                "raise_exception": raise_exception,
                "strftime_now": strftime_now,
            }
            self._template = environment.from_string(source)
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Return the text of a chat; exceptions of the template pass through.

        add_generation_prompt: append the beginning of an answer.
        """
        return self._template.render(
            **self._special_tokens,
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )


MAX_VOCABULARY = 2**24
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # a space in sentencepiece
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters, which no text should contain
_BYTE_TOKEN = pattern("<0x([0-9A-F]{2})>")


class TransformerTokenizer:
    """Text to token ids, and the bytes of each id.

    bytes_of: from the text of a token. token_bytes: [vocabulary] b"" for special tokens and unused
    ids.
    prefix_token_ids: put before a prompt of text, such as BOS; not part of `encode`. It has
    `apply_chat_template` if there is a template.

    The tokens of a text have its bytes, unless the tokenizer normalises it: Qwen's composes
    characters (NFC), and sentencepiece may prepend a space.

    In a chat, special tokens come from the template alone. Where a message spells one out, a mark
    identifies it after rendering, and it is encoded as text.
    """

    def __init__(
        self,
        inner: "Tokenizer",
        bytes_of: Callable[[str], bytes],
        prefix_token_ids: list[int],
        template: ChatTemplate | None,
    ) -> None:
        vocabulary = inner.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        if size > MAX_VOCABULARY:
            raise BatchdecodeError(f"the tokenizer has ids up to {size - 1:,}")
        if max(prefix_token_ids, default=-1) >= size:
            raise BatchdecodeError(
                f"texts begin with {prefix_token_ids}, and tokens end with {size - 1}"
            )
        self.token_bytes, self.prefix_token_ids = [b""] * size, prefix_token_ids
        for token, token_id in vocabulary.items():
            self.token_bytes[token_id] = bytes_of(token)
        added = inner.get_added_tokens_decoder()
        for token_id, one in added.items():
            self.token_bytes[token_id] = b"" if one.special else one.content.encode()
        known = {entry[0] for entry in self.token_bytes if len(entry) == 1}
        lacking = [b"\\x%02x" % byte for byte in range(256) if byte not in known]
        self._lacking = pattern(b"[%b]" % b"".join(lacking)) if lacking else None
        self._special_ids = {token_id for token_id, one in added.items() if one.special}
        texts = sorted({added[token_id].content for token_id in self._special_ids} - {""})
        self._beginnings = {text[:size] for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        longest_first = sorted(texts, key=len, reverse=True)
        self._special = pattern("|".join(map(escape, longest_first)) or "(?!)")
        if template is not None:
            self.apply_chat_template = partial(self._chat, template)
        self._inner, self._lock = inner, Lock()
        environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches have one text here
        inner.no_truncation()
        inner.no_padding()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`.

        Raises:
            EncodingError: it has a byte without a token, which `tokenizers` would drop.
        """
        return self._encode(text, self._inner.encode_batch_fast, is_special=False).ids

    def encode_with_special(self, text: str) -> list[int]:
        """Return the token ids of `text`, including special tokens."""
        return self._encode(text, self._inner.encode_batch_fast, is_special=True).ids

    def _encode(
        self, text: str, encode_batch: Callable[..., list["Encoding"]], *, is_special: bool
    ) -> "Encoding":
        found = None if self._lacking is None else self._lacking.search(text.encode())
        if found is not None:
            message = f"the tokenizer has no token for the byte 0x{found[0].hex().upper()}"
            raise EncodingError("invalid-value", message)
        with self._lock:
            self._inner.encode_special_tokens = not is_special  # otherwise they are text
            # A batch of one, since only a batch releases the GIL.
            return encode_batch([text], add_special_tokens=False)[0]

    def _chat(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        special_tokens_in_text: bool = False,
    ) -> list[int] | str:
        """Return a chat as token ids, or as text; exceptions of the template pass through.

        special_tokens_in_text: keep special tokens in messages special.
        """
        mark, marked = "", messages
        if not special_tokens_in_text:
            mark, marked = self._marked(messages)
        text = template.render(marked, add_generation_prompt=add_generation_prompt)
        parts = text.split(mark) if mark else [text]
        text = "".join(parts)
        if not tokenize:
            return text
        if len(parts) == 1:
            return self.encode_with_special(text)
        marks = list(accumulate(map(len, parts[:-1])))
        encoding = self._encode(text, self._inner.encode_batch, is_special=True)
        token_ids: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            index = bisect_right(marks, start)
            if token_id in self._special_ids and index < len(marks) and marks[index] <= end:
                token_ids += self.encode(text[start:end])
            else:
                token_ids.append(token_id)
        return token_ids

    def _marked(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """Return a mark, and messages with it inside each special token that they spell out.

        It follows the first character, so that trimming cannot remove it. The end of a text may
        begin a token that the template, or the next text, completes.
        """
        texts = [text for message in messages for text in message.values() if isinstance(text, str)]
        if not any(self._special.search(text) or self._beginning_at_end(text) for text in texts):
            return "", messages
        mark = next((m for m in _MARKS if not any(m in text for text in texts)), None)
        if mark is None:
            raise ValueError("messages spell out special tokens, and have all noncharacters")

        def with_mark(text: str) -> str:
            marked = self._special.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", text)
            size = self._beginning_at_end(marked)
            place = len(marked) - size + 1
            return f"{marked[:place]}{mark}{marked[place:]}" if size else marked

        return mark, [
            {
                name: with_mark(text) if isinstance(text, str) else text
                for name, text in message.items()
            }
            for message in messages
        ]

    def _beginning_at_end(self, text: str) -> int:
        """Return how many of the last characters may begin a special token, at most."""
        sizes = range(min(self._longest - 1, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._beginnings), 0)


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token of byte-level BPE, one for each character."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Return the bytes of a token of sentencepiece, such as <0x0A>."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()


# The byte of each character in byte-level BPE, `bytes_to_unicode` of GPT-2: visible characters of
# Latin-1 are their own byte, others count on from U+0100.
_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(0xAE, 0x100)]
_INVISIBLE = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE}
_BYTE_OF |= {chr(0x100 + index): byte for index, byte in enumerate(_INVISIBLE)}


# -- a folder --------------------------------------------------------------------------------------

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
DECODERS = {"ByteLevel": byte_level_bytes, "ByteFallback": sentencepiece_bytes}


class _Decoder(Struct):
    type: str
    decoders: list["_Decoder"] = []


class _Tokenizer(Struct):
    decoder: _Decoder | None = None


class _Named(Struct):
    name: str
    template: str


class _Content(Struct):
    content: str


_Text = str | _Content | None


class _SpecialTokens(Struct):
    bos_token: _Text = None
    eos_token: _Text = None
    unk_token: _Text = None
    pad_token: _Text = None


class _Settings(_SpecialTokens):
    chat_template: str | list[_Named] | None = None


def tokenizer_from_folder(folder: Path) -> TransformerTokenizer:
    from tokenizers import Tokenizer  # noqa: PLC0415 - optional

    # A chat template in its own file overrides one in the settings. It may use the special tokens
    # of tokenizer_config.json, or else of special_tokens_map.json.
    named = read_json_if_there(folder / SPECIAL_TOKENS, _SpecialTokens)
    settings = read_json_if_there(folder / SETTINGS, _Settings)
    source = settings.chat_template
    if isinstance(source, list):
        source = next((one.template for one in source if one.name == "default"), None)
    place, template = folder / SETTINGS, None
    if (folder / TEMPLATE).is_file():
        place = folder / TEMPLATE
        with about(place):
            source = read_file(place).decode()
    if isinstance(source, str):
        texts = {}
        for name in _SpecialTokens.__struct_fields__:
            text = getattr(settings, name) or getattr(named, name)
            if text is not None:
                texts[name] = text if isinstance(text, str) else text.content
        with about(place):
            template = ChatTemplate(source, texts)
    with about(folder / TOKENIZER):
        content = read_file(folder / TOKENIZER)
        bytes_of = decoding_of(content)
        with calling("it cannot be used:"):
            inner = Tokenizer.from_buffer(content)
            prefix_token_ids = prefix_of(inner)
        return TransformerTokenizer(inner, bytes_of, prefix_token_ids, template)


def prefix_of(inner: "Tokenizer") -> list[int]:
    """Return the tokens that the post-processor of a tokenizer puts before a text."""
    encoded = inner.encode("a")
    is_special = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
    return [token_id for token_id, _ in takewhile(itemgetter(1), is_special)]


def decoding_of(text: bytes | str) -> Callable[[str], bytes]:
    """Return the function from a token's text to its bytes, by the decoder in a tokenizer.json."""
    decoder = msgspec.json.decode(text, type=_Tokenizer).decoder
    kinds = [] if decoder is None else [decoder.type, *(part.type for part in decoder.decoders)]
    found = next((kind for kind in kinds if kind in DECODERS), None)
    if found is None:
        said = " and ".join(kinds) or "nothing"
        raise BatchdecodeError(
            f"a tokenizer decoded by {said} is not supported, known: {', '.join(DECODERS)}"
        )
    return DECODERS[found]


# -- a GGUF file -----------------------------------------------------------------------------------
#
# Byte-level BPE, or a vocabulary of sentencepiece, in which the pair of neighbours whose token has
# the highest score is merged first.

BEGINNING_WITH_BOS = {"llama-bpe"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # of tokenizer.ggml.token_type
GEMMA = "gemma3"
MAX_PIECE = 256  # characters of a token that others may merge to
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_OTHERS}"
LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}"
# By llama.cpp's names in tokenizer.ggml.pre; None for the regex of GPT-2.
SPLITS = {"gpt-2": None, "smollm": None, "qwen2": QWEN2, "llama-bpe": LLAMA3}


class _Fields(Struct):
    """The metadata of a tokenizer."""

    model: str = field(name="tokenizer.ggml.model")
    tokens: list[str] = field(name="tokenizer.ggml.tokens")
    pre: str = field(name="tokenizer.ggml.pre", default="default")
    merges: list[str] = field(name="tokenizer.ggml.merges", default_factory=list)
    scores: list[float] = field(name="tokenizer.ggml.scores", default_factory=list)
    adds_space: bool = field(name="tokenizer.ggml.add_space_prefix", default=True)
    token_types: list[int] = field(name="tokenizer.ggml.token_type", default_factory=list)
    bos: TokenId | None = field(name="tokenizer.ggml.bos_token_id", default=None)
    adds_bos: bool | None = field(name="tokenizer.ggml.add_bos_token", default=None)
    eos: TokenId | None = field(name="tokenizer.ggml.eos_token_id", default=None)
    unk: TokenId | None = field(name="tokenizer.ggml.unknown_token_id", default=None)
    pad: TokenId | None = field(name="tokenizer.ggml.padding_token_id", default=None)
    chat_template: str | None = field(name="tokenizer.chat_template", default=None)


def tokenizer_from_gguf(path: Path, metadata: Mapping[str, Any]) -> TransformerTokenizer:
    """Return the tokenizer in the metadata of the file at `path`."""
    with about(path):
        fields = msgspec.convert(metadata, _Fields)
        if fields.model not in BYTES_OF:
            raise BatchdecodeError(
                f"a tokenizer of kind {fields.model!r} is not supported, known: "
                f"{', '.join(BYTES_OF)}; the folder it was converted from, with its "
                "tokenizer.json, may be"
            )
        template = None
        if fields.chat_template is not None:
            ids = {"bos": fields.bos, "eos": fields.eos, "unk": fields.unk, "pad": fields.pad}
            special_texts = {
                f"{name}_token": fields.tokens[token_id]
                for name, token_id in ids.items()
                if token_id is not None and token_id < len(fields.tokens)
            }
            template = ChatTemplate(fields.chat_template, special_texts)
        begins = fields.adds_bos
        if begins is None:  # llama.cpp's default by kind
            begins = fields.model == "llama" or fields.pre in BEGINNING_WITH_BOS
        prefix = [fields.bos] if begins and fields.bos is not None else []
        inner = _encoder_of(fields, metadata.get("general.architecture"))
        return TransformerTokenizer(inner, BYTES_OF[fields.model], prefix, template)


def _encoder_of(fields: _Fields, architecture: Any) -> "Tokenizer":
    """Return the encoder of byte-level BPE, or of a vocabulary of sentencepiece.

    Gemma's vocabulary is in merge order and ignores scores, and has runs of plain spaces, where
    others have SPACE.
    """
    from tokenizers import AddedToken, Tokenizer, models, normalizers  # noqa: PLC0415 - optional

    tokens, pre, is_gpt2 = fields.tokens, fields.pre, fields.model == "gpt2"
    ranks = [-score for score in fields.scores]
    if architecture == GEMMA and not is_gpt2:
        tokens = [SPACE * len(token) if {*token} == {" "} else token for token in tokens]
        ranks = [*range(len(tokens))]
    if is_gpt2 and pre not in SPLITS:
        known = ", ".join(SPLITS)
        raise BatchdecodeError(f"tokenizer.ggml.pre {pre!r} is not supported, known: {known}")
    if not is_gpt2 and len(ranks) != len(tokens):
        raise BatchdecodeError(f"its tokenizer has {len(tokens)} tokens and {len(ranks)} scores")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise BatchdecodeError("its tokenizer has the same token twice")
    with calling("its tokenizer cannot be used:"):
        if is_gpt2:
            pairs = [merge.partition(" ")[::2] for merge in fields.merges]
            encoder = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
            encoder.pre_tokenizer = split_of(pre)
            if pre == "qwen2":
                encoder.normalizer = normalizers.NFC()
        else:
            # All pairs whose concatenation is a token, lowest rank first; of equal ones, the
            # longest first part goes first.
            kinds = chain(fields.token_types, repeat(NORMAL))
            rank_of = {
                token: rank
                for token, rank, kind in zip(tokens, ranks, kinds, strict=False)
                if kind not in {UNKNOWN, CONTROL, BYTE}
            }
            found = [
                (rank, -size, token)
                for token, rank in rank_of.items()
                for size in range(1, len(token) if len(token) <= MAX_PIECE else 0)
                if token[:size] in rank_of and token[size:] in rank_of
            ]
            found.sort(key=itemgetter(0, 1))
            pairs = [(token[:-minus], token[-minus:]) for _, minus, token in found]
            has_unknown = fields.unk is not None and fields.unk < len(tokens)
            unknown = tokens[fields.unk or 0] if has_unknown else None
            encoder = Tokenizer(
                models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
            )
            steps = [normalizers.Prepend(SPACE)] if fields.adds_space else []
            encoder.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        whole = zip(tokens, fields.tokens, fields.token_types, strict=False)
        encoder.add_tokens(
            [
                AddedToken(token, special=kind != USER_DEFINED, normalized=False)
                for token, given, kind in whole
                if kind in {UNKNOWN, CONTROL, USER_DEFINED} and token == given
            ]
        )
    return encoder


def split_of(pre: str) -> "PreTokenizer":
    """Return the pre-tokenizer of `pre`, one of SPLITS."""
    from tokenizers import Regex  # noqa: PLC0415 - optional
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split  # noqa: PLC0415 - as above

    regex = SPLITS[pre]
    by_bytes = ByteLevel(add_prefix_space=False, use_regex=regex is None)
    if regex is not None:
        return Sequence([Split(Regex(regex), "isolated"), by_bytes])
    return Sequence([Digits(individual_digits=True), by_bytes]) if pre == "smollm" else by_bytes


# The bytes of a token, by tokenizer.ggml.model.
BYTES_OF = {"gpt2": byte_level_bytes, "llama": sentencepiece_bytes}
