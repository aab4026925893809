"""GBNF keeps its language on the way to Lark, and its mistakes are told with their place."""

import itertools
import re
import time

import pytest
from constrained import language

from batcher.decoding.grammars import GbnfError, gbnf_to_lark

REGULAR = [
    # a grammar without recursion, the same as a regex
    ('root ::= "ab" | "a" "b"*', "ab|ab*"),
    ('root ::= x x?\nx ::= "a" | "ab" # the longest lexeme would hide "a" "bab"', "(a|ab)(a|ab)?"),
    ('root ::= word+ "b"\nword ::= [a-b]', "[ab]+b"),  # a greedy lexeme would eat the last b
    ('root ::= ("a" | "b" "c"){2,3}', "(a|bc){2,3}"),
    ('root ::= "a"{2} "b"{1,} "c"{0,1}', "a{2}b+c?"),
    ('root ::=\n  "a"\nother ::= "b"', "a"),
    ("root ::= (\n  [^a]\n | \n  #no\n [a] [a]\n)*", "([^a]|aa)*"),
    (r'root ::= "\x61\u0062" "\U00000063"', "abc"),
    ('root ::= a-b\na-b ::= A_B\nA_B ::= "c"', "c"),
    ('root ::= "a"*? "b"', "a*b"),
    ("root ::= [-a] [b-]", "[-a][b-]"),
    ('root ::= ("a" | "b") ("c" | "")', "[ab]c?"),
    ('root ::= "a"\n  | "b"\n\n# no\n|\n"c"\nx ::= "d"', "a|b|c"),  # bars that begin a line
    ('root ::= x "a"\nx ::= ("b"\n | "c")\r\n\t| "a"', "[abc]a"),
    ('root ::= "a"{0,0} "b"', "b"),
    ('root ::= ("a" | b){0} "c"*{00,0}*\nb ::= b', ""),
]


def strings(alphabet, max_length):
    for length in range(max_length + 1):
        yield from map("".join, itertools.product(alphabet, repeat=length))


def texts_of(grammar, alphabet, max_length):
    """The strings over an alphabet that keep a grammar."""
    is_whole = language("gbnf", grammar)
    return {text for text in strings(alphabet, max_length) if is_whole(text.encode())}


@pytest.mark.parametrize(("grammar", "regex"), REGULAR)
def test_a_grammar_without_recursion_is_a_regex(grammar, regex):
    expected = {text for text in strings("abc-\n", 3) if re.fullmatch(regex, text)}
    assert expected
    assert texts_of(grammar, "abc-\n", 3) == expected


