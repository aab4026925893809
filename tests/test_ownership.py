"""Each field of a sequence is assigned by its one writer, whatever the docstrings say.

Assignments are found by the names of attributes, in the folders whose code may know sequences.
"""

import ast
from pathlib import Path

import pytest
from msgspec.structs import fields

import batcher
from batcher.engine.sequence import More, Sequence
from batcher.planning.simulated_sequence import SimulatedSequence
from batcher.remote.engine import RemoteSequence
from batcher.scheduling.sequence import Schedulable

BATCHER = Path(batcher.__file__).parent
FOLDERS = (
    "engine/",
    "planning/simul",
    "planning/workload",
    "remote/",
    "scheduling/",
)  # no other code assigns their fields

# Who may write -> what: "asked" when it is made, and at its arrival; "stands"; "generated".
INPUTS = """
    id index input_index arrival_time num_prompt_tokens max_tokens priority deadline cache_salt
    skips_prefix_cache segment_ends role others num_slots has_siblings
    request prompt automaton arrive_reason is_streamed more replayed num_healed healing
    prompt_logprobs failure overflow limit dropped has_default_limit
"""
ARRIVAL = "arrived_step"
SCHEDULER = """
    state slot admitted_step first_token_step num_tokens num_computed_tokens num_cached_tokens
    cached_from
    offset is_decoding last_decode_step queue_number admission block_table group_tables
    num_cached_blocks parent prefix
"""
MODEL_RUNNER = "generated suspended jumped_step"
SIMULATION = """
    output session think_time num_lasting draft_tokens history pieces ends admitted_ticks
    first_token_ticks end_ticks has_failed fits
    came num_cached_at_first num_preemptions num_lost_tokens
"""
REMOTE = "reply num_attempts sent"
WRITERS = {
    (
        "engine/sequence.py",
        "engine/sessions.py",
        "remote/engine.py RemoteEngine",
        "planning/simulated_sequence.py",
        "planning/workload.py",
    ): INPUTS,
    ("engine/engine.py", "remote/engine.py RemoteEngine"): ARRIVAL,
    ("remote/engine.py RemoteEngine",): REMOTE,
    ("scheduling/", "remote/engine.py", "planning/replicas.py ReservedBlocks"): SCHEDULER,
    ("engine/model_runner.py", "engine/rows.py"): MODEL_RUNNER,
    ("planning/",): SIMULATION,
}
WRITERS_OF = {name: where for where, names in WRITERS.items() for name in names.split()}


def test_each_field_has_one_writer():
    listed = [name for names in WRITERS.values() for name in names.split()]
    assert len(listed) == len(WRITERS_OF)
    known = {
        field.name
        for kind in (Schedulable, Sequence, More, SimulatedSequence, RemoteSequence)
        for field in fields(kind)
    }
    assert set(listed) == known


def assigned(tree):
    """The attributes of others than `self` that a module assigns, changes in place or deletes.

    Each comes with the class or function that does so.
    """
    for part in tree.body:
        for node in ast.walk(part):
            is_written = isinstance(node, ast.Attribute) and isinstance(
                node.ctx, ast.Store | ast.Del
            )
            if is_written and ast.unparse(node).partition(".")[0] != "self":
                yield getattr(part, "name", ""), node


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_field_is_assigned_where_it_may_be(folder):
    found = set()
    for path in sorted(BATCHER.rglob("*.py")):
        module = path.relative_to(BATCHER).as_posix()
        if not module.startswith(folder):
            continue
        for part, attribute in assigned(ast.parse(path.read_text())):
            writers = WRITERS_OF.get(attribute.attr)
            if writers is not None:
                where = f"{module}:{attribute.lineno}: {ast.unparse(attribute)}"
                assert f"{module} {part}".startswith(writers), (
                    f"{where} is for {' and '.join(writers)}"
                )
                found.add(attribute.attr)
    assert found


def test_others_know_no_sequence_that_they_could_change():
    for path in sorted(BATCHER.rglob("*.py")):
        module = path.relative_to(BATCHER).as_posix()
        if module.startswith(FOLDERS):
            continue
        for part, attribute in assigned(ast.parse(path.read_text())):
            writers = WRITERS_OF.get(attribute.attr)
            if writers and f"{module} {part}".startswith(writers):
                continue
            holder = ast.unparse(attribute.value)
            assert writers is None or not holder.endswith(("sequence", "first", "row")), module
