"""`batchdecode schema`: the JSON Schema of what goes in and comes out."""

from typing import Annotated, Literal

from msgspec import Struct

from ..help import argument
from ..options import as_command


class SchemaOptions(Struct, frozen=True, kw_only=True):
    """The options of `batchdecode schema`."""

    kind: Annotated[
        Literal["request", "result", "trace"],
        argument("Lines of which file.", "request|result|trace"),
    ]


def schema(options: SchemaOptions) -> None:
    """Print the JSON Schema of one line of a file."""
    from batcher.formats.schema import encode_schema  # noqa: PLC0415 - --help starts without it

    from ..running.output import stdout_sink  # noqa: PLC0415 - as above

    stdout_sink().write(encode_schema(options.kind).encode())


COMMAND = as_command(schema, SchemaOptions)
