"""OpenAI's and vLLM's names for the fields of a request, and rows of OpenAI Batch files.

Rule: an option that would change the output and is not supported is an error, never ignored.
A reader says which field of a request has which value. Whether the value is valid is left to
validation.py, whichever name it has.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import takewhile
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from batcher.errors import EncodingError, FieldProblem, Path, describe, not_encoded
from batcher.request import REQUEST_FIELDS, TO_THE_END, Count, PromptSegment, Request, Text, TokenId
from batcher.requests.validation import (
    ModelCapabilities,
    check_value,
    cut,
    missing,
    own_name,
    quote,
    show,
    suggest,
    wrong,
)

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
URLS = (COMPLETIONS_URL, CHAT_URL)

Form = Literal["result", "completion", "echoed completion", "chat"]
"""Form of the answer: our own results, or an OpenAI row. The logprobs of an echoed completion begin
with those of the prompt, as its text does."""

# Option values without effect here; null is always allowed. A type allows all its values.
Supported = dict[str, type[str] | type[dict[str, Any]] | tuple[object, ...]]
_EVERYWHERE: Supported = {
    **dict.fromkeys(("model", "user", "service_tier", "prompt_cache_key"), str),
    **dict.fromkeys(("safety_identifier", "prompt_cache_retention"), str),
    "metadata": dict,
    "store": (False, True),
    "stream": (False,),
    "stream_options": (),
    # vLLM's defaults
    **dict.fromkeys(
        ("detokenize", "skip_special_tokens", "spaces_between_special_tokens"), (True,)
    ),
    "use_beam_search": (False,),
}
COMPLETION_OPTIONS: Supported = {**_EVERYWHERE, "suffix": ("",)}
CHAT_OPTIONS: Supported = {
    **_EVERYWHERE,
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
}
OPTIONS: dict[str | None, Supported] = {
    COMPLETIONS_URL: COMPLETION_OPTIONS,
    CHAT_URL: CHAT_OPTIONS,
    None: COMPLETION_OPTIONS | CHAT_OPTIONS,  # our own lines
}

# Fields that are sent to a server unchanged:
# OpenAI; vLLM and SGLang; llama.cpp and Ollama; OpenRouter, DeepSeek, Mistral, xAI and others.
_PASSED_ON = """
model tools tool_choice parallel_tool_calls allowed_tools functions function_call suffix user
metadata store service_tier modalities audio prediction reasoning_effort verbosity
web_search_options safety_identifier prompt_cache_key prompt_cache_retention
add_generation_prompt add_special_tokens chat_template chat_template_kwargs
continue_final_message detokenize documents guided_decoding_backend guided_whitespace_pattern
include_reasoning kv_transfer_params logits_processors logits_processor_args media_io_kwargs
mm_processor_kwargs prompt_embeds request_id return_token_ids return_tokens_as_token_ids
skip_special_tokens spaces_between_special_tokens structural_tag thinking_token_budget
truncate_prompt_tokens vllm_xargs custom_logit_processor custom_params ebnf lora_path
no_stop_trim return_hidden_states rid separate_reasoning session_params stop_regex
stream_reasoning
cache_prompt dry_allowed_length dry_base dry_multiplier dynatemp_range grammar grammar_lazy
id_slot keep_alive min_keep options samplers reasoning_format repeat_last_n repeat_penalty
think xtc_probability xtc_threshold lora parse_tool_calls return_progress thinking_forced_open
timings_per_token top_n_sigma
enable_search enable_thinking include models plugins preset prompt_mode provider random_seed
reasoning route safe_prompt search_parameters thinking thinking_budget top_a transforms usage
web_search do_sample fallbacks reasoning_split session_id tool_stream
"""
PASSED_ON = tuple(_PASSED_ON.split())

# Fields of servers that have no effect here; null is allowed.
UNSUPPORTED = frozenset((*OPTIONS[None], *PASSED_ON, "extra_body"))


def url_of(row: dict[str, Any]) -> str | None:
    url, body = row.get("url"), row.get("body")
    if url in URLS:
        return str(url)
    if url is None:
        return CHAT_URL if isinstance(body, dict) and "messages" in body else COMPLETIONS_URL
    # CHAT_URL comes first, because it also ends with the end of the other one.
    ends = (end for end in reversed(URLS) if str(url).endswith(end.removeprefix("/v1")))
    return next(ends, None)


def form_of(url: str | None, request: Request) -> Form:
    if url is None:
        return "result"
    if url == CHAT_URL:
        return "chat"
    is_echoed = request.echo is True and request.logprobs is not None
    return "echoed completion" if is_echoed else "completion"


def is_supported(supported: object, value: object) -> bool:
    """Return whether `value` of an option changes nothing; supported: as in Supported."""
    if value is None:
        return True
    if isinstance(supported, type):
        return isinstance(value, supported)
    is_bool = isinstance(value, bool)  # true equals 1 in Python
    others = supported if isinstance(supported, tuple) else ()
    return any(isinstance(other, bool) == is_bool and other == value for other in others)


# -- what the other names mean ---------------------------------------------------------------------

Message = dict[str, str]
ChatTemplate = Callable[..., Any]
"""Turns messages into text, token ids, or a mapping with token ids as `input_ids`."""

_Unused = Annotated[Any, Meta(extra_json_schema={"enum": [None, "", [], {}, False, 0]})]
_SchemaOrText = Annotated[
    Any, Meta(extra_json_schema={"type": ["object", "boolean", "string", "null"]})
]


class ContentPart(Struct, forbid_unknown_fields=True):
    """A part of the content of a message."""

    type: Literal["text"]
    text: str


class PromptMessage(Struct, forbid_unknown_fields=True):
    """A chat message. The fields after `name` occur in server responses and are ignored."""

    role: Text
    content: str | list[ContentPart]
    name: str | None = None
    refusal: _Unused = None
    tool_calls: _Unused = None
    tool_call_id: _Unused = None
    function_call: _Unused = None
    audio: _Unused = None
    annotations: _Unused = None
    reasoning: _Unused = None
    reasoning_content: _Unused = None
    prefix: _Unused = None


class StatedSchema(Struct, forbid_unknown_fields=True):
    """A JSON Schema as OpenAI's response_format states it."""

    schema: Annotated[Any, Meta(extra_json_schema={"type": ["object", "boolean"]})]
    name: Any = None
    description: Any = None
    strict: Any = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """What OpenAI's response_format holds."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: StatedSchema | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """One of vLLM's constraints."""

    json: _SchemaOrText = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class Spellings(Struct):
    """OpenAI's and vLLM's names for fields of a request."""

    messages: Annotated[
        Annotated[list[PromptMessage], Meta(min_length=1)] | None,
        "A chat; the model's template makes the prompt.",
    ] = None
    max_completion_tokens: Annotated[Count | None, "A synonym of max_tokens."] = None
    stop_token_ids: Annotated[
        list[TokenId] | None, "Token ids that end the output; a synonym of stop_token."
    ] = None
    special_tokens_in_text: Annotated[
        bool | None, "Whether special tokens spelled out in texts are read as such."
    ] = None
    response_format: Annotated[Any, "OpenAI's way to ask for JSON."] = None
    guided_json: Annotated[_SchemaOrText, "A synonym of json_schema; text is read as JSON."] = None
    guided_regex: Annotated[str | None, "A synonym of regex."] = None
    guided_choice: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None, "A synonym of choice."
    ] = None
    guided_grammar: Annotated[
        Text | None, "A grammar: with `::=` in it a synonym of gbnf, else of lark."
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, "vLLM's way to state one of the constraints."
    ] = None


