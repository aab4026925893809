"""What comes in: a request, as the one table of all its fields.

Rule: whatever is to be known of a field stands beside it, and nowhere else: type and range,
default, what it means, which model can serve it, which other fields it does not go with.  What
decodes and checks requests follows from this, and so do their JSON Schema and the tables of
docs/requests-and-results.md.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from msgspec import Meta, Struct
from msgspec.structs import astuple

from batcher.fields import Field, fields_of

MAX_INT = 2**31 - 1
MAX_TIME = 2.0**52  # seconds; up to here a clock of steps is exact
MAX_SEGMENTS_LENGTH = 2**20  # tokens of all segments of a prompt that give a length, together

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Samples = Annotated[int, Meta(ge=1, le=1024)]
NumTop = Annotated[int, Meta(ge=0, le=20)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_TIME)]
Share = Annotated[float, Meta(ge=0, le=1)]
ShareAbove0 = Annotated[float, Meta(gt=0, le=1)]
UpTo100 = Annotated[float, Meta(ge=0, le=100)]
Above0UpTo100 = Annotated[float, Meta(gt=0, le=100)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Text = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
PromptType = Literal["system", "user", "assistant"]
ConstraintField = Literal["json_schema", "regex", "choice", "lark", "gbnf"]


class Transition(Struct, frozen=True, forbid_unknown_fields=True):
    """A way out of a state: where the text, or the token ids, `on` lead; None ends generation."""

    on: Annotated[Text | TokenIds, Field("the text, or the token ids, that end the state")]
    to: Annotated[str | None, Field("the state that follows; null ends generation")]


class PromptSegment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A part of a prompt: a text, token ids, or `length` tokens that `seed` stands for.

    type: what it is good for; of blocks that are cached, those of "system" are given up after those
    of "user", and these after all others.  pin: given up last of all.
    """

    text: Annotated[Text | None, Field("text, encoded by itself")] = None
    tokens: Annotated[TokenIds | None, Field("these", "list of token ids")] = None
    length: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SEGMENTS_LENGTH)] | None,
        Field(
            "so many token ids, which `seed` stands for; at most as many in all segments of a "
            "prompt"
        ),
    ] = None
    seed: Annotated[Seed | str, Field("only with `length`", "64-bit integer, or string; 0")] = 0
    type: Annotated[PromptType | None, Field("whose words they are")] = None
    pin: Annotated[bool, Field("what is cached of it is given up last of all")] = False


if TYPE_CHECKING:
    PromptInput = str | list[TokenId] | list[PromptSegment]
else:  # msgspec takes no union of two lists; the rules of validation refuse a mixed one
    PromptInput = str | list[TokenId | PromptSegment]

CONSTRAINT_FIELDS: tuple[ConstraintField, ...] = get_args(ConstraintField)

_BEAMS = {"num_beams": "beams are not sampled"}
_SAMPLED = _BEAMS | {"mirostat": "it decides itself what to cut off"}
_ONE_OUTPUT = {"session": "it goes on from one output"}
_PROMPT_DONE = {"session": "what goes before the prompt is generated already"}
_MIROSTAT = ("mirostat", "give version 1 or 2")
_BEAM_SEARCH = ("num_beams", "give 2 beams or more")
_PROMPT_ANEW = {"heal": "it writes the end of the prompt anew"}


def _above(name: str) -> dict[str, str]:
    """Return why a constraint cannot go with those above it."""
    index = CONSTRAINT_FIELDS.index(name)
    return dict.fromkeys(CONSTRAINT_FIELDS[:index], "an output keeps one constraint")


