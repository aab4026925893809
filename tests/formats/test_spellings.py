"""The names that OpenAI and vLLM have for fields of a request, and chats."""

import json

import pytest
from msgspec.structs import replace

from batcher.api import decode
from batcher.errors import GrammarError, RequestError
from batcher.models.base import chat_template_of
from batcher.models.simulated import SimulatedModel
from batcher.request import TO_THE_END, Request
from batcher.requests.lines import BadLine, RequestParser
from batcher.requests.problems import read_line
from batcher.requests.validation import ModelCapabilities

MODEL = SimulatedModel()
PARSER = RequestParser(ModelCapabilities(vocab_size=512, chat_template=chat_template_of(MODEL)))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STATED = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
ANY_OBJECT = {"type": "object"}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
PROMPT = "system: Be brief.\nuser: Hi\nassistant:"


def line(**fields):
    return {"id": "a", "prompt": "x", **fields}


def row(url="/v1/completions", **body):
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"prompt": "x", **body}}


def chat(**body):
    request = row("/v1/chat/completions", messages=CHAT)
    del request["body"]["prompt"]
    request["body"] |= body
    return request


def parse(fields):
    return PARSER.parse(json.dumps(fields).encode(), 7)


def problems(fields):
    return [(problem.code, problem.field) for problem in parse(fields).problems]


SAME = [
    ({"max_completion_tokens": 5}, {"max_tokens": 5}),
    ({"stop_token_ids": [5, 6]}, {"stop_token": [5, 6]}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": 'root ::= "a"'}, {"gbnf": 'root ::= "a"'}),
    ({"guided_grammar": 'start: "a"'}, {"lark": 'start: "a"'}),
    ({"response_format": {"type": "json_object"}}, {"json_schema": ANY_OBJECT}),
    ({"response_format": STATED}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"json_object": True}}, {"json_schema": ANY_OBJECT}),
]


@pytest.mark.parametrize(("fields", "own"), SAME, ids=str)
def test_a_field_by_another_name_means_the_same(fields, own):
    request = Request(id="a", prompt="x", **own)
    for given in (line(**fields), row(**fields)):
        assert parse(given).request == request
        assert PARSER._parse_good(json.dumps(given).encode(), 7).request == request
    own = {"max_tokens": TO_THE_END, **own}
    assert parse(chat(**fields)).request == Request(id="a", prompt=PROMPT, **own)


BAD = [
    ({"stop_token_ids": 5}, "invalid-type", "stop_token_ids"),
    ({"stop_token_ids": [5, 600]}, "unknown-token", "stop_token_ids[1]"),
    ({"guided_json": "{"}, "invalid-value", "guided_json"),
    ({"response_format": {}}, "missing-field", "response_format.type"),
    (
        {"response_format": STATED | {"type": "text"}},
        *("conflicting-fields",),
        "response_format.json_schema",
    ),
    ({"response_format": {"type": "json_schema"}}, "missing-field", "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
        "missing-field",
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "text", "x": 1}}, "unknown-field", "response_format.x"),
    ({"structured_outputs": {"jsn": {}}}, "unknown-field", "structured_outputs.jsn"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "conflicting-fields", "max_completion_tokens"),
    ({"guided_json": {}, "response_format": STATED}, "conflicting-fields", "guided_json"),
]


@pytest.mark.parametrize(("fields", "code", "field"), BAD, ids=str)
def test_what_is_wrong_is_told_where_it_stands(fields, code, field):
    assert problems(line(**fields)) == [(code, field)]
    assert problems(row(**fields)) == [(code, f"body.{field}")]
    assert problems(chat(**fields)) == [(code, f"body.{field}")]


def test_an_echo_with_logprobs_tells_those_of_the_prompt():
    parsed = parse(row(echo=True, logprobs=2))
    expected = {"echo": True, "logprobs": 2, "prompt_logprobs": 2}
    assert parsed.request == Request(id="a", prompt="x", **expected)
    assert parsed.form == "echoed completion"
    assert parse(row(echo=True, logprobs=2, prompt_logprobs=0)).request.prompt_logprobs == 0
    assert parse(row(echo=True)).form == "completion"
    assert parse(row(logprobs=2)).request.prompt_logprobs is None
    assert parse(line(echo=True, logprobs=2)).request.prompt_logprobs is None
    [problem] = parse(row(echo=True, logprobs=1, heal=True)).problems
    assert problem.message.startswith("`echo` with `logprobs` cannot go with `heal`: ")


