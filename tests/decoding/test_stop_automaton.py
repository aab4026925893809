"""What an output is watched for: which stop wins, which state follows, and what text is kept."""

import numpy as np
import pytest
from examples import mostly_heavy
from random_automata import PIECES, random_case
from reference import Decoded
from slow_automaton import SlowReader

from batcher.decoding.stop_matcher import StateText, StopMatcher, read_output
from batcher.decoding.stops import END, StopProgress, StopReader, stop_automaton
from batcher.models.tokenizers import ByteTokenizer
from batcher.request import Request, Transition

BYTES = ByteTokenizer()


class Words:
    """A tokenizer whose tokens are pieces of words and of characters; id 0 is EOS."""

    token_bytes = (b"", b"ab", b"a", b"b", b"c", b"abc", b"bca", b"\xc3", b"\xa9", b"xx", b"cab")

    def encode(self, text):
        raise NotImplementedError


def scripted(output, eos_token_ids=(0,), **fields):
    """What a request with these stops is given if the model writes `output`."""
    automaton = stop_automaton(Request(prompt=[], **fields), eos_token_ids)
    table = StopMatcher(2, len(Words.token_bytes), Words())
    table.open(1, automaton)
    for number, token_id in enumerate(output, 1):
        if table.advance(np.array([0, token_id])):
            told = read_output(automaton, output[:number], Words(), has_stopped=True)
            return Decoded(
                output[:number], told.text.decode(errors="replace"), "stop", told.stop_reason
            )
    told = read_output(automaton, output, Words(), has_stopped=False)
    return Decoded(output, told.text.decode(errors="replace"), "length", told.stop_reason)


CASES = [
    # output, stops, tokens kept, text, stop_reason (... if it ends by length)
    ([2, 3, 4], {"stop_token": 3}, 2, "a", 3),
    ([2, 2, 2, 3], {"stop_sequence": [2, 2, 3]}, 4, "a", [2, 2, 3]),
    ([2, 3, 4], {"stop_sequence": [[3, 4], [2, 3]]}, 2, "", [2, 3]),
    ([2, 3, 4], {"stop_sequence": [[2, 3, 4, 4], [5]]}, 3, "abc", ...),  # longer than the output
    ([2, 3, 4], {"stop_token": 4, "stop_sequence": [3, 4]}, 3, "a", [3, 4]),  # the longest
    ([2, 3, 4], {"stop_token": 4, "stop": "c"}, 3, "ab", 4),  # equally long: stop_token first
    ([2, 3, 4], {"stop_sequence": ["c"], "stop": ["c"]}, 3, "ab", "c"),
    ([2, 3, 4], {"stop": ["c", "bc"]}, 3, "a", "bc"),
    # the earliest byte: "aab" and "b" end there
    ([2, 5, 4], {"stop": ["bc", "aab", "b"]}, 2, "", "aab"),
    ([2, 5, 4], {"stop": ["c", "b"]}, 2, "aa", "b"),
    ([2, 5, 4], {"stop_token": 5, "stop": "b"}, 2, "aa", "b"),  # inside the token
    ([4, 6, 3], {"stop": "cb"}, 2, "", "cb"),  # across a boundary
    ([2, 7, 8, 3], {"stop": "é"}, 3, "a", "é"),  # a character in two tokens
    ([2, 7, 3, 8], {"stop": "é"}, 4, "a\ufffdb\ufffd", ...),
    ([2, 7, 8], {"stop_token": 8}, 3, "a\ufffd", 8),  # the stop cuts a character in two
    ([2, 0, 3], {}, 2, "a", None),
    ([2, 0, 3], {"ignore_eos": True}, 3, "ab", ...),
    ([2, 0, 3], {"stop_token": 0}, 2, "a", 0),  # what the request names goes before EOS
    ([2, 0, 3], {"stop_sequence": [2, 0]}, 2, "", [2, 0]),
    ([2, 4, 3], {"eos_token_ids": (4,)}, 2, "a", None),
    ([2, 4, 3], {"eos_token_ids": (4,), "stop": "c"}, 2, "a", "c"),
    ([2, 4, 3], {"eos_token_ids": (4,), "stop": "ac"}, 2, "", "ac"),
    ([2, 2, 3], {"stop": "aab", "stop_sequence": [2, 3]}, 3, "", "aab"),
]


