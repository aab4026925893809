"""What comes in: a request, as the one table of all its fields.

Rule: whatever is to be known of a field stands beside it, and nowhere else: type and range,
default, what it means, which model can serve it, which other fields it does not go with.  What
decodes and checks requests follows from this, and so do their JSON Schema and the tables of
docs/requests-and-results.md.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from msgspec import Meta, Struct
from msgspec.structs import astuple

from batcher.fields import Field, fields_of

MAX_INT = 2**31 - 1
MAX_LENGTH = 2**20  # tokens of one prompt or one output of a workload or a log
TO_THE_END = MAX_INT  # max_tokens of a chat that states none: all that the context has room for
NUM_TOKENS = 16  # of a completion that states none
MAX_ANSWER = 4096  # of a chat that states none, if the context has no limit
MAX_TIME = 2.0**52  # seconds; up to here a clock of steps is exact
MAX_DRAFT_TOKENS = 64  # of a row in a step
MAX_SEGMENTS_LENGTH = 2**20  # tokens of all segments of a prompt that give a length, together

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT), "token id"]  # the word tells it from a Count
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
    """A way out of a state: where the text, or the token ids, `on` lead; None ends generation."""

    on: Annotated[Text | TokenIds, "the text, or the token ids, that end the state"]
    to: Annotated[str | None, "the state that follows; null ends generation"]


class PromptSegment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A part of a prompt: a text, token ids, or `length` tokens that `seed` stands for.

    type: what it is good for; of blocks that are cached, those of "system" are given up after those
    of "user", and these after all others.  pin: given up last of all.
    """

    text: Annotated[Text | None, "text, encoded by itself"] = None
    tokens: Annotated[TokenIds | None, "these", "list of token ids"] = None
    length: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SEGMENTS_LENGTH)] | None,
        "so many token ids, which `seed` stands for; at most as many in all segments of a prompt",
    ] = None
    seed: Annotated[Seed | str, "only with `length`", "64-bit integer, or string; 0"] = 0
    type: Annotated[PromptType | None, "whose words they are"] = None
    pin: Annotated[bool, "what is cached of it is given up last of all"] = False


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
        "may be empty. `prompt_tokens` (list of ids) is a synonym; `messages` stand for one, "
        "see [chats](#chats)",
        "string, list of token ids, or list of [segments](segments.md); required",
    ]
    id: Annotated[
        str | None, "unique in the file. `custom_id` is a synonym", 'string; the line number, `"7"`'
    ] = None
    max_tokens: Annotated[
        Count | None,
        "limit on generated tokens, the prompt not counted; 0 finishes [at once](#results), "
        "without a slot. Chats [run to their end](#how-long-an-output-may-be)",
        "integer from 0; 16, or of a chat the rest of the context",
    ] = None
    stop_token: Annotated[
        TokenId | list[TokenId] | None,
        "ends generation when generated",
        "token id, or list of them",
        Field(idle=(None, [])),
    ] = None
    stop_sequence: Annotated[
        Text | list[TokenId | Text | TokenIds] | None,
        "ends generation when the output ends in it",
        "list of ids, list of such lists, string, or list of strings",
        Field(idle=(None, [])),
    ] = None
    stop: Annotated[
        Text | list[Text] | None,
        "OpenAI's name for stops of text; an empty list is none, as in the two above",
        "string, or list of strings",
        Field(idle=(None, [])),
    ] = None
    ignore_eos: Annotated[
        bool,
        "EOS does not end generation; other stops do",
        Field(excludes=dict.fromkeys(CONSTRAINT_FIELDS, "EOS ends an output that is whole")),
    ] = False
    arrival_time: Annotated[
        Seconds,
        "seconds on the engine's clock before which the request does not exist. A step takes "
        "1, unless a profile tells",
        Field(unit="seconds"),
    ] = 0.0
    priority: Annotated[
        int,
        Meta(ge=-MAX_INT, le=MAX_INT),
        "lower goes first under the policy `priority`; the others do not use it",
    ] = 0
    deadline: Annotated[
        Seconds | None,
        "when it should have ended, see [deadlines](#deadlines)",
        Field(unit="seconds"),
    ] = None
    session: Annotated[
        Text | None, "goes on from what the request before it left, see [sessions](sessions.md)"
    ] = None
    think_time: Annotated[
        Seconds,
        "seconds between that and its arrival",
        Field(unit="seconds", needs=("session", "name one")),
    ] = 0.0
    cache_salt: Annotated[
        Text | None, "shares cached blocks only with its like, see [salts](segments.md#salts)"
    ] = None
    # How a token is chosen.
    temperature: Annotated[
        UpTo100,
        "the logits are divided by it; 0 takes the largest, and ignores the cuts below",
        Field(needs_logits=True, excludes=_BEAMS),
    ] = 0.0
    top_k: Annotated[
        int,
        Meta(ge=-1, le=MAX_INT),
        "draws from the k most likely tokens, ties kept; 0 and -1: from all",
        Field(idle=(0, -1), excludes=_SAMPLED),
    ] = 0
    top_p: Annotated[
        Share,
        "draws from the fewest most likely tokens whose probabilities sum to p; at least one",
        Field(excludes=_SAMPLED),
    ] = 1.0
    min_p: Annotated[
        Share,
        "draws from tokens at least so many times as likely as the most likely one",
        Field(excludes=_SAMPLED),
    ] = 0.0
    typical_p: Annotated[
        ShareAbove0,
        "draws from the fewest tokens nearest to the entropy whose mass is p",
        Field(excludes=_SAMPLED),
    ] = 1.0
    mirostat: Annotated[
        int,
        Meta(ge=0, le=2),
        "version of Mirostat, which cuts so that the mean surprise comes to `mirostat_tau`; 0: off",
        Field(excludes=_BEAMS, needs=("temperature", "give one above 0")),
    ] = 0
    mirostat_tau: Annotated[
        Above0UpTo100, "the surprise aimed at, in bits", Field(needs=_MIROSTAT)
    ] = 5.0
    mirostat_eta: Annotated[ShareAbove0, "how fast it learns", Field(needs=_MIROSTAT)] = 0.1
    repetition_penalty: Annotated[
        Above0UpTo100,
        "divides positive and multiplies negative logits of tokens of prompt and output",
        Field(needs_logits=True),
    ] = 1.0
    frequency_penalty: Annotated[
        Penalty,
        "taken from a token's logit for each time it was generated",
        Field(needs_logits=True),
    ] = 0.0
    presence_penalty: Annotated[
        Penalty, "taken from a token's logit, once, if it was generated", Field(needs_logits=True)
    ] = 0.0
    logit_bias: Annotated[
        dict[str, Bias] | None,
        'added to logits, `{"17": -100}`',
        "object: token id to number -100 to 100",
        Field(idle=(None, {}), needs_logits=True),
    ] = None
    allowed_token_ids: Annotated[
        TokenIds | None, "no others are generated", "list of token ids", Field(needs_logits=True)
    ] = None
    bad_words: Annotated[
        list[Text] | None,
        "texts that are not generated; 1024 bytes together",
        "list of strings",
        Field(idle=(None, []), needs_logits=True, excludes=_PROMPT_ANEW),
    ] = None
    min_tokens: Annotated[
        Count, "so many tokens come before EOS or a `stop_token` may", Field(needs_logits=True)
    ] = 0
    cfg_scale: Annotated[
        UpTo100,
        "how far the logits move away from those of the negative prompt; 1: not at all",
        Field(
            needs_logits=True,
            excludes={"num_beams": "a beam has no negative prompt beside it"} | _ONE_OUTPUT,
        ),
    ] = 1.0
    negative_prompt: Annotated[
        str | list[TokenId] | None,
        "what to move away from; it takes a slot of its own",
        "string, or list of token ids; empty",
        Field(needs=("cfg_scale", "give one other than 1")),
    ] = None
    seed: Annotated[
        Seed, "with the id, the sample and the position it decides every draw", "64-bit integer; 0"
    ] = 0
    # How many outputs, and what is told about them.
    n: Annotated[Samples, "outputs; each is a result", Field(excludes=_ONE_OUTPUT)] = 1
    best_of: Annotated[
        Samples | None,
        "samples to make; the `n` with the largest `cumulative_logprob` are given",
        "integer `n` to 1024; `n`",
        Field(excludes=_BEAMS | _ONE_OUTPUT),
    ] = None
    logprobs: Annotated[
        NumTop | None,
        "tells the logprob of each token, and those of so many of the most likely ones",
        Field(
            needs_logits=True, excludes={"num_beams": "beams are told by the `score` of the whole"}
        ),
    ] = None
    logprobs_mode: Annotated[
        Literal["raw", "processed"],
        "the model's own, or of what is left of them to draw from",
        Field(needs=("logprobs", "give 0 or more")),
    ] = "raw"
    prompt_logprobs: Annotated[
        NumTop | None,
        "tells the same of each token of the prompt, see [below](#log-probabilities-of-the-prompt)",
        Field(excludes=_PROMPT_ANEW | _PROMPT_DONE),
    ] = None
    echo: Annotated[bool, "`text` begins with the prompt"] = False
    include_stop_str_in_output: Annotated[
        bool,
        "`text` ends with the stop, not before it",
        Field(excludes={"states": "a marker belongs to none of them"}),
    ] = False
    num_beams: Annotated[
        Samples,
        "beams to search with, each in a slot; 1: no beam search",
        Field(needs_logits=True, excludes=_ONE_OUTPUT),
    ] = 1
    length_penalty: Annotated[
        float,
        Meta(ge=-10, le=10),
        "a beam's score is divided by its length to this power",
        Field(needs=_BEAM_SEARCH),
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"],
        'true: stop at `num_beams` finished ones; `"never"`: only when no better one can come',
        Field(needs=_BEAM_SEARCH),
    ] = False
    json_schema: Annotated[
        dict[str, Any] | bool | None,
        "the output is JSON that the schema accepts",
        "object, true or false",
        Field(needs_logits=True),
    ] = None
    regex: Annotated[
        str | None, "all of the output matches", Field(needs_logits=True, excludes=_above("regex"))
    ] = None
    choice: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None,
        "the output is one of them",
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
        "the end of the prompt is taken back, and its bytes are generated again",
        Field(
            needs_logits=True,
            excludes=dict.fromkeys(CONSTRAINT_FIELDS, "it says how the output begins")
            | _PROMPT_DONE,
        ),
    ] = False
    states: Annotated[
        dict[str, list[Transition]] | None,
        "states, and the texts or lists of token ids `on` that lead from one `to` another",
        'object: name to list of `{"on", "to"}`',
    ] = None
    initial_state: Annotated[
        str | None,
        "the state to begin in",
        "name; the first",
        Field(needs=("states", "declare some")),
    ] = None
    speculate: Annotated[
        bool, "`false`: it is given no [drafts](speculation.md), though the run has some"
    ] = True
    draft_tokens: Annotated[
        DraftTokens | None, "drafts in a step, at most, instead of what the run gives"
    ] = None
    extra_body: Annotated[
        dict[str, Any] | None,
        "what a [server](servers.md) is sent beside all this, as it is; null leaves a field out",
        "object",
        Field(idle=(None, {})),
    ] = None

    @property
    def output_limit(self) -> int:
        """How many tokens it may generate; TO_THE_END: as many as the context has room for."""
        return NUM_TOKENS if self.max_tokens is None else self.max_tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and astuple(self) == astuple(other)