class Request(  # noqa: PLW1641 - its lists have no hash
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, eq=False
):
    """One generation request, as a line of a requests file states it.

    The constructor does not check types or ranges; `Engine.add` and `batcher.decode` do, and raise
    RequestError.  A plain one has no field from `temperature` on.
    """

    prompt: Annotated[
        PromptInput,
        Field(
            "may be empty. `prompt_tokens` (list of ids) is a synonym; `messages` stand for one, "
            "see [chats](#chats)",
            "string, list of token ids, or list of [segments](#segments); required",
        ),
    ]
    id: Annotated[
        str | None,
        Field("unique in the file. `custom_id` is a synonym", 'string; the line number, `"7"`'),
    ] = None
    max_tokens: Annotated[
        Count,
        Field(
            "limit on generated tokens, the prompt not counted; 0 finishes [at once](#results), "
            "without a slot"
        ),
    ] = 16
    stop_token: Annotated[
        TokenId | TokenIds | None,
        Field("ends generation when generated", "token id, or list of them"),
    ] = None
    stop_sequence: Annotated[
        Text | Annotated[list[TokenId | Text | TokenIds], Meta(min_length=1)] | None,
        Field(
            "ends generation when the output ends in it",
            "list of ids, list of such lists, string, or list of strings",
        ),
    ] = None
    stop: Annotated[
        Text | Annotated[list[Text], Meta(min_length=1)] | None,
        Field("OpenAI's name for stops of text", "string, or list of strings"),
    ] = None
    ignore_eos: Annotated[
        bool,
        Field(
            "EOS does not end generation; other stops do",
            excludes=dict.fromkeys(CONSTRAINT_FIELDS, "EOS ends an output that is whole"),
        ),
    ] = False
    arrival_time: Annotated[
        Seconds,
        Field(
            "seconds on the engine's clock before which the request does not exist. A step takes "
            "1, unless a profile tells",
            unit="seconds",
        ),
    ] = 0.0
    priority: Annotated[
        Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)],
        Field("lower goes first under the policy `priority`; the others do not use it"),
    ] = 0
    deadline: Annotated[
        Seconds | None,
        Field("when it should have ended, see [deadlines](#deadlines)", unit="seconds"),
    ] = None
    session: Annotated[
        Text | None,
        Field("goes on from what the request before it left, see [sessions](#sessions)"),
    ] = None
    think_time: Annotated[
        Seconds,
        Field(
            "seconds between that and its arrival", unit="seconds", needs=("session", "name one")
        ),
    ] = 0.0
    cache_salt: Annotated[
        Text | None, Field("shares cached blocks only with its like, see [salts](#salts)")
    ] = None
    # How a token is chosen.
    temperature: Annotated[
        UpTo100,
        Field(
            "the logits are divided by it; 0 takes the largest, and ignores the cuts below",
            needs_logits=True,
            excludes=_BEAMS,
        ),
    ] = 0.0
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_INT)],
        Field(
            "draws from the k most likely tokens, ties kept; 0 and -1: from all",
            idle=(0, -1),
            excludes=_SAMPLED,
        ),
    ] = 0
    top_p: Annotated[
        Share,
        Field(
            "draws from the fewest most likely tokens whose probabilities sum to p; at least one",
            excludes=_SAMPLED,
        ),
    ] = 1.0
    min_p: Annotated[
        Share,
        Field(
            "draws from tokens at least so many times as likely as the most likely one",
            excludes=_SAMPLED,
        ),
    ] = 0.0
    typical_p: Annotated[
        ShareAbove0,
        Field(
            "draws from the fewest tokens nearest to the entropy whose mass is p", excludes=_SAMPLED
        ),
    ] = 1.0
    mirostat: Annotated[
        Annotated[int, Meta(ge=0, le=2)],
        Field(
            "version of Mirostat, which cuts so that the mean surprise comes to `mirostat_tau`; "
            "0: off",
            excludes=_BEAMS,
            needs=("temperature", "give one above 0"),
        ),
    ] = 0
    mirostat_tau: Annotated[
        Above0UpTo100, Field("the surprise aimed at, in bits", needs=_MIROSTAT)
    ] = 5.0
    mirostat_eta: Annotated[ShareAbove0, Field("how fast it learns", needs=_MIROSTAT)] = 0.1
    repetition_penalty: Annotated[
        Above0UpTo100,
        Field(
            "divides positive and multiplies negative logits of tokens of prompt and output",
            needs_logits=True,
        ),
    ] = 1.0
    frequency_penalty: Annotated[
        Penalty,
        Field("taken from a token's logit for each time it was generated", needs_logits=True),
    ] = 0.0
    presence_penalty: Annotated[
        Penalty, Field("taken from a token's logit, once, if it was generated", needs_logits=True)
    ] = 0.0
    logit_bias: Annotated[
        dict[str, Bias] | None,
        Field(
            'added to logits, `{"17": -100}`',
            "object: token id to number -100 to 100",
            idle=(None, {}),
            needs_logits=True,
        ),
    ] = None
    allowed_token_ids: Annotated[
        TokenIds | None, Field("no others are generated", "list of token ids", needs_logits=True)
    ] = None
    bad_words: Annotated[
        list[Text] | None,
        Field(
            "texts that are not generated; 1024 bytes together",
            "list of strings",
            idle=(None, []),
            needs_logits=True,
            excludes=_PROMPT_ANEW,
        ),
    ] = None
    min_tokens: Annotated[
        Count, Field("so many tokens come before EOS or a `stop_token` may", needs_logits=True)
    ] = 0
    cfg_scale: Annotated[
        UpTo100,
        Field(
            "how far the logits move away from those of the negative prompt; 1: not at all",
            needs_logits=True,
            excludes={"num_beams": "a beam has no negative prompt beside it"} | _ONE_OUTPUT,
        ),
    ] = 1.0
    negative_prompt: Annotated[
        str | list[TokenId] | None,
        Field(
            "what to move away from; it takes a slot of its own",
            "string, or list of token ids; empty",
            needs=("cfg_scale", "give one other than 1"),
        ),
    ] = None
    seed: Annotated[
        Seed,
        Field(
            "with the id, the sample and the position it decides every draw", "64-bit integer; 0"
        ),
    ] = 0
    # How many outputs, and what is told about them.
    n: Annotated[Samples, Field("outputs; each is a result", excludes=_ONE_OUTPUT)] = 1
    best_of: Annotated[
        Samples | None,
        Field(
            "samples to make; the `n` with the largest `cumulative_logprob` are given",
            "integer `n` to 1024; `n`",
            excludes=_BEAMS | _ONE_OUTPUT,
        ),
    ] = None
    logprobs: Annotated[
        NumTop | None,
        Field(
            "tells the logprob of each token, and those of so many of the most likely ones",
            needs_logits=True,
            excludes={"num_beams": "beams are told by the `score` of the whole"},
        ),
    ] = None
    logprobs_mode: Annotated[
        Literal["raw", "processed"],
        Field(
            "the model's own, or of what is left of them to draw from",
            needs=("logprobs", "give 0 or more"),
        ),
    ] = "raw"
    prompt_logprobs: Annotated[
        NumTop | None,
        Field(
            "tells the same of each token of the prompt, see "
            "[below](#log-probabilities-of-the-prompt)",
            excludes=_PROMPT_ANEW | _PROMPT_DONE,
        ),
    ] = None
    echo: Annotated[bool, Field("`text` begins with the prompt")] = False
    include_stop_str_in_output: Annotated[
        bool,
        Field(
            "`text` ends with the stop, not before it",
            excludes={"states": "a marker belongs to none of them"},
        ),
    ] = False
    num_beams: Annotated[
        Samples,
        Field(
            "beams to search with, each in a slot; 1: no beam search",
            needs_logits=True,
            excludes=_ONE_OUTPUT,
        ),
    ] = 1
    length_penalty: Annotated[
        Annotated[float, Meta(ge=-10, le=10)],  # the length to this power has to stay finite
        Field("a beam's score is divided by its length to this power", needs=_BEAM_SEARCH),
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"],
        Field(
            'true: stop at `num_beams` finished ones; `"never"`: only when no better one can come',
            needs=_BEAM_SEARCH,
        ),
    ] = False
    json_schema: Annotated[
        dict[str, Any] | bool | None,
        Field(
            "the output is JSON that the schema accepts", "object, true or false", needs_logits=True
        ),
    ] = None
    regex: Annotated[
        str | None, Field("all of the output matches", needs_logits=True, excludes=_above("regex"))
    ] = None
    choice: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None,
        Field(
            "the output is one of them",
            "list of strings",
            needs_logits=True,
            excludes=_above("choice"),
        ),
    ] = None
    lark: Annotated[
        Text | None,
        Field("the output follows the Lark grammar", needs_logits=True, excludes=_above("lark")),
    ] = None
    gbnf: Annotated[
        Text | None,
        Field("the output follows the GBNF grammar", needs_logits=True, excludes=_above("gbnf")),
    ] = None
    heal: Annotated[
        bool,
        Field(
            "the end of the prompt is taken back, and its bytes are generated again",
            needs_logits=True,
            excludes=dict.fromkeys(CONSTRAINT_FIELDS, "it says how the output begins")
            | _PROMPT_DONE,
        ),
    ] = False
    states: Annotated[
        dict[str, list[Transition]] | None,
        Field(
            "states, and the texts or lists of token ids `on` that lead from one `to` another",
            'object: name to list of `{"on", "to"}`',
        ),
    ] = None
    initial_state: Annotated[
        str | None,
        Field("the state to begin in", "name; the first", needs=("states", "declare some")),
    ] = None

    def __eq__(self, other: object) -> bool:
        """Return whether `other` asks for the same; checked requests are of types of their own."""
        return isinstance(other, Request) and astuple(self) == astuple(other)


REQUEST_FIELDS: dict[str, Field] = fields_of(Request)
_NAMES = tuple(REQUEST_FIELDS)
PLAIN_FIELDS = _NAMES[: _NAMES.index("temperature")]
SAMPLING_FIELDS = _NAMES[_NAMES.index("temperature") : _NAMES.index("n")]
_PLAIN_VALUES = astuple(Request(prompt=""))[len(PLAIN_FIELDS) :]


def is_plain(request: Request) -> bool:
    """Return whether a request asks for nothing but greedy tokens until a stop."""
    return astuple(request)[len(PLAIN_FIELDS) :] == _PLAIN_VALUES
