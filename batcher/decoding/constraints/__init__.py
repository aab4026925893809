"""Outputs that keep a JSON schema, a regex, a list of choices or a grammar, through llguidance.

llguidance is an optional dependency (`pip install 'batchdecode[grammar]'`), imported when the first
constraint is compiled.
"""

from batcher.decoding.constraints.compiler import (
    CompiledConstraint,
    ConstraintCompiler,
    MissingGrammarError,
)
from batcher.decoding.constraints.rows import RowConstraint, allowed_tokens
from batcher.decoding.constraints.source import ConstraintSource, constraint_source, stated_source
from batcher.decoding.constraints.verification import Verifier

__all__ = [
    "CompiledConstraint",
    "ConstraintCompiler",
    "ConstraintSource",
    "MissingGrammarError",
    "RowConstraint",
    "Verifier",
    "allowed_tokens",
    "constraint_source",
    "stated_source",
]
