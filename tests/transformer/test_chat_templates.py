"""Chat templates: what transformers gives them, and what they cannot reach."""

import pytest

from batcher.foreign import RaisedError
from batcher.transformer.tokenizer import ChatTemplate

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
