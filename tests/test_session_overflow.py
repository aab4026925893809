"""Sessions that outgrow the context and lose their oldest turns, against doing it by hand."""

from engine_runs import drained
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batcher import Engine, Request, SimulatedModel, decode
from batcher.events import ArriveEvent
from batcher.request import TO_THE_END, PromptSegment
from batcher.settings import DEFAULT_SCHEDULING, SchedulingSettings

MODEL = SimulatedModel()
PAGED = SchedulingSettings(kv_blocks=40, block_size=4, max_batch_tokens=12)


class Dropping(SimulatedModel):
    """The simulated model with a context, in which sessions lose their oldest turns."""

    session_overflow = "drop-oldest"

    def __init__(self, max_context):
        super().__init__(is_attentive=True)
        self.max_context = max_context


def run(requests, max_context, batch_size=3, settings=DEFAULT_SCHEDULING):
    engine = Engine(Dropping(max_context), batch_size, settings=settings, is_checked=True)
    done = drained(engine, requests)
    arrivals = {one.id: one for one in done.events if isinstance(one, ArriveEvent)}
    return {result.id: result for result in done.results}, arrivals


def tokens_of(prompt):
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], PromptSegment):
        system = [token for one in prompt if one.type == "system" for token in one.tokens or ()]
        return system, [t for one in prompt if one.type != "system" for t in one.tokens or ()]
    return [], list(prompt)


def converse(turns, max_context):
    """Prompt, output and number of dropped turns of each turn, decoded alone, up to a failure."""
    said = []  # of each turn: of the system, and all others
    kept = []  # of those that were dropped
    found = []

    def before():
        return kept + [token for past in said for part in past for token in part]

    for turn in turns:
        system, own = tokens_of(turn.prompt)
        num_dropped = 0
        room = turn.output_limit if turn.max_tokens != TO_THE_END else max_context // 4
        while said and len(before()) + len(system + own) + room > max_context:
            kept += said.pop(0)[0]
            num_dropped += 1
        prompt = before() + system + own
        room = max_context - len(prompt)
        if room < min(turn.output_limit, 1):
            break
        alone = Request(
            prompt=prompt, max_tokens=min(room, turn.output_limit), ignore_eos=turn.ignore_eos
        )
        [result] = decode([alone], model=MODEL)
        found.append((prompt, result.tokens, num_dropped))
        said.append((system, own + result.tokens))
    return found


@st.composite
def turns_of(draw, session):
    turns = []
    for number in range(draw(st.integers(1, 6))):
        prompt = draw(st.lists(st.integers(3, 300), min_size=1, max_size=8))
        if draw(st.integers(0, 2)) == 0:
            system = draw(st.lists(st.integers(3, 300), min_size=1, max_size=4))
            prompt = [
                PromptSegment(tokens=system, type="system"),
                PromptSegment(tokens=prompt, type="user"),
            ]
        turns.append(
            Request(
                id=f"{session}{number}",
                session=session,
                prompt=prompt,
                max_tokens=draw(st.integers(0, 12) | st.just(TO_THE_END)),
                ignore_eos=draw(st.booleans()),
            )
        )
    return turns


@examples(80)
@given(
    turns_of("a"),
    turns_of("b"),
    st.integers(8, 50),
    st.integers(1, 3),
    st.sampled_from([DEFAULT_SCHEDULING, PAGED]),
)
def test_a_session_loses_its_oldest_turns_and_nothing_else(
    one, other, max_context, batch_size, settings
):
    results, arrivals = run([*one, *other], max_context, batch_size, settings)
    for turns in (one, other):
        wanted = converse(turns, max_context)
        for turn, (prompt, tokens, num_dropped) in zip(turns, wanted, strict=False):
            result = results[turn.id or ""]
            assert (result.usage.prompt_tokens, result.tokens) == (len(prompt), tokens)
            assert arrivals[turn.id or ""].dropped_turns == num_dropped
        codes = [results[turn.id or ""].error for turn in turns[len(wanted) :]]
        assert [code and code.code for code in codes] == [
            *["prompt-too-long"] * bool(codes),
            *["session-failed"] * (len(codes) - 1),
        ]


def test_the_trace_says_what_was_dropped():
    turns = [
        Request(id=f"t{n}", session="s", prompt=[9] * 5, max_tokens=5, ignore_eos=True)
        for n in range(4)
    ]
    results, arrivals = run(turns, 24)
    told = {one.id: (one.dropped_turns, one.dropped_tokens) for one in arrivals.values()}
    assert told == {"t0": (0, 0), "t1": (0, 0), "t2": (1, 10), "t3": (1, 10)}
    assert [one.usage.prompt_tokens for one in results.values()] == [5, 15, 15, 15]