_MESSAGES = Annotated[list[PromptMessage], Meta(min_length=1)]
_NOT_USED = PromptMessage.__struct_fields__[3:]
SPECIAL = "special_tokens_in_text"


class Given(NamedTuple):
    """The value of a field of a request, and its place in the line."""

    field: str
    value: Any
    path: Path


class Fields(NamedTuple):
    """The object that holds the fields of a request, and the model's capabilities."""

    values: Mapping[str, Any]
    capabilities: ModelCapabilities

    @property
    def allows_special(self) -> bool:
        """Whether special tokens that are spelled out in texts are read as such."""
        given = self.values.get(SPECIAL)
        is_asked = self.capabilities.defaults.get(SPECIAL) if given is None else given
        return bool(is_asked) and self.capabilities.encode_with_special is not None


Found = Iterator[Given | FieldProblem]
Reader = Callable[[str, Any, Fields], Found]
"""reader(name, value, fields) yields what a value other than null means."""


def find_given(fields: Fields, spellings: Mapping[str, Reader]) -> Found:
    for name, read in spellings.items():
        value = fields.values.get(name)
        if value is not None:
            yield from read(name, value, fields)


def _renamed(field: str) -> Reader:
    def read(name: str, value: Any, _: Fields) -> Found:
        yield Given(field, value, (name,))

    return read


