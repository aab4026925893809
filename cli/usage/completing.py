"""What may stand where a person presses TAB: commands, options, values and files.

Rule: a shell is answered in lines.  One that begins with `=` is a word that may stand there, then a
tab and what it means; one that begins with `*` is a pattern: files that match it, and folders.
"""

import os
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import typer
from typer._click.shell_completion import _resolve_context, _resolve_incomplete

from ..app import app
from ..commands import NAMES, command_of
from .candidates import Asked, Candidates, CompletionItem, Files, candidates_of

_GIVEN = "COMMANDLINE"  # as typer calls where the value of an option is from


class CommandLine(NamedTuple):
    """The words before, at and after the cursor, without the name of the command.

    cut: how many characters of the word at the cursor the shell takes for another word.
    """

    before: list[str]
    word: str
    after: list[str]
    cut: int = 0


def answer(shell: str, arguments: list[str]) -> str:
    """Return what may stand at the cursor, in lines as the scripts of `completion` read them.

    arguments: from bash its line and the place of the cursor in it; from others how many words
    stand before the cursor, and all words.
    """
    line = _line_of_bash(*arguments) if shell == "bash" else _line_of_words(*arguments)
    return "".join(f"{text}\n" for text in _answers(line))


def _line_of_words(count: str, *words: str) -> CommandLine:
    place = int(count)
    word, *after = words[place:] or [""]
    return CommandLine(list(words[:place]), word, after)


def _line_of_bash(text: str, place: str) -> CommandLine:
    """Return a line of bash, which takes what follows a `:` or `=` for a word of its own."""
    _, *before, word = _split(text[: int(place)])
    after = _split(text[int(place) :])[1:]
    breaks = os.environ.get("COMP_WORDBREAKS", "")
    return CommandLine(
        before, word, after, cut=max((word.rfind(char) for char in breaks), default=-1) + 1
    )


def _split(text: str) -> list[str]:
    """Return the words of a part of a line, of which the last is not at its end, maybe empty."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = list[str]()
    try:
        words += lexer
    except ValueError:  # a quote is open
        return [*words, lexer.token]
    return [*words, ""] if not text or text[-1].isspace() else words


def _answers(line: CommandLine) -> Iterator[str]:
    root = typer.main.get_command(app)
    context: Any = _resolve_context(root, {}, "batchdecode", line.before)
    told, incomplete = _resolve_incomplete(context, [*line.before], line.word)
    start = line.word.removesuffix(incomplete)  # what stands before a value: --option=
    for each in _candidates(told, context, Asked(incomplete, [*line.before, *line.after])):
        if isinstance(each, Files):
            yield f"*{each.pattern}"
        elif each.text.startswith(incomplete):
            yield f"={(start + each.text)[line.cut :]}\t{' '.join(each.meaning.split())}"


def _candidates(told: Any, context: Any, asked: Asked) -> Candidates:
    """Return what may be the value of a parameter, or an option or a command that may come."""
    command = context.command
    is_option = asked.incomplete.startswith("-")
    if len(asked.words) == 1 and not is_option:  # right behind its name
        below = getattr(command, "subcommands", {})
        yield from (CompletionItem(name, each.summary) for name, each in below.items())
    if told is not command:
        yield from candidates_of(told, command.offers.get(told.name, ""), asked)
    elif is_option:
        for param in command.get_params(context):
            source = context.get_parameter_source(param.name)
            is_given = source is not None and source.name == _GIVEN and not param.multiple
            if param.param_type_name == "option" and not (param.hidden or is_given):
                yield from (
                    CompletionItem(flag, param.help.partition("  [")[0]) for flag in param.opts
                )
    elif context.parent is None:
        found = ((name, command_of(name)) for name in NAMES)
        yield from (CompletionItem(name, each.summary) for name, each in found if each is not None)