@pytest.mark.parametrize(("output", "stops", "num_tokens", "text", "reason"), CASES)
def test_which_stop_wins(output, stops, num_tokens, text, reason):
    finish = "length" if reason is ... else "stop"
    expected = Decoded(output[:num_tokens], text, finish, None if reason is ... else reason)
    assert scripted(output, **stops) == expected


def test_stop_sequence_in_all_its_forms():
    forms = [[1, 2], [[1, 2], [3]], "ab", ["ab", "c"]]
    automata = [stop_automaton(Request(prompt="", stop_sequence=form), ()) for form in forms]
    assert [[way.pattern for way in automaton.exits[0]] for automaton in automata] == [
        [(1, 2)],
        [(1, 2), (3,)],
        [b"ab"],
        [b"ab", b"c"],
    ]


def test_stops_are_the_exits_of_one_state_in_the_documented_order():
    request = Request(prompt="", stop_token=[7, 8], stop_sequence=[[1, 2]], stop=["x", "y"])
    automaton = stop_automaton(request, (0,))
    assert automaton.names == ()
    assert [way.stop_reason for way in automaton.exits[0]] == [7, 8, [1, 2], "x", "y", None]
    assert {way.target for way in automaton.exits[0]} == {END}


def test_equal_requests_have_equal_automata():
    fields = {"stop": ["a"], "states": {"s": [Transition("b", "s")]}}
    one, other = (stop_automaton(Request(prompt=p, **fields), (0,)) for p in ("", "else"))
    assert one == other
    assert hash(one) == hash(other)
    assert one != stop_automaton(Request(prompt="", **fields), ())


THINKING = {
    "*": [("<tool>", "tool")],
    "normal": [("<think>", "think")],
    "think": [("</think>", "normal")],
    "tool": [("</tool>", None)],
}

STATE_CASES = [
    # states, other fields, output, text, stop_reason, segments
    (THINKING, {}, "hi", "hi", None, ["normal:hi"]),
    (THINKING, {}, "<think>h</think>y", "<think>h</think>y", None, ["think:h", "normal:y"]),
    (THINKING, {}, "so <tool>f()</tool>x", "so <tool>f()", "</tool>", ["normal:so ", "tool:f()"]),
    (THINKING, {}, "</think></tool>", "</think></tool>", None, ["normal:</think></tool>"]),
    (THINKING, {}, "a<thin", "a<thin", None, ["normal:a<thin"]),  # cut off: it is text
    (THINKING, {}, "<think>", "<think>", None, ["think:"]),  # all are empty: the last one
    (THINKING, {"stop": "!"}, "a!b", "a", "!", ["normal:a"]),  # stops end every state
    (THINKING, {"stop": "!"}, "<think>a!b", "<think>a", "!", ["think:a"]),
    (THINKING, {"initial_state": "tool"}, "f</tool>", "f", "</tool>", ["tool:f"]),
    ({"a": [("x", "b")], "b": [("x", "a")]}, {}, "1xx2x3", "1xx2x3", None, ["a:1", "a:2", "b:3"]),
    ({"a": [([120], "b")], "b": []}, {}, "1x2x", "1x2x", None, ["a:1", "b:2x"]),
    ({"a": [([49, 120], None)]}, {}, "21x3", "2", [49, 120], ["a:2"]),
    ({"a": [("x", "b")], "b": []}, {"stop": "x"}, "1x", "1", "x", ["a:1"]),  # stops come first
    ({"a": [("1x", "b")], "b": []}, {"stop": "x"}, "1x2", "1x2", None, ["b:2"]),  # the longest does
    ({"*": [("x", None)], "a": [("x", "b")], "b": []}, {}, "1x2x", "1x2", "x", ["a:1", "b:2"]),
    ({"a": [], "b": []}, {}, "12", "12", None, ["a:12"]),
]


def automaton_of(states, **fields):
    transitions = {name: [Transition(*way) for way in ways] for name, ways in states.items()}
    return stop_automaton(Request(prompt="", states=transitions, **fields), ())


def read_alone(automaton, tokens, tokenizer=BYTES):
    """Read tokens up to the automaton's end."""
    reader = StopReader(automaton, tokenizer.token_bytes)
    progress = StopProgress()
    for number, token_id in enumerate(tokens, 1):
        progress = reader.read(progress, token_id).progress
        if progress is None:
            return read_output(automaton, tokens[:number], tokenizer, has_stopped=True)
    return read_output(automaton, tokens, tokenizer, has_stopped=False)