def _read_stop_token_ids(name: str, value: Any, _: Fields) -> Found:
    if not isinstance(value, list):
        yield wrong("invalid-type", (name,), "a list of token ids", value)
    elif value:
        yield Given("stop_token", value, (name,))


def _json_schema(path: Path, value: Any) -> Found:
    if not isinstance(value, str):
        yield Given("json_schema", value, path)
        return
    from batcher.requests.json_spans import NOT_JSON, JsonError, parse  # noqa: PLC0415 - rare

    try:
        schema = parse(value)
    except JsonError as error:
        what = error.message.removeprefix(NOT_JSON)
        message = f"{quote(path)} is text, but not JSON: offset {error.span.start}: {what}"
        yield FieldProblem("invalid-value", path, message)
        return
    if isinstance(schema, dict | bool):
        yield Given("json_schema", schema, path)
    else:
        message = f"{quote(path)} is text, not a JSON Schema: {show(schema)}"
        yield FieldProblem("invalid-value", path, message)


def _grammar(path: Path, value: Any) -> Found:
    # As in vLLM, a grammar with `::=` is GBNF, any other is Lark.
    is_gbnf = isinstance(value, str) and "::=" in value
    yield Given("gbnf" if is_gbnf else "lark", value, path)


def _read_response_format(name: str, value: Any, fields: Fields) -> Found:
    yield from check_value(ResponseFormat, value, (name,), fields.capabilities)
    if not isinstance(value, dict):
        return
    kind, stated, path = value.get("type"), value.get("json_schema"), (name, "json_schema")
    if kind == "json_object":  # some servers take a schema here
        yield Given("json_schema", value.get("schema", {"type": "object"}), (name, "type"))
    elif kind == "json_schema" and stated is None:
        yield missing(path)
    elif kind == "json_schema":
        if isinstance(stated, dict) and stated.get("schema") is not None:
            yield Given("json_schema", stated["schema"], (*path, "schema"))
    elif stated is not None:
        message = f'`{name}.json_schema` has no effect unless `type` is "json_schema"'
        yield FieldProblem("conflicting-fields", path, message)


def _read_structured_outputs(name: str, value: Any, fields: Fields) -> Found:
    problems = [*check_value(StructuredOutputs, value, (name,), fields.capabilities)]
    yield from problems
    for key, part in ({} if problems else value).items():
        path = (name, key)
        if key == "json" and part is not None:
            yield from _json_schema(path, part)
        elif key == "grammar" and part is not None:
            yield from _grammar(path, part)
        elif key == "json_object" and part:
            yield Given("json_schema", {"type": "object"}, path)
        elif key != "json_object" and part is not None:
            yield Given(key, part, path)


