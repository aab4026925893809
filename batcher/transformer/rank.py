"""What a rank does: one of several processes that compute a transformer, each its columns.

Rule: it does what it is asked, in the order in which it is, and ends with the process that asks.
"""

import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from batcher.errors import BatchdecodeError, InvariantError, describe
from batcher.processes import become_helper
from batcher.transformer.layers import FloatArray
from batcher.transformer.rank_group import GroupPart, PeerGoneError, RankGroup
from batcher.transformer.transformer import Transformer, Watch

MakeRank = Callable[[RankGroup, Watch], Transformer]
"""Return the transformer of a rank; a function of a module that can be pickled."""


def serve(connection: Connection, part: GroupPart, outer: GroupPart | None, make: MakeRank) -> None:
    """Make the transformer of a rank, and compute what is asked; what a process does.

    outer: of the first rank, which hands over what comes of it.
    """
    become_helper()
    try:
        _serve(connection, RankGroup(part), None if outer is None else RankGroup(outer), make)
    except (EOFError, ConnectionError, PeerGoneError):
        pass
    except BatchdecodeError as error:
        _send_last(connection, ("error", str(error)))
    except Exception as error:  # noqa: BLE001 - it is raised again where the calls come from
        _send_last(connection, ("raised", describe(error), traceback.format_exc()))


def _serve(
    connection: Connection, group: RankGroup, outer: RankGroup | None, make: MakeRank
) -> None:
    transformer = make(group, lambda number, total: connection.send(("read", number, total)))
    connection.send("made")
    kept: dict[int | None, Any] = {None: None}  # stores and states
    makers = {"store": transformer.new_store, "states": transformer.new_states}
    while True:
        match connection.recv():
            case "new", kind, number:
                kept[number] = makers[kind]()
            case "drop", number:
                del kept[number]
            case "call", number, method, *arguments:
                getattr(kept[number], method)(*arguments)
            case "forward", spans, store, states:
                hidden = transformer.forward(spans, kept[store], kept[states])
                _hand_over(hidden, outer)
            case "logits", hidden:
                _hand_over(transformer.logits(hidden), outer)
            case message:
                raise InvariantError(f"a rank is asked {message}")


def _hand_over(rows: FloatArray, outer: RankGroup | None) -> None:
    if outer is not None:
        outer.all_gather(rows, (0, len(rows), len(rows)))


def _send_last(connection: Connection, message: object) -> None:
    with suppress(OSError):
        connection.send(message)
