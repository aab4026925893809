"""`batchdecode schema`: the JSON Schema of what goes in and comes out."""

from dataclasses import dataclass
from typing import Literal

from ..help import REQUIRED, argument
from ..options import as_command


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """The options of `batchdecode schema`."""

    kind: Literal["request", "result", "trace"] = argument(
        "Lines of which file: request, result or trace.", "KIND", REQUIRED
    )


def schema(options: SchemaOptions) -> None:
    """Print the JSON Schema of one line of a file."""
    from batcher.requests.schema import encode_schema  # noqa: PLC0415 - --help starts without it

    from ..printing import print_text  # noqa: PLC0415 - as above

    print_text(encode_schema(options.kind))


COMMAND = as_command(schema, SchemaOptions)