# Chats


def test_messages_become_the_prompt_that_the_template_makes():
    request = Request(id="a", prompt=PROMPT, max_tokens=4)
    assert parse({"id": "a", "messages": CHAT, "max_tokens": 4}).request == request
    parsed = parse(chat(max_completion_tokens=4))
    assert (parsed.request, parsed.form) == (request, "chat")
    assert PARSER._parse_good(json.dumps(chat()).encode(), 7).form == "chat"


def test_parts_of_text_are_lines_of_one():
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    messages = [{"role": "user", "name": "ann", "content": parts, "tool_calls": None}]
    assert parse({"messages": messages}).request.prompt == "user ann: Be\nbrief.\nassistant:"


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False, "top_logprobs": 0}, {}),
        ({"tools": [], "store": False, "metadata": {"a": "b"}, "modalities": ["text"]}, {}),
    ],
    ids=str,
)
def test_a_chat_says_things_in_its_own_way(fields, own):
    own = {"max_tokens": TO_THE_END, **own}
    assert parse(chat(**fields)).request == Request(id="a", prompt=PROMPT, **own)


LIMITS = [  # what a row says, the default of the run, what its kind is left to
    (row(), None, None),
    (chat(), None, TO_THE_END),
    ({"messages": CHAT}, None, TO_THE_END),
    ({"messages": CHAT, "max_tokens": 5}, None, 5),
    (chat(max_completion_tokens=0), None, 0),
    *((fields, 30, 30) for fields in (line(), row(), chat(), chat(max_completion_tokens=None))),
    *((fields, 30, 5) for fields in (line(max_tokens=5), chat(max_completion_tokens=5))),
]


@pytest.mark.parametrize(("fields", "default", "limit"), LIMITS, ids=str)
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_row_without_a_limit_has_that_of_its_kind(fields, default, limit, is_chat):
    defaults = {} if default is None else {"max_tokens": default}
    parser = RequestParser(replace(PARSER._capabilities, defaults=defaults, takes_chats=is_chat))
    if is_chat and limit is None and "body" not in fields:
        limit = TO_THE_END
    data = json.dumps(fields).encode()
    if not (is_chat and "body" in fields):
        assert parser.parse(data, 7).request.max_tokens == limit


DEFAULTS = {"temperature": 0.5, "top_p": 0.9, "seed": 7}


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({}, DEFAULTS),
        ({"temperature": 0, "seed": None}, DEFAULTS | {"temperature": 0.0}),
        ({"num_beams": 2}, {"num_beams": 2, "seed": 7}),
        ({"mirostat": 2}, {"mirostat": 2, "temperature": 0.5, "seed": 7}),
        ({"guided_regex": "a+"}, DEFAULTS | {"regex": "a+"}),
    ],
    ids=str,
)
def test_defaults_of_a_run_are_those_of_rows_that_can_have_them(fields, own):
    capabilities = replace(PARSER._capabilities, defaults=DEFAULTS)
    for given in (line(**fields), row(**fields)):
        data = json.dumps(given).encode()
        request = Request(id="a", prompt="x", **own)
        assert RequestParser(capabilities).parse(data, 7).request == request
        assert read_line(data, 7, capabilities)[0] == request


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"logprobs": 5}, "invalid-type", "logprobs"),
        ({"top_logprobs": 5}, "conflicting-fields", "top_logprobs"),
        ({"prompt": "x"}, "unknown-field", "prompt"),
        ({"suffix": ""}, "unsupported-option", "suffix"),
        ({"tools": [{}]}, "unsupported-option", "tools"),
    ],
    ids=str,
)
def test_what_a_chat_cannot_say_is_refused(fields, code, field):
    assert problems(chat(**fields)) == [(code, f"body.{field}")]


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        (5, [("invalid-type", "messages")]),
        ([], [("invalid-value", "messages")]),
        (
            [{"role": 5, "content": 6}],
            [("invalid-type", f"messages[0].{n}") for n in ("role", "content")],
        ),
        ([{"role": "user", "content": "", "text": 5}], [("unknown-field", "messages[0].text")]),
        (
            [{"role": "user", "content": "", "tool_calls": [1]}],
            [("unsupported-option", "messages[0].tool_calls")],
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            [("unsupported-option", "messages[0].content[0].type")],
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            [("missing-field", "messages[0].content[0].text")],
        ),
        ([{"role": "bot", "content": "x"}], [("invalid-value", "messages")]),
    ],
    ids=str,
)
def test_bad_messages_have_their_place(messages, found):
    assert problems({"messages": messages}) == found


