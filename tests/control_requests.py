"""Requests that use everything a request can ask for, drawn or listed, for the simulated model."""

from hypothesis import strategies as st

from batcher import Request
from batcher.request import Transition

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large"]},
        "sold": {"type": "boolean"},
    },
    "required": ["name", "size", "sold"],
    "additionalProperties": False,
}
STATES = {
    "telling": [Transition(" the", "naming"), Transition(".", None)],
    "naming": [Transition(" and", "telling"), Transition([46], "telling")],
    "*": [Transition(" suddenly", "hurrying")],
    "hurrying": [Transition(".", "telling")],
}

SAMPLING = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.3, 1.0, 1.7]), "seed": st.integers(0, 3)},
    optional={
        "top_k": st.sampled_from([-1, 0, 1, 5, 50, 600]),
        "top_p": st.sampled_from([0.0, 0.5, 0.95]),
        "min_p": st.sampled_from([0.02, 0.3]),
        "typical_p": st.sampled_from([0.3, 0.9]),
        "n": st.integers(1, 3),
    },
)
MIROSTAT = st.fixed_dictionaries(
    {
        "temperature": st.just(1.0),
        "mirostat": st.sampled_from([1, 2]),
        "mirostat_tau": st.sampled_from([1.0, 4.0]),
    }
)
BEST_OF = st.fixed_dictionaries(
    {"temperature": st.just(1.0), "best_of": st.integers(2, 4), "n": st.integers(1, 2)}
)
BEAMS = st.fixed_dictionaries(
    {"num_beams": st.integers(2, 3), "n": st.integers(1, 2)},
    optional={
        "length_penalty": st.sampled_from([-1.0, 0.0, 2.0]),
        "early_stopping": st.sampled_from([True, "never"]),
    },
)
CFG = st.fixed_dictionaries(
    {"cfg_scale": st.sampled_from([0.0, 1.5]), "negative_prompt": st.sampled_from(["", "No no"])}
)
WEIGHTS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.8, 1.4]),
        "frequency_penalty": st.sampled_from([-0.5, 1.5]),
        "presence_penalty": st.just(1.0),
        "logit_bias": st.just({"48": 5.0, "3": -100.0}),
        "bad_words": st.just(["door", "r. "]),
        "min_tokens": st.integers(1, 6),
        "allowed_token_ids": st.just([0, 48, *range(60, 110)]),
    },
)
STOPS = st.fixed_dictionaries(
    {},
    optional={
        "stop": st.sampled_from(["e", "r.", " and"]),
        "stop_token": st.sampled_from([48, [46, 287]]),
        "ignore_eos": st.booleans(),
    },
)
CONSTRAINTS = st.sampled_from(
    [
        {"json_schema": SCHEMA, "max_tokens": 60},
        {"regex": "(ab|cd)+ the door", "max_tokens": 30},
        {"choice": ["yes", "no", "not yet"]},
        {"lark": 'start: "count " NUMBER\nNUMBER: /[0-9]{1,4}/'},
        {"gbnf": 'root ::= item ("," item)* "."\nitem ::= [a-c]+'},
    ]
)
MORE = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.sampled_from([0, 3]),
        "logprobs_mode": st.just("processed"),
        "prompt_logprobs": st.sampled_from([0, 2]),
        "echo": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
    },
)

PROMPTS = st.sampled_from(["Count the boats", "Count the bo", "", "The fox said:", "é—"])


@st.composite
def control_fields(draw):
    """Draw the fields of a request that is more than plain."""
    fields = {"prompt": draw(PROMPTS), "max_tokens": draw(st.integers(0, 14))}
    choice = draw(st.sampled_from([None, SAMPLING, MIROSTAT, BEST_OF, BEAMS, CFG]))
    if choice is not None:
        fields |= draw(choice)
    fields |= draw(MORE) | draw(WEIGHTS) | draw(STOPS)
    if choice is BEAMS:
        fields.pop("logprobs", None)
    if "logprobs" not in fields:
        fields.pop("logprobs_mode", None)
    if draw(st.booleans()):
        fields |= {"max_tokens": 14} | draw(CONSTRAINTS) | {"ignore_eos": False}
    elif fields["prompt"] and draw(st.booleans()):
        fields["heal"] = True
        fields.pop("bad_words", None)
        fields.pop("prompt_logprobs", None)
    fields["max_tokens"] = max(fields["max_tokens"], fields.get("min_tokens", 0))
    if draw(st.booleans()):
        fields["states"] = STATES
        fields.pop("include_stop_str_in_output", None)
    return fields


def control_requests():
    return control_fields().map(lambda fields: Request(**fields))