class ServerRequest(
    Request, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, eq=False
):
    """A request for a server, which is sent the fields that its line states, and no others.

    stated: the names of these fields, as a default may be stated, too, and so may parts of
    extra_body.
    """

    stated: frozenset[str]


REQUEST_FIELDS: dict[str, Field] = fields_of(Request)
_NAMES = tuple(REQUEST_FIELDS)
PLAIN_FIELDS = _NAMES[: _NAMES.index("temperature")]
SAMPLING_FIELDS = _NAMES[_NAMES.index("temperature") : _NAMES.index("n")]
NUM_PLAIN = len(PLAIN_FIELDS)
PLAIN_VALUES = astuple(Request(prompt=""))[NUM_PLAIN:]


class Unread(NamedTuple):
    """Outputs that no engine knows of: those that have arrived, and those that are to come."""

    queued: int
    coming: int


NOTHING_UNREAD = Unread(0, 0)


def num_queued_as(request: Request) -> int:
    """Return how many wait for a slot when a request arrives: its samples, or all beams as one."""
    if not request.output_limit:
        return request.n
    return 1 if request.num_beams > 1 else request.best_of or request.n


def is_plain(request: Request) -> bool:
    """Return whether a request asks for nothing but greedy tokens until a stop."""
    return astuple(request)[NUM_PLAIN:] == PLAIN_VALUES