@pytest.mark.parametrize(("states", "fields", "output", "text", "reason", "segments"), STATE_CASES)
def test_states(states, fields, output, text, reason, segments):
    told = read_alone(automaton_of(states, **fields), list(output.encode()))
    assert (told.text.decode(), told.stop_reason) == (text, reason)
    assert [f"{state}:{piece.decode()}" for state, piece, _ in told.segments] == segments
    assert all(bytes(tokens) == piece for _, piece, tokens in told.segments)


class Marked:
    """Tokens that go over markers, and two, 5 and 6, that have no text."""

    token_bytes = (b"a", b"b<", b"x>c", b"<x><y>d", b"\xc3", b"", b"")

    def encode(self, text):
        raise NotImplementedError


TOKEN_CASES = [
    # the way from s, tokens, segments
    ("<x>", [0, 1, 2, 0], [("s", b"ab", [0, 1]), ("t", b"ca", [2, 0])]),
    ("<x>", [3], [("t", b"<y>d", [3])]),  # one token, nothing before the marker
    ("b<x>", [0, 1, 2], [("s", b"a", [0]), ("t", b"c", [2])]),
    ("<x>", [5, 1, 6, 2, 5], [("s", b"b", [5, 1]), ("t", b"c", [2, 5])]),  # 6 is in the marker
    ([5], [0, 5, 6, 0], [("s", b"a", [0]), ("t", b"a", [6, 0])]),
    ([0, 5], [0, 6, 0, 5], [("s", b"a", [0, 6])]),
    ("<x>", [4, 3, 4], [("s", b"\xc3", [4]), ("t", b"<y>d\xc3", [3, 4])]),
]


@pytest.mark.parametrize(("on", "tokens", "segments"), TOKEN_CASES)
def test_the_tokens_of_a_segment(on, tokens, segments):
    automaton = automaton_of({"s": [(on, "t")], "t": []})
    told = read_alone(automaton, tokens, Marked())
    assert told.segments == [StateText(*segment) for segment in segments]


def test_a_stop_that_may_not_act_yet_is_text_and_may_go_on():
    automaton = stop_automaton(Request(prompt="", stop=["aa"]), ())
    endless = StopReader(automaton.endless, BYTES.token_bytes)
    progress = endless.read(endless.read(StopProgress(), 97).progress, 97).progress
    assert StopReader(automaton, BYTES.token_bytes).read(progress, 97).progress is None
    assert endless.read(progress, 98).progress == StopProgress()
    told = read_output(automaton, [97, 97, 97], BYTES, has_stopped=True)
    assert (told.text, told.stop_reason) == (b"a", "aa")


def test_a_pattern_from_which_nothing_goes_on_is_no_place_of_its_own():
    automaton = stop_automaton(Request(prompt="", stop=["ba"]), ())
    endless = StopReader(automaton.endless, BYTES.token_bytes)
    assert endless.read(endless.read(StopProgress(), 98).progress, 97).progress == StopProgress()


@pytest.mark.parametrize("block", mostly_heavy(range(5), 0))
def test_what_is_read_and_told_is_what_the_slow_reader_finds(block):
    """10,000 outputs of automata in which everything overlaps."""
    for seed in range(block * 2000, block * 2000 + 2000):
        case = random_case(seed)
        slow = SlowReader(case.automaton, PIECES, case.skip, case.min_tokens)
        ending = StopReader(case.automaton, PIECES.token_bytes)
        endless = StopReader(case.automaton.endless, PIECES.token_bytes)
        progress = StopProgress(skip=case.skip)
        for number, token_id in enumerate(case.tokens, 1):
            slow.read(token_id)
            reader = endless if number < case.min_tokens else ending
            progress = reader.read(progress, token_id).progress
            assert (progress is None) == slow.has_ended, (seed, number)
            if slow.has_ended:
                break
        told = read_output(
            case.automaton, slow.tokens, PIECES, has_stopped=slow.has_ended, skip=case.skip
        )
        assert (told.text, told.stop_reason) == (slow.final_text(), slow.stop_reason()), seed
        if case.automaton.names:
            segments = slow.segments()
            kept = [segment for segment in segments if segment[1] or segment[2]]
            assert told.segments == (kept or segments[-1:]), seed
