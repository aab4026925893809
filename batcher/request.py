"""A request, as the one table of its fields.

Rule: everything about a field is in its annotation, and nowhere else: type and range, default,
meaning, which models can serve it, which other fields it excludes or needs.  Decoders, checks, the
JSON Schema and the tables in docs/reference/requests-and-results.md follow from this table.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from msgspec import Meta, Struct
from msgspec.structs import astuple

from batcher.fields import Field, fields_of

MAX_INT = 2**31 - 1
MAX_LENGTH = 2**20  # tokens of a prompt or an output in a workload or a log
TO_THE_END = MAX_INT  # default max_tokens of a chat: the rest of the context
NUM_TOKENS = 16  # default max_tokens of a completion
MAX_ANSWER = 4096  # default max_tokens of a chat if the context has no limit
MAX_TIME = 2.0**52  # seconds; up to here a clock of steps is exact
MAX_DRAFT_TOKENS = 64  # per row and step
MAX_SEGMENTS_LENGTH = 2**20  # tokens of all segments with a length, per prompt

TokenId = Annotated[
    int, Meta(ge=0, le=MAX_INT), "token id"
]  # the word makes it differ from a Count
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Samples = Annotated[int, Meta(ge=1, le=1024)]
DraftTokens = Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)]
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
    """A way out of a state: the marker `on` and the next state `to`; None ends generation."""

    on: Annotated[Text | TokenIds, "the text, or the token ids, that end the state"]
    to: Annotated[str | None, "the state that follows; null ends generation"]


class PromptSegment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A part of a prompt: a text, token ids, or `length` tokens that `seed` generates.

    type: decides how late cached blocks are evicted: after all others those of "user", then those
    of "system".  pin: evicted last of all.
    """

    text: Annotated[Text | None, "text, tokenized by itself"] = None
    tokens: Annotated[TokenIds | None, "token ids", "list of token ids"] = None
    length: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SEGMENTS_LENGTH)] | None,
        "number of token ids that `seed` generates; the limit is for all segments together",
    ] = None
    seed: Annotated[Seed | str, "only with `length`", "64-bit integer, or string; 0"] = 0
    type: Annotated[PromptType | None, "role of the author"] = None
    pin: Annotated[bool, "evict its cached blocks last"] = False


if TYPE_CHECKING:
    PromptInput = str | list[TokenId] | list[PromptSegment]
else:  # msgspec allows no union of two lists; validation refuses a mixed one
    PromptInput = str | list[TokenId | PromptSegment]

CONSTRAINT_FIELDS: tuple[ConstraintField, ...] = get_args(ConstraintField)

_BEAMS = {"num_beams": "beams are not sampled"}
_SAMPLED = _BEAMS | {"mirostat": "Mirostat chooses its own cut"}
_ONE_OUTPUT = {"session": "the next turn continues one output"}
_PROMPT_DONE = {"session": "the text before the prompt is already generated"}
_MIROSTAT = ("mirostat", "set it to 1 or 2")
_BEAM_SEARCH = ("num_beams", "set it to 2 or more")
_PROMPT_ANEW = {"heal": "healing rewrites the end of the prompt"}


def _above(name: str) -> dict[str, str]:
    index = CONSTRAINT_FIELDS.index(name)
    return dict.fromkeys(CONSTRAINT_FIELDS[:index], "an output has one constraint")


