"""`batchdecode schema`: the JSON Schema of what goes in and comes out."""

from typing import Annotated, Literal

import typer

from ..help import as_command


def schema(
    kind: Annotated[
        Literal["request", "result", "trace"],
        typer.Argument(metavar="request|result|trace", help="Lines of which file."),
    ],
) -> None:
    """Print the JSON Schema of one line of a file."""
    from batcher.formats.schema import encode_schema  # noqa: PLC0415 - --help starts without it

    from ..running.output import stdout_sink  # noqa: PLC0415 - as above

    stdout_sink().write(encode_schema(kind).encode())


COMMAND = as_command(schema)