@pytest.mark.parametrize(
    ("grammar", "is_in"),
    [
        ('root ::= "(" root ")" root | ""', lambda s: balanced(s, "(", ")")),
        ('root ::= "a" root "b" | ""', lambda s: s == "a" * (len(s) // 2) + "b" * (len(s) // 2)),
        ('root ::= root "a" | "ab"', lambda s: re.fullmatch("aba*", s)),  # left recursion
        ('root ::= tail "b"\ntail ::= [ab] tail | ""', lambda s: re.fullmatch("[ab]*b", s)),
        ('root ::= "ab" root | "a" "bc"', lambda s: re.fullmatch("(ab)*abc", s)),
        ('root ::= "aa" root | "a" | ""', lambda s: re.fullmatch("a*", s)),
        (
            'root ::= "a" root "a" | "b" root "b" | ""',
            lambda s: s == s[::-1] and len(s) % 2 == 0 and "c" not in s,
        ),
    ],
)
def test_a_grammar_with_recursion_keeps_its_language(grammar, is_in):
    alphabet = "()" if "(" in grammar else "abc"
    expected = {text for text in strings(alphabet, 6) if is_in(text)}
    assert expected
    assert texts_of(grammar, alphabet, 6) == expected


def balanced(text, opening, closing):
    depth = 0
    for character in text:
        depth += {opening: 1, closing: -1}[character]
        if depth < 0:
            return False
    return depth == 0


def test_quotes_slashes_and_control_characters_survive():
    text = '"/\\\n\t\r[]{}é€😀\x01<|end|>'
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\x01", "\\x01")
    assert language("gbnf", f'root ::= "{escaped}"')(text.encode())
    in_class = "".join(f"\\U{ord(character):08x}" for character in text)
    is_whole = language("gbnf", f"root ::= [{in_class}]{{{len(text)}}}")
    assert is_whole(text.encode())
    assert not is_whole(b"x")


def test_a_grammar_without_recursion_becomes_a_single_lexeme_which_is_the_fastest():
    assert gbnf_to_lark('root ::= x x\nx ::= "a"').startswith("start: TERMINAL_0\nTERMINAL_0: ")
    assert "TERMINAL" not in gbnf_to_lark('root ::= x\nx ::= "a" x | "b"')


@pytest.mark.parametrize(
    ("grammar", "output"),
    [
        ('root ::= "a" root?', "aa"),
        ('root ::= ("a" | root "b") "c"', "ac"),
        ('root ::= "a" | root "b" | root "c"', "abc"),
        ('root ::= root "b" | root "c" | "a"', "abc"),
        ('root ::= "a" root*', "a"),
        ('root ::= ("a" root){00,2}', ""),
        ('root ::= "(" a ")"\na ::= "x" | root a', "(x)"),
        ('root ::= "a" | never\nnever ::= "b" never', "a"),
    ],
)
def test_a_rule_that_leads_to_itself_is_well_if_it_can_stop(grammar, output):
    assert language("gbnf", grammar)(output.encode())


def test_groups_may_be_nested_as_deep_as_is_said():
    grammar = "root ::= " + "(" * 25 + '"a"' + ")*" * 25
    is_whole = language("gbnf", grammar)
    assert is_whole(b"aa")
    assert not is_whole(b"b")
    assert language("gbnf", "root ::= " + '("a")' * 30)(b"a" * 30)


def test_a_long_row_of_repetitions_is_refused_where_it_becomes_too_long():
    with pytest.raises(GbnfError, match=r"line 1, column 38: more than 25 repetitions of one item"):
        gbnf_to_lark('root ::= "a"' + "*" * 10_000)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_long_chain_of_rules_takes_time_in_proportion(is_reversed):
    began = time.perf_counter()
    numbers = range(3000)
    tops = [f'r{n} ::= r{n + 1} "a" r{n + 1 if is_reversed else 3000}' for n in numbers]
    gbnf_to_lark("\n".join(["root ::= r0", *tops, 'r3000 ::= "b"']))
    assert time.perf_counter() - began < 1  # it was minutes when every rule was tried each time


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "line 1, column 1: no rule is called 'root'"),
        ('start ::= "a"', "line 1, column 14: no rule is called 'root'"),
        ('root ::= "a"\n\n  ) x', "line 3, column 3: expected the name of a rule"),
        ('root ::= "a"' + "#" * 10_000 + "\n)", "line 2, column 1: expected the name of a rule"),
        ("root ::= x", "line 1, column 10: no rule is called 'x'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: a second rule is called 'root'"),
        ('root = "a"', "line 1, column 6: expected '::='"),
        ('root ::= "a', "line 1, column 12: expected a '\"' to close the text"),
        ("root ::= [a", "line 1, column 12: expected a ']' to close the class"),
        ('root ::= ("a"', "line 1, column 14: expected ')'"),
        ("root ::= []", "line 1, column 10: a class without characters"),
        ("root ::= [b-a]", "line 1, column 11: a range whose end comes before its start"),
        ('root ::= "a"{3,2}', "line 1, column 13: a repetition whose maximum is below its minimum"),
        (
            'root ::= "a"{' + "9" * 5000 + "}",
            "line 1, column 13: a repetition count of more than 9",
        ),
        (r'root ::= "\q"', "line 1, column 11: invalid escape sequence"),
        (r'root ::= "\uD800"', "line 1, column 11: an escape that stands for no character"),
        (r'root ::= "\U00110000"', "line 1, column 11: an escape that stands for no character"),
        ("root ::= " + "(" * 26, "line 1, column 36: groups nested more than 25 deep"),
        ("root ::= <think>", "line 1, column 10: references to tokens are not supported"),
        ("root ::= !<[10]>", "line 1, column 10: references to tokens are not supported"),
    ],
)
def test_mistakes_are_told_with_their_place(grammar, message):
    with pytest.raises(GbnfError) as caught:
        gbnf_to_lark(grammar)
    assert str(caught.value).startswith(message)