class Request(  # noqa: PLW1641 - its lists have no hash
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, eq=False
):
    """One generation request.

    The constructor does not check types or ranges; `Engine.add` and `batcher.decode` do, and raise
    RequestError.  A plain request has no field from `temperature` on.
    """

    prompt: Annotated[
        PromptInput,
        "may be empty. `prompt_tokens` (list of ids) is a synonym; `messages` replace it "
        "in [chats](#chats)",
        "string, list of token ids, or list of [segments](../guide/sessions.md#segments); required",
    ]
    id: Annotated[
        str | None, "unique in the file. `custom_id` is a synonym", 'string; the line number, `"7"`'
    ] = None
    max_tokens: Annotated[
        Count | None,
        "maximum number of generated tokens; 0 finishes [at once](#results), without a slot. "
        "See [how long an output may be](#how-long-an-output-may-be)",
        "integer from 0; 16, or for a chat the rest of the context",
    ] = None
    stop_token: Annotated[
        TokenId | list[TokenId] | None,
        "tokens that end the output",
        "token id, or list of them",
        Field(idle=(None, [])),
    ] = None
    stop_sequence: Annotated[
        Text | list[TokenId | Text | TokenIds] | None,
        "sequences of tokens, or texts, that end the output",
        "list of ids, list of such lists, string, or list of strings",
        Field(idle=(None, [])),
    ] = None
    stop: Annotated[
        Text | list[Text] | None,
        "texts that end the output; an empty list has no effect, as in the two fields above",
        "string, or list of strings",
        Field(idle=(None, [])),
    ] = None
    ignore_eos: Annotated[
        bool,
        "continue after EOS; other stops still apply",
        Field(excludes=dict.fromkeys(CONSTRAINT_FIELDS, "EOS ends a complete output")),
    ] = False
    arrival_time: Annotated[
        Seconds,
        "arrival of the request, in seconds on the engine's clock. A step takes 1 second, "
        "or as long as the profile specifies",
        Field(unit="seconds"),
    ] = 0.0
    priority: Annotated[
        int,
        Meta(ge=-MAX_INT, le=MAX_INT),
        "lower is more urgent, under the policy `priority` and `--preempt-for priority`",
    ] = 0
    deadline: Annotated[
        Seconds | None,
        "time by which the request should finish, see [deadlines](#deadlines)",
        Field(unit="seconds"),
    ] = None
    session: Annotated[
        Text | None, "conversation that the request continues, see [sessions](../guide/sessions.md)"
    ] = None
    think_time: Annotated[
        Seconds,
        "seconds from the end of the previous turn to the arrival of this one",
        Field(unit="seconds", needs=("session", "set a session")),
    ] = 0.0
    cache_salt: Annotated[
        Text | None,
        "share cached blocks only with equal salts, see [salts](../guide/sessions.md#salts)",
    ] = None
    # How a token is chosen.
    temperature: Annotated[
        UpTo100,
        "divisor of the logits; 0 takes the most likely token and ignores the cuts below",
        Field(needs_logits=True, excludes=_BEAMS),
    ] = 0.0
    top_k: Annotated[
        int,
        Meta(ge=-1, le=MAX_INT),
        "sample from the k most likely tokens, ties included; 0 and -1: from all",
        Field(idle=(0, -1), excludes=_SAMPLED),
    ] = 0
    top_p: Annotated[
        Share,
        "sample from the fewest most likely tokens with total probability p; at least one",
        Field(excludes=_SAMPLED),
    ] = 1.0
    min_p: Annotated[
        Share,
        "sample from tokens with at least this share of the largest probability",
        Field(excludes=_SAMPLED),
    ] = 0.0
    typical_p: Annotated[
        ShareAbove0,
        "sample from the tokens nearest to the entropy, with total probability p",
        Field(excludes=_SAMPLED),
    ] = 1.0
    mirostat: Annotated[
        int,
        Meta(ge=0, le=2),
        "version of Mirostat, which keeps the mean surprise at `mirostat_tau`; 0: off",
        Field(excludes=_BEAMS, needs=("temperature", "set it above 0")),
    ] = 0
    mirostat_tau: Annotated[Above0UpTo100, "target surprise, in bits", Field(needs=_MIROSTAT)] = 5.0
    mirostat_eta: Annotated[ShareAbove0, "learning rate of Mirostat", Field(needs=_MIROSTAT)] = 0.1
    repetition_penalty: Annotated[
        Above0UpTo100,
        "divide positive and multiply negative logits of tokens in prompt and output",
        Field(needs_logits=True),
    ] = 1.0
    frequency_penalty: Annotated[
        Penalty,
        "subtract from a token's logit for each time it was generated",
        Field(needs_logits=True),
    ] = 0.0
    presence_penalty: Annotated[
        Penalty, "subtract from a token's logit if it was generated", Field(needs_logits=True)
    ] = 0.0
    logit_bias: Annotated[
        dict[str, Bias] | None,
        'numbers to add to logits, such as `{"17": -100}`',
        "object: token id to number -100 to 100",
        Field(idle=(None, {}), needs_logits=True),
    ] = None
    allowed_token_ids: Annotated[
        TokenIds | None,
        "the only tokens to generate",
        "list of token ids",
        Field(needs_logits=True),
    ] = None
    bad_words: Annotated[
        list[Text] | None,
        "texts to avoid; at most 1024 bytes in total",
        "list of strings",
        Field(idle=(None, []), needs_logits=True, excludes=_PROMPT_ANEW),
    ] = None
    min_tokens: Annotated[
        Count,
        "number of tokens before EOS or a `stop_token` may end generation",
        Field(needs_logits=True),
    ] = 0
    cfg_scale: Annotated[
        UpTo100,
        "guidance scale: distance from the logits of the negative prompt; 1: off",
        Field(
            needs_logits=True, excludes={"num_beams": "a beam has no negative prompt"} | _ONE_OUTPUT
        ),
    ] = 1.0
    negative_prompt: Annotated[
        str | list[TokenId] | None,
        "prompt to move away from; it needs a second slot",
        "string, or list of token ids; empty",
        Field(needs=("cfg_scale", "set it to a number other than 1")),
    ] = None
    seed: Annotated[
        Seed,
        "seed of every draw, together with the id, the sample and the position",
        "64-bit integer; 0",
    ] = 0
    # The number of outputs, and their details.
    n: Annotated[Samples, "number of outputs; each is a result", Field(excludes=_ONE_OUTPUT)] = 1
    best_of: Annotated[
        Samples | None,
        "number of samples; return the `n` with the largest `cumulative_logprob`",
        "integer `n` to 1024; `n`",
        Field(excludes=_BEAMS | _ONE_OUTPUT),
    ] = None
    logprobs: Annotated[
        NumTop | None,
        "report the logprob of each token, and of this many most likely tokens",
        Field(needs_logits=True, excludes={"num_beams": "beams have one `score`"}),
    ] = None
    logprobs_mode: Annotated[
        Literal["raw", "processed"],
        "logprobs of the model, or after penalties and cuts",
        Field(needs=("logprobs", "set it to 0 or more")),
    ] = "raw"
    prompt_logprobs: Annotated[
        NumTop | None,
        "the same for each token of the prompt, see [below](#log-probabilities-of-the-prompt)",
        Field(excludes=_PROMPT_ANEW | _PROMPT_DONE),
    ] = None
    echo: Annotated[bool, "begin `text` with the prompt"] = False
    include_stop_str_in_output: Annotated[
        bool,
        "end `text` with the stop, not before it",
        Field(excludes={"states": "markers are not part of a state"}),
    ] = False
    num_beams: Annotated[
        Samples,
        "number of beams, each in a slot; 1: no beam search",
        Field(needs_logits=True, excludes=_ONE_OUTPUT),
    ] = 1
    length_penalty: Annotated[
        float,
        Meta(ge=-10, le=10),
        "divide a beam's score by its length to this power",
        Field(needs=_BEAM_SEARCH),
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"],
        'true: stop at `num_beams` finished beams; `"never"`: stop only when no better beam is '
        "possible; see [beams](../guide/sampling.md#beam-search)",
        Field(needs=_BEAM_SEARCH),
    ] = False
    json_schema: Annotated[
        dict[str, Any] | bool | None,
        "the output is JSON that the schema accepts",
        "object, true or false",
        Field(needs_logits=True),
    ] = None
    regex: Annotated[
        str | None, "the whole output matches", Field(needs_logits=True, excludes=_above("regex"))
    ] = None
    choice: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None,
        "the output is one of the texts",
        "list of strings",
        Field(needs_logits=True, excludes=_above("choice")),
    ] = None
    lark: Annotated[
        Text | None,
        "the output follows the Lark grammar",
        Field(needs_logits=True, excludes=_above("lark")),
    ] = None
    gbnf: Annotated[
        Text | None,
        "the output follows the GBNF grammar",
        Field(needs_logits=True, excludes=_above("gbnf")),
    ] = None
    heal: Annotated[
        bool,
        "remove the end of the prompt and generate its bytes again",
        Field(
            needs_logits=True,
            excludes=dict.fromkeys(CONSTRAINT_FIELDS, "healing decides how the output begins")
            | _PROMPT_DONE,
        ),
    ] = False
    states: Annotated[
        dict[str, list[Transition]] | None,
        "[states](../guide/stops.md#states), each with the texts or token ids `on` which the "
        "output goes `to` another state",
        'object: name to list of `{"on", "to"}`',
    ] = None
    initial_state: Annotated[
        str | None, "first state", "name; the first", Field(needs=("states", "declare states"))
    ] = None
    speculate: Annotated[
        bool, "`false`: no [drafts](../guide/speculation.md), even if the run uses them"
    ] = True
    draft_tokens: Annotated[
        DraftTokens | None, "maximum draft tokens per step; overrides the run's"
    ] = None
    extra_body: Annotated[
        dict[str, Any] | None,
        "further fields for a [server](../guide/serve.md), sent unchanged; null removes a field",
        "object",
        Field(idle=(None, {})),
    ] = None

    @property
    def output_limit(self) -> int:
        """Limit on generated tokens; TO_THE_END: the rest of the context."""
        return NUM_TOKENS if self.max_tokens is None else self.max_tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and astuple(self) == astuple(other)


class ServerRequest(
    Request, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, eq=False
):
    """A request for a server, which gets only the fields that its line states.

    stated: their names, defaults and parts of extra_body included.
    """

    stated: frozenset[str]


REQUEST_FIELDS: dict[str, Field] = fields_of(Request)
_NAMES = tuple(REQUEST_FIELDS)
PLAIN_FIELDS = _NAMES[: _NAMES.index("temperature")]
SAMPLING_FIELDS = _NAMES[_NAMES.index("temperature") : _NAMES.index("n")]
NUM_PLAIN = len(PLAIN_FIELDS)
PLAIN_VALUES = astuple(Request(prompt=""))[NUM_PLAIN:]


class Unread(NamedTuple):
    """Outputs of requests that are not read yet: arrived, and still to arrive."""

    queued: int
    coming: int


NOTHING_UNREAD = Unread(0, 0)


def num_queued_as(request: Request) -> int:
    """Return how many sequences a request adds to the queue; all beams are one."""
    if not request.output_limit:
        return request.n
    return 1 if request.num_beams > 1 else request.best_of or request.n


def is_plain(request: Request) -> bool:
    """Return whether a request only asks for greedy tokens until a stop."""
    return astuple(request)[NUM_PLAIN:] == PLAIN_VALUES