@pytest.mark.parametrize("name", ["reasoning_effort", "chat_template", "functions"])
def test_a_field_that_is_known_and_not_supported_is_no_misspelt_one(name):
    [problem] = parse(line(**{name: "x"})).problems
    assert (problem.code, problem.field) == ("unsupported-option", name)
    assert problem.message == f"`{name}` is an option of OpenAI or vLLM, but not supported here"


def test_a_prompt_and_messages_are_two_prompts():
    assert problems({"prompt": "x", "messages": CHAT}) == [("conflicting-fields", "messages")]
    assert problems({"id": "a", "messages": None}) == [("missing-field", "prompt")]


def test_a_model_without_a_template_is_told_what_to_do():
    parsed = RequestParser(ModelCapabilities()).parse(json.dumps({"messages": CHAT}).encode(), 1)
    [problem] = parsed.problems
    assert (problem.code, problem.field) == ("unsupported-model", "messages")
    assert "apply_chat_template" in problem.hint
    with pytest.raises(RequestError, match="needs a model with a chat template"):
        decode([{"messages": CHAT}], model=lambda prefixes: [0] * len(prefixes))


@pytest.mark.parametrize("answer", ["text", [5, 6], {"input_ids": [5, 6]}])
def test_a_template_gives_text_or_ids(answer):
    class Tokenizer:
        token_bytes = (b"a", b"b")

        def encode(self, text):
            return [0] * len(text)

        def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
            assert messages == CHAT
            assert tokenize
            assert add_generation_prompt
            return answer

    def model(prefixes):
        return [0] * len(prefixes)

    model.tokenizer = Tokenizer()
    [result] = decode([{"messages": CHAT, "max_tokens": 1}], model=model)
    assert result.usage.prompt_tokens == (4 if answer == "text" else 2)


def test_a_template_that_fails_fails_its_line_alone():
    def template(messages):
        raise KeyError(messages[0]["role"])

    parser = RequestParser(ModelCapabilities(chat_template=template))
    bad = parser.parse(json.dumps({"messages": CHAT}).encode(), 1)
    assert isinstance(bad, BadLine)
    assert bad.problems[0].message == "the chat template fails on `messages`: KeyError: 'system'"


PLACES = [  # a faulty text, how the message names the place, what stands there in the line
    ({"regex": "a(b"}, "offset 1: unclosed group", '(b"'),
    ({"regex": "\U0001f600["}, "offset 1: unclosed class", '["'),
    ({"guided_regex": "a\\"}, "offset 1: nothing after it", '\\\\"'),
    ({"gbnf": 'root ::= "a"\nb ::= ('}, "line 2, column 7: expected ')'", '("'),
    ({"structured_outputs": {"grammar": "start: foo"}}, "line 1, column 8: unknown name", 'foo"'),
    ({"lark": "start:"}, "the end: expected a value", '"}'),
    ({"json_schema": {"pattern": "x(a"}}, "in the regex 'x(a', offset 1: unclosed", '(a"'),
    ({"guided_json": '{"pattern": "x(a"}'}, "in the regex 'x(a', offset 1: unclosed", '"{'),
]


@pytest.mark.parametrize(("fields", "message", "there"), PLACES, ids=str)
@pytest.mark.parametrize("is_row", [False, True])
def test_an_error_in_a_grammar_points_into_its_text(fields, message, there, is_row):
    def check(name, _):
        raise GrammarError((name,), message)

    parser = RequestParser(ModelCapabilities(check_constraint=check))
    written = json.dumps(row(**fields) if is_row else line(**fields))
    [problem] = parser.parse(written.encode(), 7).problems
    assert problem.message.endswith(message)
    assert written[problem.column - 1 :].startswith(there)


def test_text_that_is_not_json_is_told_without_the_words_of_python():
    written = json.dumps(line(guided_json='{"a": never}'))
    [problem] = parse(json.loads(written)).problems
    assert problem.message == "`guided_json` is text, but not JSON: offset 6: expecting value"
    assert written[problem.column - 1 :].startswith("never")
