"""A model with several tokens that end a text: each of them is EOS."""

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tiny import tiny_model

from batcher import BatchdecodeError, Request, SimulatedModel, decode
from batcher.models.base import eos_token_ids_of
from batcher.models.loading import as_model
from batcher.request import Transition

IDS = st.integers(0, 15)
FIELDS = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 255), min_size=1, max_size=20),
        "max_tokens": st.integers(6, 20),
        "allowed_token_ids": st.just([*range(16)]),
    },
    optional={
        "temperature": st.just(1.0),
        "min_tokens": st.integers(0, 6),
        "logprobs": st.integers(0, 2),
        "stop_token": IDS,
        "stop_sequence": st.lists(IDS, min_size=2, max_size=2),
        "states": st.just(
            {
                "one": [Transition(on=[3, 7], to="two")],
                "two": [Transition(on=[4, 3], to="one"), Transition(on=[5, 6], to=None)],
            }
        ),
    },
)


def liking(biases):
    return {str(token_id): bias for token_id, bias in biases.items()}


@examples(60)
@given(FIELDS, st.lists(IDS, min_size=1, max_size=5, unique=True))
def test_they_end_a_text_as_stop_tokens_do(fields, eos_token_ids):
    """But for the reason, which is that of EOS; and what is one id as well goes before EOS."""
    request = Request(id="a", **fields)
    given_stops = [] if request.stop_token is None else [request.stop_token]
    alone = replace(request, stop_token=[*dict.fromkeys([*given_stops, *eos_token_ids])])
    results = decode([request], model=tiny_model(eos_token_ids=tuple(eos_token_ids)))
    for result, expected in zip(results, decode([alone], model=tiny_model()), strict=True):
        is_eos = expected.stop_reason in eos_token_ids and expected.stop_reason not in given_stops
        assert result == (replace(expected, stop_reason=None) if is_eos else expected)


@pytest.mark.parametrize("liked", [97, 98, 99])
@pytest.mark.parametrize("fields", [{}, {"num_beams": 2}, {"temperature": 1.0, "seed": 3}])
def test_a_constraint_may_end_with_any_of_them(liked, fields):
    """None is text, whatever the tokenizer says; where ending is all that is left, they may."""
    request = Request(prompt="x", regex="[a-z]{2}", logit_bias=liking({liked: 100, 100: 70}))
    [result] = decode([replace(request, **fields)], model=tiny_model(eos_token_ids=(97, 98, 99)))
    assert result.tokens[-1] == liked
    assert (result.text, result.constraint) == ("dd", "complete")
    assert (result.finish_reason, result.stop_reason) == ("stop", None)


def test_a_model_may_have_one_end_several_or_none():
    assert eos_token_ids_of(as_model(tiny_model())) == ()
    assert eos_token_ids_of(as_model(tiny_model(eos_token_ids=(7, 5)))) == (7, 5)
    assert eos_token_ids_of(SimulatedModel()) == (0,)
    only_others = tiny_model(eos_token_ids=(7, 5))
    only_others.eos_token_id = 5
    assert eos_token_ids_of(as_model(only_others)) == (5, 7)
    request = Request(prompt="x", min_tokens=4, logit_bias=liking({97: 100, 98: 70, 100: 40}))
    [result] = decode([request], model=tiny_model(eos_token_ids=(98, 97)))
    assert result.tokens == [100, 100, 100, 100, 97]
    request = Request(prompt="x", num_beams=3, n=3, logit_bias=liking({97: 100, 98: 70, 99: 40}))
    results = decode([request], model=tiny_model(eos_token_ids=(97, 98, 99)))
    assert [result.tokens for result in results] == [[97], [98], [99]]


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (3, "eos_token_ids are not a list of token ids"),
        ([-1], "eos_token_ids are not a list of token ids"),
        (None, "eos_token_ids are not a list of token ids"),
        ([1, 256], "eos_token_ids: 256 is not below vocab_size 256"),
    ],
)
def test_what_is_no_list_of_tokens_is_refused(given, fault):
    model = tiny_model()
    model.eos_token_ids = given
    with pytest.raises(BatchdecodeError, match=fault):
        as_model(model)