def _read_messages(name: str, messages: Any, fields: Fields) -> Found:
    path, template = (name,), fields.capabilities.chat_template
    if fields.capabilities.served is not None:
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            yield wrong("invalid-type", path, "a list of messages, which are objects", messages)
        elif not messages:
            yield FieldProblem("invalid-value", path, f"{quote(path)} is empty")
        else:
            yield Given("prompt", "", path)
            yield Given("extra_body", {"messages": messages}, path)
        return
    problems = _check_messages(messages, path, fields)
    if problems:
        yield from problems
        return
    if template is None:
        message = "`messages` needs a model with a chat template; this one has none"
        hint = "use `prompt`, or add `apply_chat_template` to the model or its tokenizer"
        yield FieldProblem("unsupported-model", path, message, hint)
        return
    if fields.allows_special:
        template = partial(template, special_tokens_in_text=True)
    try:
        flat = [_flat(message) for message in messages]
        rendered = _rendered(template(flat))
        num_system = (
            _num_system_tokens(flat, rendered, template) if "session" in fields.values else 0
        )
        if num_system:
            system = PromptSegment(tokens=[*rendered[:num_system]], type="system")
            rendered = [system, PromptSegment(tokens=[*rendered[num_system:]])]
    except Exception as error:  # noqa: BLE001 - the template's own code
        message = f"the chat template fails on {quote(path)}: {describe(error)}"
        yield FieldProblem("invalid-value", path, message)
    else:
        yield Given("prompt", rendered, path)


def _read_passed_on(name: str, value: Any, _: Fields) -> Found:
    yield Given("extra_body", {name: value}, (name,))


def _as_written(read: Reader) -> Reader:
    """Return a reader that also sends the value to the server, which checks it."""

    def both(name: str, value: Any, fields: Fields) -> Found:
        yield from (found for found in read(name, value, fields) if isinstance(found, Given))
        yield from _read_passed_on(name, value, fields)

    return both


def _rendered(answer: Any) -> str | list[Any]:
    rendered = answer["input_ids"] if isinstance(answer, Mapping) else answer
    if isinstance(rendered, str):
        return rendered
    if isinstance(rendered, list) and set(map(type, rendered)) <= {int}:
        return rendered
    return [int(token_id) for token_id in rendered]


def _num_system_tokens(
    messages: list[Message], rendered: str | list[Any], template: ChatTemplate
) -> int:
    """Return the number of tokens of the system's messages, which a session never drops."""
    system = list(takewhile(lambda message: message["role"] == "system", messages))
    if not system or system == messages or isinstance(rendered, str):
        return 0
    try:
        alone = _rendered(template(system, add_generation_prompt=False))
    except Exception:  # noqa: BLE001 - a template may need other messages, too
        return 0
    return len(alone) if alone == rendered[: len(alone)] else 0


def _read_prompt(name: str, value: Any, fields: Fields) -> Found:
    encode = fields.capabilities.encode_with_special
    if isinstance(value, str) and fields.capabilities.takes_chats:
        yield from _read_messages(name, [{"role": "user", "content": value}], fields)
        return
    if isinstance(value, str) and encode is not None and fields.allows_special:
        if fields.values.get("session") is not None:
            message = f"`{SPECIAL}` needs a whole prompt, and a session continues one"
            yield FieldProblem("conflicting-fields", (name,), message, "use messages")
            return
        try:
            value = encode(value)
        except EncodingError as error:
            yield not_encoded((name,), error)
            return
    yield Given("prompt", value, (name,))


def _read_special(name: str, value: Any, fields: Fields) -> Found:
    if not isinstance(value, bool):
        yield wrong("invalid-type", (name,), "true or false", value)
    elif value and fields.capabilities.encode_with_special is None:
        message = f"`{name}` needs a checkpoint or a model of transformers here"
        yield FieldProblem("unsupported-model", (name,), message, "leave it out")


def _flat(message: Mapping[str, Any]) -> Message:
    """Return a valid message with its content as one text: parts become lines, as in vLLM."""
    names = ("role", "content", "name")
    flat = {name: message[name] for name in names if message.get(name) is not None}
    if isinstance(flat["content"], list):
        flat["content"] = "\n".join(part["text"] for part in flat["content"])
    return flat


