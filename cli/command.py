"""A command: a function, the record of its options, and what either parser makes of a line.

Rule: typer is imported only to parse what `usual_line` does not, so that a plain run starts soon.
"""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

from .config import model_settings
from .help import TOLD, OptionGroup, Told


class Parameter:
    """An argument or option of a command.

    kind: its type.  told: what was declared of it.  default: a value, or REQUIRED.
    """

    def __init__(self, name: str, kind: Any, field: Any) -> None:
        self.name, self.kind, self.default = name, kind, field.default
        self.told: Told = field.metadata[TOLD]

    @property
    def flags(self) -> tuple[str, ...]:
        """What stands for it in a line: its name, unless another is declared; not an argument's."""
        if self.told.is_argument:
            return ()
        declared = self.told.flags
        has_name = any(flag.startswith("--") for flag in declared)
        return declared if has_name else (f"--{self.name.replace('_', '-')}", *declared)


class Command:
    """A command whose arguments and options are the fields of a dataclass.

    parameters: them all, in order.
    examples: command lines that help shows.  notes: paragraphs at the end of all of the help.
    below: commands whose names stand where its argument would.
    respell: what it understands of an argument beyond typer, as arguments for it.
    takes_dashes: whether what looks like an option, and is none of its own, is an argument.

    A field model_settings, llm_settings, transformer_settings or hf_settings takes what the file of
    `config` holds for models, and is no option.  preset takes the names of the options that are set
    by that file or the environment, and not by the line.
    """

    def __init__(
        self,
        function: Callable[[Any], int | None],
        record: type,
        *,
        examples: Sequence[str],
        notes: Sequence[str],
        below: Mapping[str, "Command"],
        respell: Callable[[str], list[str]] | None,
        takes_dashes: bool,
    ) -> None:
        self.function, self.below, self.respell = function, below, respell
        self.examples, self.notes, self.takes_dashes = examples, notes, takes_dashes
        self._record = record  # a dataclass
        self._field_names = {field.name for field in fields(record)}
        self._groups: dict[str, OptionGroup] = {}
        self.parameters: list[Parameter] = []
        for field in fields(record):
            kinds, told = {field.name: (field.type, field)}, field.metadata.get(TOLD)
            if told is None:
                continue
            if isinstance(told, OptionGroup):
                self._groups[field.name], kinds = told, told.kinds
            self.parameters += [Parameter(name, *kind) for name, kind in kinds.items()]

    @property
    def summary(self) -> str:
        """What it does, in a sentence."""
        return " ".join((self.function.__doc__ or "").partition("\n\n")[0].split())

    def is_bare(self, given: Mapping[str, Any]) -> bool:
        """Return whether no argument is `given`, and INPUT is not either, but somebody at stdin.

        Who that is wants to be shown the help.
        """
        names = [each.name for each in self.parameters if each.told.is_argument]
        return "input" in names and all(given.get(name) is None for name in names) and os.isatty(0)

    @cached_property
    def parser(self) -> Any:
        """The command as typer has it."""
        from .typer_command import typer_command  # noqa: PLC0415 - see the rule above

        return typer_command(self)

    def carry_out(self, given: dict[str, Any], preset: set[str]) -> int:
        """Call the function with the record of what was given; return the exit status.

        given: the value of each parameter.  preset: which of them the line does not say.

        Raises:
            BatchdecodeError: that makes no sense, or the function raises it.
        """
        if "preset" in self._field_names:
            given["preset"] = preset
        for field, group in self._groups.items():
            values = {name: given.pop(name) for name in group.kinds}
            given[field] = group.read({n: v for n, v in values.items() if v is not None})
        if "model_settings" in self._field_names and given["config"] is not None:
            sections = model_settings(given["config"])
            given |= {name: v for name, v in sections.items() if name in self._field_names}
        gc.freeze()  # what is imported by now is never looked through again, at the end either
        gc.enable()
        return self.function(self._record(**given)) or 0