def _check_messages(messages: Any, path: Path, fields: Fields) -> list[FieldProblem]:
    with suppress(msgspec.ValidationError):
        valid = msgspec.convert(messages, _MESSAGES)
        if not any(getattr(message, name) for message in valid for name in _NOT_USED):
            return []
    problems = [*check_value(_MESSAGES, messages, path, fields.capabilities)]
    # A part of another type is one problem.
    others = {problem.path[:-1] for problem in problems if problem.path[-1] == "type"}
    problems = [
        replace(problem, code="unsupported-option") if problem.path[:-1] in others else problem
        for problem in problems
        if problem.path[-1] == "type" or problem.path[:-1] not in others
    ]
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in _NOT_USED if isinstance(message, dict) else ():
            if message.get(name):
                place = (*path, index, name)
                text = f"{quote(place)} is not supported"
                problems.append(FieldProblem("unsupported-option", place, text, "leave it out"))
    return problems


def _read_echo(name: str, value: Any, fields: Fields) -> Found:
    yield Given("echo", value, (name,))
    num_told = fields.values.get("logprobs")
    if value is True and num_told is not None and fields.values.get("prompt_logprobs") is None:
        yield Given("prompt_logprobs", num_told, (name,))


def _read_chat_logprobs(name: str, value: Any, fields: Fields) -> Found:
    if not isinstance(value, bool):
        problem = wrong("invalid-type", (name,), "true or false", value)
        yield replace(problem, hint="use `top_logprobs` for the number")
    elif value and fields.values.get("top_logprobs") is None:
        yield Given("logprobs", 0, (name,))


def _read_top_logprobs(name: str, value: Any, fields: Fields) -> Found:
    if fields.values.get("logprobs") is True:
        yield Given("logprobs", value, (name,))
    elif value != 0 or isinstance(value, bool):
        message = f"`{name}` has no effect without `logprobs`; give true"
        yield FieldProblem("conflicting-fields", (name,), message)


CONSTRAINT_SPELLINGS: Mapping[str, Reader] = {
    "response_format": _read_response_format,
    "guided_json": lambda name, value, _: _json_schema((name,), value),
    "guided_regex": _renamed("regex"),
    "guided_choice": _renamed("choice"),
    "guided_grammar": lambda name, value, _: _grammar((name,), value),
    "structured_outputs": _read_structured_outputs,
}
_WRITTEN = {"max_completion_tokens": _renamed("max_tokens"), **CONSTRAINT_SPELLINGS}
SPELLINGS: Mapping[str, Reader] = {
    "messages": _read_messages,
    "stop_token_ids": _read_stop_token_ids,
    SPECIAL: _read_special,
    **_WRITTEN,
}
_CHAT_LOGPROBS = {"logprobs": _read_chat_logprobs, "top_logprobs": _read_top_logprobs}
_SPELLINGS_OF_ROWS: Mapping[str, Mapping[str, Reader]] = {
    COMPLETIONS_URL: {n: r for n, r in SPELLINGS.items() if n != "messages"} | {"echo": _read_echo},
    CHAT_URL: {**SPELLINGS, **_CHAT_LOGPROBS},
}
SYNONYMS = {"custom_id": "id", "prompt_tokens": "prompt"}
ROW_FIELDS = ("custom_id", "method", "url", "body")
LINE_FIELDS = (*Request.__struct_fields__, *SYNONYMS, *SPELLINGS, *OPTIONS[None])
BODY_FIELDS: dict[str, tuple[str, ...]] = {
    url: tuple(
        dict.fromkeys(
            name
            for name in (*Request.__struct_fields__, *_SPELLINGS_OF_ROWS[url], *OPTIONS[url])
            if name != "id" and (name, url) != ("prompt", CHAT_URL)
        )
    )
    for url in URLS
}
KNOWN_NAMES: dict[str | None, tuple[str, ...]] = {None: LINE_FIELDS} | dict(BODY_FIELDS.items())


# The engine sets these itself: a server's answer is always streamed, with its usage.
_STREAMED = (*PASSED_ON, "stream", "stream_options")


class Reading:
    """The fields of a request in one line, by our own names.

    url: of a row, /v1/completions if it is unknown; None if the line is not a row.
    values: the object with the fields, or {}; prefix: the path to it.
    named: the given fields, and the defaults that go with them; their values are not checked.
    problems: of the names; paths are those in the line.
    is_echoing: whether `echo` with `logprobs` asks for `prompt_logprobs`.
    """

    def __init__(self, line: dict[str, Any], capabilities: ModelCapabilities) -> None:
        is_row = not line.keys().isdisjoint(ROW_FIELDS[1:])
        self._line, self._is_server = line, capabilities.served is not None
        self.url = (url_of(line) or COMPLETIONS_URL) if is_row else None
        self.prefix: Path = ("body",) if is_row else ()
        values = line.get("body") if is_row else line
        self.values: dict[str, Any] = values if isinstance(values, dict) else {}
        self.problems: list[FieldProblem] = []
        self.is_echoing = False
        self._paths: dict[str, Path] = {}
        fields = Fields(self.values, capabilities)
        spellings = SPELLINGS if self.url is None else _SPELLINGS_OF_ROWS[self.url]
        if self._is_server:
            written = {name: _as_written(read) for name, read in _WRITTEN.items()}
            spellings = {**spellings, **written, **dict.fromkeys(PASSED_ON, _read_passed_on)}
        if capabilities.takes_chats or fields.allows_special:
            spellings = {**spellings, "prompt": _read_prompt}
        own = {
            name: value
            for name, value in self.values.items()
            if value is not None and name in REQUEST_FIELDS
            if name == "prompt" or name not in spellings
        }
        if is_row:
            own.pop("id", None)
            self._paths["id"] = ("custom_id",)
        for synonym, name in SYNONYMS.items():
            if line.get(synonym) is not None and (name == "id" or not is_row):
                if name in own:
                    self.problems.append(_alike((synonym,), (name,)))
                own[name], self._paths[name] = line[synonym], (synonym,)
        self.named = self._defaults(capabilities) | own
        if not self.values.keys().isdisjoint(spellings):
            self._read_spellings(find_given(fields, spellings), own, spellings)

    def _read_spellings(
        self, found: Found, own: dict[str, Any], spellings: Mapping[str, Reader]
    ) -> None:
        spelled: dict[str, Any] = {}
        for given in found:
            if isinstance(given, FieldProblem):
                self.problems.append(replace(given, path=(*self.prefix, *given.path)))
                continue
            field, value, path = given.field, given.value, (*self.prefix, *given.path)
            other = spelled.get(field)
            has_own_name = self.url is None or field in BODY_FIELDS[self.url]
            if other is None and field not in spellings and has_own_name:
                other = own.get(field)
            is_extra = field == "extra_body"  # it has parts of several fields
            if is_extra and isinstance(other, dict):
                spelled[field] = value | other
            elif other is None or other == value:
                spelled[field] = value
                if not is_extra:
                    self._paths[field] = path
            else:
                self.problems.append(_alike(path, self.path_of(field)))
        self.named |= spelled
        self.is_echoing = "prompt_logprobs" in spelled

    def _defaults(self, capabilities: ModelCapabilities) -> dict[str, Any]:
        """Return the values of fields that are left out, except those that others exclude."""
        is_text = isinstance(self.values.get("prompt"), str)
        is_chat = self.values.get("messages") is not None or (capabilities.takes_chats and is_text)
        if not (capabilities.defaults or is_chat):
            return {}
        given = {name for name, value in self.values.items() if value is not None}
        defaults = {
            name: value
            for name, value in capabilities.defaults.items()
            if name != SPECIAL and given.isdisjoint({name, *REQUEST_FIELDS[name].excludes})
        }
        if not given.isdisjoint({"max_tokens", "max_completion_tokens"}):
            defaults.pop("max_tokens", None)
        elif is_chat and capabilities.served is None:  # a server has its own defaults
            defaults.setdefault("max_tokens", TO_THE_END)
        return defaults

    def path_of(self, field: str) -> Path:
        return self._paths.get(field, (*self.prefix, field))

    def stated(self) -> frozenset[str]:
        given = (name for name, value in self.values.items() if value is not None)
        return frozenset((*self.named, *given))

    def find_misplaced(self) -> Iterator[FieldProblem]:
        """Yield wrong names, options and members of a row; paths are those in the line."""
        yield from self.problems
        path, line, values = self.prefix, self._line, self.values
        if self.url is not None:
            for name in (name for name in line if name not in ROW_FIELDS):
                if line[name] is not None or name not in UNSUPPORTED:
                    yield unknown((name,), ROW_FIELDS)
            if (method := line.get("method")) not in (None, "POST"):
                message = f'`method` must be "POST", not {show(method)}'
                yield FieldProblem("unsupported-option", ("method",), message)
            if url_of(line) is None:
                expected = " or ".join(f'"{value}"' for value in URLS)
                message = f"`url` must be {expected}, not {show(line.get('url'))}"
                yield FieldProblem("unsupported-option", ("url",), message)
            if "body" not in line:
                yield missing(("body",))
                return
            if not isinstance(line["body"], dict):
                yield wrong("invalid-type", ("body",), "an object", line["body"])
                return
        elif isinstance(line.get("prompt_tokens"), str):
            message = "`prompt_tokens` must be a list of token ids, not a string"
            yield FieldProblem("invalid-type", ("prompt_tokens",), message, "use `prompt`")
        allowed = _allowed_names(self.url, is_server=self._is_server)
        misnamed = [
            unknown((*path, name), tuple(allowed))
            for name in values
            if name not in allowed and (values[name] is not None or name not in UNSUPPORTED)
        ]
        yield from misnamed
        names = [name for name in ("prompt", "prompt_tokens", "messages") if name in allowed]
        if names[0] not in values and all(values.get(name) is None for name in names):
            hints = {f"did you mean `{name}`?" for name in names}
            if all(problem.hint not in hints for problem in misnamed):
                yield missing((*path, names[0]))
        options = OPTIONS[self.url]
        for option in [name for name in values if name in options]:
            supported, value, place = options[option], values[option], (*path, option)
            if is_supported(supported, value) or (self._is_server and option in _STREAMED):
                continue
            if isinstance(supported, type):
                kind = {str: "a string", dict: "an object"}[supported]
                yield wrong("invalid-type", place, kind, value)
            else:
                message = f"{quote(place)} {show(value)} is not supported"
                own = own_name(option, Request.__struct_fields__)
                ways = ["leave it out", *(f"give {json.dumps(v)}" for v in supported)]
                hint = " or ".join(ways) if own is None else f"did you mean `{own}`?"
                yield FieldProblem("unsupported-option", place, message, hint)


@cache
def _allowed_names(url: str | None, *, is_server: bool) -> dict[str, None]:
    return dict.fromkeys((*KNOWN_NAMES[url], *(_STREAMED if is_server else ())))


def unknown(path: Path, allowed: tuple[str, ...]) -> FieldProblem:
    name = cut(str(path[-1]))
    is_foreign = name in UNSUPPORTED and own_name(name, allowed) is None
    if is_foreign and "prompt_logprobs" in allowed:  # where fields of a request belong
        message = f"{quote(path)} is an option of OpenAI or vLLM, but not supported here"
        return FieldProblem("unsupported-option", path, message, "leave it out", is_key=True)
    hint = suggest(name, allowed)
    if allowed is ROW_FIELDS and any(name in names for names in BODY_FIELDS.values()):
        hint = "move it into `body`"
    if path[:-1] == ("body",):
        urls = [url for url, names in BODY_FIELDS.items() if name in names]
        hint = f"it is for {urls[0]}" if urls else hint
    return FieldProblem("unknown-field", path, f"unknown field `{name}`", hint, is_key=True)


def _alike(path: Path, other: Path) -> FieldProblem:
    message = f"{quote(path)} and {quote(other)} are synonyms; use one of them"
    return FieldProblem("conflicting-fields", path, message)
